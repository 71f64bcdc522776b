"""docs/command-line.md lists every command, and its steps run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pipeloom.cli.app import _HIDDEN, COMMANDS, commands, make_app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command-line.md").read_text()
BLOCKS = [part.split("```")[0] for part in PAGE.split("```sh\n")[1:]]
BLOCK = next(block for block in BLOCKS if "pipeloom solve" in block).replace("\\\n", " ")
STEPS = [words for line in BLOCK.splitlines() if (words := shlex.split(line, comments=True))]
FROM_THE_DEMO = ("make", "source", "plan", "verify", "report")
"""What needs an installation, or the run that `make demo` leaves."""


def test_it_lists_every_command() -> None:
    listed = set(re.findall(r"^\| `([a-z]+)` \|", PAGE, re.MULTILINE))
    assert listed >= set(COMMANDS) - _HIDDEN
    assert listed <= set(commands()) | {"bench", "reproduce"}


@pytest.mark.parametrize("words", [step[1:] for step in STEPS if step[0] == "pipeloom"], ids=lambda words: words[0])
def test_its_steps_have_options_that_exist(words: list[str]) -> None:
    name, *arguments = words
    command = typer.main.get_command(make_app([name])).commands[name]  # type: ignore[attr-defined]
    given, left, _ = command.make_parser(typer.Context(command)).parse_args(arguments)
    assert left == []
    assert all(given[each.name] is not None for each in command.params if each.required)


@pytest.mark.full
@pytest.mark.ranks
def test_its_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that has of the clone what they name, but for those that need the run of the demo."""
    for name in ("benchmarks/instances/small-vlm-0.json.gz", "examples"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for program, *words in STEPS:
        if program in FROM_THE_DEMO or words[0] in FROM_THE_DEMO:
            continue
        # In new processes, because this one may know the examples' modules from the clone.
        started = {"pipeloom": [sys.executable, "-m", "pipeloom"], "python": [sys.executable]}.get(program, [program])
        subprocess.run([*started, *words], check=True)
    assert {"schedule.json", "page.html", "batches.json", "layout.json", "i.json", "s.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
