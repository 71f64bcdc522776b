"""`pipeloom compare`, and the worked page for a user's own model."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.lab.systems import comparison
from pipeloom.lab.systems.chosen_layout import choose_layout
from pipeloom.search import Evaluations

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model_table"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's files where the commands run, with a model of a few layers so that this is fast."""
    shutil.copy(EXAMPLE / "samples.jsonl", tmp_path)
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["num_hidden_layers"], config["vision_config"]["depth"] = 6, 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_worked_page_runs_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three commands; the last with fewer systems and a shorter search."""
    page = (ROOT / "docs" / "own-model-table.md").read_text()
    commands = [shlex.split(c)[1:] for c in re.findall(r"```sh\n(pipeloom .*)\n```", page)]
    assert [command[0] for command in commands] == ["emulate", "sweep", "compare"]
    last = commands[-1]
    last += ["--systems", "interleaved,nnscaler,optimus,dip,pipeloom-dip-layout", "--budget", "0.05"]
    for command in commands:
        assert run(command) == 0, command
    out = capsys.readouterr().out
    for word in ("iteration", "dp ", "interleaved", "optimus", "pipeloom-dip-layout", "wrote systems.html"):
        assert word in out
    html = (folder / "systems.html").read_text()
    for title in ("Megatron-LM interleaved, by parameters", "nnScaler*", "DIP as published"):
        assert title in html


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "compare",
        "config.json",
        "--systems",
        "1f1b,interleaved-time,fsdp",
        "--pp",
        "2",
        "--microbatches",
        "3",
        "--data",
        "samples.jsonl",
        "--seed",
        "5",
        "--json",
    ]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in document["systems"]] == ["1f1b", "interleaved-time", "fsdp"]
    assert all(0 < row["mfu"] < 1 and row["iteration_s"] > 0 for row in document["systems"])
    assert document["seed"] == 5
    assert (document["device"], document["device_basis"]) == ("H800 SXM5 80GB", "datasheet")
    # The command's old name gives the same.
    old = ["plan", "config.json", "--compare", *command[3:]]
    assert run(old) == 0
    assert json.loads(capsys.readouterr().out) == document


def test_the_chosen_layout_stands_beside_what_others_would_cost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = functools.partial(choose_layout, trial=Evaluations(3), rounds=1)
    monkeypatch.setattr(comparison, "choose_layout", quick)
    monkeypatch.setattr(comparison, "FINAL", Evaluations(3))
    command = [
        "compare",
        "config.json",
        "--systems",
        "pipeloom",
        "--pp",
        "2",
        "--microbatches",
        "3",
        "--budget",
        "0.05",
        "--data",
        "samples.jsonl",
    ]
    assert run([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["systems"]
    chosen, *others = row["layouts"]
    known = [one["planned_s"] for one in row["layouts"] if "planned_s" in one]
    assert chosen["planned_s"] == min(known)
    assert len(others) > 5
    assert run(command) == 0
    out = capsys.readouterr().out
    assert f"layout {chosen['layout']}, of {len(row['layouts'])} tried" in out
    assert "more, in --json" in out
    assert "seed 0. Emulated, not measured: H800 SXM5 80GB, datasheet table." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "nobody"], "'nobody' is none of"),
        (["--compare", "1f1b", "--setup", "x.json"], "given beside --compare"),
        (["--compare", "1f1b", "--data", "samples.jsonl", "--microbatches", "999"], "999 are wanted"),
        (["--compare", "1f1b", "--data", "samples.jsonl", "--tokens", "50"], "a microbatch 50"),
        (["--compare", "1f1b", "--tp", "64", "--pp", "4"], "need 256 devices"),
        (["--data", "samples.jsonl"], "given without --compare"),
        ([], "--out: is missing"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(folder / "config.json"), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1
