"""Whatever the files and numbers of a command are, it does its work or refuses them in one line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest
import typer

from pipeloom.cli.app import run

from .commands import CASES, draw_case

LONGEST = 2400
"""Letters of all messages of a command."""


def fuzz(name: str, seeds: range, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for seed in seeds:
        words = draw_case(name, Random(f"{name} {seed}"), folder)
        code = run(words)
        said = capsys.readouterr()
        assert code in (0, 1, 2), (seed, words, said.err)
        if code == 2:
            last = said.err.strip().splitlines()[-1]
            assert last.startswith("pipeloom"), (seed, words, said.err)
            assert len(last) < LONGEST, (seed, words)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELOOM_TRACEBACK", "1")

    def stop(*_: object, **__: object) -> NoReturn:
        raise typer.Exit

    # Ranks are not started.
    monkeypatch.setattr(import_module("pipeloom.training.run"), "launch", stop)


@pytest.mark.parametrize("name", CASES)
def test_unchanged_files_do(name: str, tmp_path: Path) -> None:
    for file, text in CASES[name].files.items():
        (tmp_path / file).write_text(text)
    assert run(list(CASES[name].words)) == 0


@pytest.mark.parametrize("name", CASES)
def test_no_files_are_an_internal_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(name, range(6), capsys, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_no_files_of_many_are_an_internal_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(name, range(6, 200), capsys, tmp_path)
