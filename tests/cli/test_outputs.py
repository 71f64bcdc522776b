"""No command writes over a file that it reads, nor two results into one file: for every option that names one."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import typer

from pipeloom.cli.app import commands, make_app, run
from pipeloom.errors import InputError
from pipeloom.io import write_text
from pipeloom.runtime.checkpoint.safetensors_files import ShardWriter
from pipeloom.training.record import append_line
from tests.io.documents import TINY, TINY_SCHEDULE

# Of every command: options and arguments that name files to write, and those that name files or folders to read.
FILES: dict[str, tuple[set[str], set[str]]] = {
    "train": ({"runs"}, {"config"}),
    "export": ({"to"}, {"checkpoint", "source"}),
    "plan": ({"out", "html"}, {"samples", "setup", "model", "layout", "profile", "cluster", "params"}),
    "compare": ({"out", "html"}, {"model", "cluster", "data", "now"}),
    "megatron": ({"html"}, {"arguments", "cluster", "samples"}),
    "pack": ({"out"}, {"samples", "setup"}),
    "solve": ({"out"}, {"instance", "params"}),
    "arrange": ({"out", "instance", "schedule", "page"}, {"layers", "params", "cluster"}),
    "profile": ({"out"}, {"config"}),
    "check": (set(), {"instance", "schedule"}),
    "validate": (set(), {"runs"}),
    "simulate": ({"trace", "html", "svg"}, {"instance", "schedule"}),
    "verify": (set(), {"plan", "layout"}),
    "report": ({"trace", "html", "svg"}, {"source", "schedules"}),
    "explain": ({"out", "profile", "html", "trace"}, {"traces", "also"}),
    "emulate": ({"trace", "html"}, {"model", "cluster", "data"}),
    "describe": ({"toml"}, {"model"}),
    "sweep": (set(), {"model", "cluster", "data"}),
    "bench": (set(), set()),
    "reproduce": ({"out"}, set()),
    "calibrate": ({"out", "plot"}, {"evidence", "base"}),
    "doctor": (set(), set()),
    "warmup": (set(), set()),
    "planner": (set(), set()),
}
FOLDERS = {("train", "runs"), ("export", "to"), ("plan", "out"), ("compare", "out"), ("reproduce", "out")}
NEW = "new.file"
# A command line for every file that a command reads; IN stands for that file.
READ = {
    "plan": {
        "setup": ["samples.jsonl", "--setup", "IN"],
        "model": ["samples.jsonl", "--model", "IN", "--layout", "IN", "--profile", "IN", "--tokens", "9"],
    },
    "compare": {"model": ["IN"], "cluster": ["vlm-s", "--cluster", "IN"], "now": ["vlm-s", "--now", "IN"]},
    "megatron": {"arguments": ["IN"], "cluster": ["arguments.txt", "--cluster", "IN"]},
    "pack": {"samples": ["IN", "--tokens", "9"], "setup": ["samples.jsonl", "--setup", "IN"]},
    "solve": {"instance": ["IN", "--budget", "0.1"], "params": ["instance.json", "--budget", "0.1", "--params", "IN"]},
    "arrange": {"layers": ["IN", "--budget", "0.1"], "cluster": ["vlm-s", "--budget", "0.1", "--cluster", "IN"]},
    "profile": {"config": ["IN"]},
    "simulate": {"instance": ["IN", "schedule.json"], "schedule": ["instance.json", "IN"]},
    "report": {"source": ["IN", "schedule.json"], "schedules": ["instance.json", "schedule.json", "IN"]},
    "explain": {"traces": ["IN"]},
    "emulate": {"model": ["IN"], "cluster": ["vlm-s", "--cluster", "IN"], "data": ["vlm-s", "--data", "IN"]},
}
SUFFIX = {"model": ".toml", "cluster": ".toml", "data": ".jsonl", "samples": ".jsonl", "now": ".sh", "params": ".toml"}


COMMANDS = commands()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("instance.json").write_text(json.dumps(TINY))
    Path("schedule.json").write_text(json.dumps(TINY_SCHEDULE))
    Path("samples.jsonl").write_text('{"id": "a", "text_tokens": 3}\n')
    Path("arguments.txt").write_text("--num-layers 4")
    return tmp_path


def parameters(command: str) -> list[Any]:
    app: Any = typer.main.get_command(make_app([command]))
    return list(app.commands[command].params)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_names_a_file_is_known_here(command: str) -> None:
    written, read = FILES[command]
    function = getattr(import_module(COMMANDS[command].module), command)
    paths = {name for name, kind in get_type_hints(function).items() if "Path" in str(kind)}
    assert paths <= written | read
    assert written | read <= {each.name for each in parameters(command)}
    assert not written or command not in READ or READ[command].keys() <= read


def cases() -> list[Any]:
    return [
        # profile imports torch first
        pytest.param(command, read, written, marks=pytest.mark.full if command == "profile" else ())
        for command, lines in READ.items()
        for read in lines
        for written in sorted(FILES[command][0])
        if (command, written) not in FOLDERS
    ]


def command_line(command: str, arguments: list[str], outputs: dict[str, str]) -> list[str]:
    """With a file of its own for every output that the command cannot do without."""
    needed = {each.name: NEW for each in parameters(command) if each.required and each.name in FILES[command][0]}
    if command == "plan":
        needed = {"out": "planned"}
    options = [word for name, file in (needed | outputs).items() for word in (f"--{name}", file)]
    return [command, *arguments, *options]


@pytest.mark.parametrize(("command", "read", "written"), cases())
def test_an_output_on_the_name_of_an_input_is_refused(
    command: str, read: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(f"input{SUFFIX.get(read, '.json')}")
    file.write_text("what is to be kept")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    line = [str(file) if word == "IN" else word for word in READ[command][read]]
    assert run(command_line(command, line, {written: f"./{file}"})) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{file}: is an input of this command and also its output" in said, said
    assert before == {path: path.read_bytes() for path in Path().iterdir()}


@pytest.mark.parametrize("link", ["symbolic", "hard", "dotted", "folder"])
def test_links_lead_to_the_same_file(link: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").mkdir()
    target = Path("link", "other.json")
    if link == "symbolic":
        target.symlink_to(Path("instance.json").absolute())
    elif link == "hard":
        os.link("instance.json", target)
    elif link == "dotted":
        target = Path("link/../instance.json")
    else:
        Path("linked").symlink_to(".")
        target = Path("linked/instance.json")
    assert run(["solve", "instance.json", "--budget", "0.1", "--out", str(target)]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert json.loads(Path("instance.json").read_text()) == TINY


@pytest.mark.parametrize("command", [*READ, "calibrate"])
def test_two_outputs_in_one_file_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    written = sorted(name for name in FILES[command][0] if (command, name) not in FOLDERS)
    lines = READ.get(command, {"": ["--device", "cpu"]})
    line = ["instance.json" if word == "IN" else word for word in next(iter(lines.values()))]
    for one, other in itertools.pairwise(written):
        Path("same").mkdir(exist_ok=True)
        assert run(command_line(command, line, {one: "out.toml", other: "same/../out.toml"})) == 2
        assert "out.toml: is named for two outputs" in capsys.readouterr().err
    assert not Path("out.toml").exists()


def test_files_in_a_folder_that_is_written_are_outputs_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("planned").mkdir()
    shutil.copy("samples.jsonl", "planned/batches.json")
    plan = ["plan", "planned/batches.json", "--setup", "x"]
    assert run([*plan, "--out", "planned", "--html", "planned/batch.plan"]) == 2
    assert "is named for two outputs" in capsys.readouterr().err
    Path("planned/layout.json").write_text("kept")
    assert run(["compare", "planned/layout.json", "--out", "planned"]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert Path("planned/layout.json").read_text() == "kept"
    # The rule of orders that arrange writes beside a layout
    Path("layout.rule.json").write_text("kept")
    assert run(["arrange", "layout.rule.json", "--budget", "0.1", "--out", "layout.json"]) == 2
    assert "is an input of this command" in capsys.readouterr().err


def test_a_report_does_not_write_over_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    summary = {"name": "run", "iterations": 1, "mean_planned_s": 1.0, "mean_measured_s": 1.0}
    for name in ("timeline.html", "trace.json", "summary.json"):
        Path("run", name).write_text(json.dumps(summary))
    for name in ("timeline.html", "trace.json", "summary.json"):
        assert run(["report", "run", "--html", f"run/{name}"]) == 2
        assert "is an input of this command" in capsys.readouterr().err
        assert json.loads(Path("run", name).read_text()) == summary


def test_what_keeps_nothing_may_be_named_twice(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["simulate", "instance.json", "schedule.json", "--trace", "/dev/null", "--svg", "/dev/null"]
    assert run(line) == 0, capsys.readouterr().err
    # The next command knows nothing of what this one wrote.
    assert run([*line[:3], "--trace", "trace.json"]) == 0
    assert run(["check", "instance.json", "schedule.json"]) == 0


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes, as `ulimit -f` does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_above_the_size_limit_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    reason = r"cannot be written.*[fF]ile too large.*; raise the file size limit \(ulimit -f\), or "
    writer = ShardWriter(tmp_path, "0", 1000)
    writer.add("model", "a", torch.zeros(1000))
    with file_size_limit(100):
        with pytest.raises(InputError, match=f"a.json: {reason}name another folder"):
            write_text(tmp_path / "a.json", "x" * 1000)
        with pytest.raises(InputError, match=f"history.jsonl: {reason}use another --runs"):
            append_line(tmp_path / "history.jsonl", {"a": "x" * 1000})
        with pytest.raises(InputError, match=f"{tmp_path}: {reason}name another folder"):
            writer.close()
    assert not (tmp_path / "a.json").exists()
