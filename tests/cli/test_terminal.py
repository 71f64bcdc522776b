"""Whatever names hold: nothing but our own styles controls the terminal, brackets are shown, JSON stays JSON."""

from __future__ import annotations

import inspect
import json
import logging
import os
import pty
import re
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cli.app import commands, make_app, run
from pipeloom.cli.output import stdout
from pipeloom.errors import InputError, visible, visible_line
from pipeloom.packing import PackingSpec
from pipeloom.printing import escape_logs, print_error, print_line
from pipeloom.report.any_width import Table
from pipeloom.training.config import LayoutConfig, RunConfig
from tests.explain.traces.made import documents, random_pipeline, write
from tests.io.documents import TINY, TINY_SCHEDULE

# Sets a title, clears the screen, colors, moves back; reorders; breaks the line; markup of rich.
_CONTROL = "\x1b]0;PWN\x07\x1b[2J\x9b31m\r\x08\x7f\u202e\u2066\u2028\u2029\x85\n"
HOSTILE = f"N{_CONTROL}[bold]x[/] [/bold] [link=x] :heart: \xe9"
# The same without what a file's name cannot hold, or TOML.
NAME = HOSTILE.replace("/", "")


COMMANDS = commands()


def is_shown(text: str) -> bool:
    """Whether a terminal shows every character, and takes none for a command."""
    return all(c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a hostile name, with files that the commands read and that hold hostile names."""
    made = tmp_path / NAME
    made.mkdir()
    monkeypatch.chdir(made)
    modules = {**TINY["tasks"], "module": [HOSTILE] * 4}
    Path(INSTANCE).write_text(json.dumps(TINY | {"name": HOSTILE, "tasks": modules}))
    tight = {"name": HOSTILE, "memory_capacity_bytes": [49, 49], "tasks": modules}
    Path(TIGHT).write_text(json.dumps(TINY | tight))
    search = TINY_SCHEDULE["search"] | {"method": HOSTILE}
    Path(SCHEDULE).write_text(json.dumps(TINY_SCHEDULE | {"search": search}))
    Path(SAMPLES).write_text(json.dumps({"id": HOSTILE, "text_tokens": 3}) + "\n")
    name = json.dumps(HOSTILE.replace("\x7f", ""))
    zoo = Path(inspect.getfile(InputError)).parent / "spec" / "zoo"
    model = (zoo / "models" / "vlm-s.toml").read_text().replace('"lm"', name).replace('"VLM-S"', name)
    Path(MODEL).write_text(model)
    cluster = (zoo / "clusters" / "dip-h800-64.toml").read_text().replace('"dip-h800-64"', name)
    Path(CLUSTER).write_text(cluster)
    Path(PLAN).write_text(f"pipeloom.plan/2 ranks=1 iteration=1 layout=a\nrank 0\nF {HOSTILE}.0 0.0 keep\n")
    Path(ARGUMENTS).write_text(f"--num-layers 4 --{HOSTILE} {HOSTILE}")
    Path("run").mkdir()
    summary = {"name": HOSTILE, "iterations": 1, "mean_planned_s": 1.0, "mean_measured_s": 1.0, HOSTILE: HOSTILE}
    Path("run/summary.json").write_text(json.dumps(summary | {"evaluation": {HOSTILE: 1.0}}, ensure_ascii=False))
    return made


INSTANCE, TIGHT, SCHEDULE, SAMPLES = f"i{NAME}.json", f"t{NAME}.json", f"s{NAME}.json", f"d{NAME}.jsonl"
MODEL, CLUSTER, PLAN, ARGUMENTS = f"m{NAME}.toml", f"c{NAME}.toml", f"p{NAME}.plan", f"a{NAME}.txt"
LINES = {
    "simulate": [INSTANCE, SCHEDULE, "--svg", f"x{NAME}.svg", "--trace", f"x{NAME}.json"],
    "report": [INSTANCE, SCHEDULE, SCHEDULE, "--title", HOSTILE, "--svg", f"x{NAME}.svg"],
    "report run": ["run"],
    "check": [INSTANCE, SCHEDULE],
    "check violated": [TIGHT, SCHEDULE],
    "solve": [INSTANCE, "--budget", "0.05", "--out", f"x{NAME}.json"],
    "solve infeasible": [TIGHT, "--budget", "0.05", "--out", f"x{NAME}.json"],
    "verify": [PLAN],
    "pack": [SAMPLES, "--tokens", "9", "--out", f"x{NAME}.json"],
    "pack refused": [SAMPLES, "--tokens", "2", "--out", f"x{NAME}.json"],
    "megatron": [ARGUMENTS],
    "emulate": [
        MODEL,
        "--cluster",
        CLUSTER,
        "--pp",
        "4",
        "--tp",
        "2",
        "--microbatches",
        "4",
        "--trace",
        f"x{NAME}.json",
    ],
    "sweep": [MODEL, "--cluster", CLUSTER, "--microbatches", "16", "--gpus", "8", "--max-tp", "2"],
    "arrange": [
        MODEL,
        "--cluster",
        CLUSTER,
        "--budget",
        "0.05",
        "--out",
        f"x{NAME}.json",
        "--megatron",
        "--torchtitan",
    ],
    "explain": ["traces", "--budget", "0.05", "--out", f"x{NAME}.json"],
    "bench": ["instances", "--family", HOSTILE],
    "compare": [MODEL, "--cluster", CLUSTER, "--budget", "0.05", "--systems", "1f1b,dip", "--out", f"x{NAME}"],
}


@pytest.mark.parametrize("line", LINES)
def test_names_in_files_do_not_control_the_terminal(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = line.split()[0]
    if command == "explain":
        write(Path("traces"), documents(random_pipeline(5)))
    code = run([command, *LINES[line]])
    reported = capsys.readouterr()
    said = reported.out + reported.err
    assert is_shown(said), [c for c in said if not is_shown(c)]
    assert code in (0, 1, 2)
    assert "internal error" not in said
    # As it stands, markup included, with escapes that are seen.
    assert "N\\x1b]0;PWN\\x07\\x1b[2J\\x9b31m" in said.replace("\n", "")
    if any(each.name == "json" for each in parameters(command)):
        run([command, *LINES[line], "--json"])
        out = capsys.readouterr().out
        assert all(c == "\n" or " " <= c <= "~" for c in out)
        assert code == 2 or json.loads(out)


def parameters(command: str) -> list[Any]:
    app: Any = typer.main.get_command(make_app([command]))
    return list(app.commands[command].params)


def hostile_lines(command: str) -> Iterator[list[str]]:
    """Of every argument and option that takes words or a path: a command line where it is hostile."""
    hints = get_type_hints(getattr(import_module(COMMANDS[command].module), command))
    for each in parameters(command):
        if not re.search("Path|str", str(hints[each.name])):
            continue
        line = [command]
        for other in parameters(command):
            word = HOSTILE if other is each else "0.05" if hints[other.name] is float else "1"
            if other is each or other.required:
                line += [word] if other.param_type_name == "argument" else [max(other.opts, key=len), word]
        yield line


# They import PyTorch before they look at what they are given.
SLOW = ("train", "export", "profile", "calibrate", "planner", "validate")


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=pytest.mark.full if each in SLOW else ()) for each in COMMANDS]
)
def test_no_argument_of_any_command_controls_the_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeloom.forks.end_with_starter", lambda **_: None)
    for line in hostile_lines(command):
        code = run(line)
        reported = capsys.readouterr()
        assert is_shown(reported.out + reported.err), line
        assert code in (0, 1, 2), (line, reported.err)


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_shows_all_of_its_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    def words(text: str) -> str:
        return re.sub(r"[\s\u2500-\u257f]+", " ", text)

    assert run([*command.split(), "--help"]) == 0
    shown = words(capsys.readouterr().out)
    if not command:
        return
    module = import_module(COMMANDS[command].module)
    assert words(module.HELP).strip() in shown
    assert words(getattr(module, "EPILOG", "")) in shown
    for name, parameter in inspect.signature(getattr(module, command)).parameters.items():
        text = getattr(parameter.default, "help", None) or ""
        missing = [word for word in text.split() if word not in shown and len(word) < 20]
        assert not missing, name


@pytest.mark.parametrize("optimized", [pytest.param("-O", marks=pytest.mark.full), "-OO"])
def test_commands_run_without_docstrings(optimized: str) -> None:
    line = [sys.executable, optimized, "-m", "pipeloom", "simulate", INSTANCE, SCHEDULE]
    done = subprocess.run(line, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.full
@pytest.mark.parametrize("optimized", ["-O", "-OO"])
def test_help_is_there_without_docstrings(optimized: str) -> None:
    code = (
        "import sys; from pipeloom.cli.app import commands, run; "
        "print([run([name, '--help']) for name in commands()], file=sys.stderr)"
    )
    light = [sys.executable, optimized, "-c", code]
    done = subprocess.run(light, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == str([0] * len(COMMANDS))
    assert "Every task starts as early as" in done.stdout


@contextmanager
def closed_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


MORE = (["simulate", INSTANCE, SCHEDULE, "--json"], ["emulate", "list"], ["solve", "--help"])


@pytest.mark.parametrize(
    "line",
    [["simulate", INSTANCE, SCHEDULE], ["--help"], *(pytest.param(each, marks=pytest.mark.full) for each in MORE)],
)
def test_a_reader_that_goes_away_is_no_failure(line: list[str]) -> None:
    with closed_pipe() as writer:
        done = subprocess.run(
            [sys.executable, "-m", "pipeloom", *line], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_broken_pipe_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        with closed_pipe() as writer:
            os.write(writer, b"x")

    monkeypatch.setattr("pipeloom.cli.check.judge", broken)
    assert run(["check", INSTANCE, SCHEDULE]) == 70
    assert "BrokenPipeError" in capsys.readouterr().err


def on_terminal(line: list[str]) -> str:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeloom", *line],
        stdout=follower,
        stderr=follower,
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(follower)
    written = b""
    try:
        while piece := os.read(leader, 1 << 16):
            written += piece
    except OSError:  # Linux says so when the last writer is gone
        pass
    os.close(leader)
    assert process.wait() == 0
    return written.decode()


def test_our_own_styles_reach_a_terminal_and_no_others() -> None:
    written = on_terminal(["simulate", INSTANCE, SCHEDULE])
    assert "\x1b[1m" in written
    assert is_shown(re.sub(r"\x1b\[[0-9;]*m", "", written).replace("\r\n", "\n"))
    assert "\\x1b]0;PWN\\x07" in written
    assert "[bold]x[/] [/bold] [link=x] :heart:" in re.sub(r"\x1b\[[0-9;]*m|\s*\r\n\s*", "", written)


@given(st.text())
def test_visible_text_is_shown_and_stays_what_it_was(text: str) -> None:
    for shown, kept in ((visible(text), "\n"), (visible_line(text), "")):
        assert is_shown(shown)
        assert shown.count("\n") == (text.count("\n") if kept else 0)
        assert visible(shown) == shown
        plain = "".join(c for c in text if is_shown(c) and c != "\n" and unicodedata.category(c) not in ("Co", "Cn"))
        assert not plain or all(c in shown for c in plain)


@pytest.mark.parametrize(
    "tell",
    [
        print_line,
        print_error,
        lambda text: stdout().print(text),
        lambda text: stdout().print_line(text),
        lambda text: logging.getLogger("another.library").warning("%s", text),
        lambda text: sys.stderr.write(warnings.formatwarning(text, UserWarning, "file.py", 1, "")),
    ],
)
def test_every_way_to_the_terminal_escapes(tell: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    escape_logs()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        tell(HOSTILE)
    finally:
        logging.getLogger().removeHandler(handler)
    said = "".join(capsys.readouterr())
    assert is_shown(said)
    assert "\\x1b]0;PWN" in said


def test_cells_and_titles_of_a_table_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title="a\nb", title_justify="left")
    table.add_column("c")
    table.add_row("[red]d\ne[/]")
    stdout().print(table)
    said = capsys.readouterr().out
    assert "a\\nb" in said
    assert "[red]d\\ne[/]" in said


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "a\u202eb", "", ".", "a/b"])
def test_a_run_has_a_name_that_can_be_shown(name: str) -> None:
    with pytest.raises(InputError, match="is not a folder name"):
        RunConfig(name=name, iterations=1, layout=LayoutConfig(ranks=1), packing=PackingSpec(1))
