"""Two runs in one folder would mix histories and checkpoints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.errors import InputError
from pipeloom.training.lock import locked

pytestmark = pytest.mark.ranks

HOLD = """
import sys, time
from pathlib import Path
from pipeloom.training.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Another process holds the folder; gives its number, and kills it."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        try:
            yield holder.pid
        finally:
            os.kill(holder.pid, signal.SIGKILL)


def test_a_folder_is_kept_to_one_process_until_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    with held(folder) as pid, pytest.raises(InputError, match=rf"{folder}: is in use by .* process {pid}; wait"):
        locked(folder).__enter__()
    # A killed run leaves nothing to clean.
    with locked(folder), pytest.raises(InputError, match=f"process {os.getpid()};"):
        locked(folder).__enter__()
    with locked(folder):
        pass


def test_a_pipe_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(InputError, match=r"\.lock: is not a regular file; remove it"):
        locked(tmp_path).__enter__()


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("kept")
    (tmp_path / ".lock").symlink_to(other)
    with pytest.raises(InputError, match=r"\.lock: cannot be written: too many levels .*; remove the symbolic link"):
        locked(tmp_path).__enter__()
    assert other.read_text() == "kept"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match="cannot be written: not a directory; remove the file that is in place of a folder"
    ):
        locked(tmp_path / "file" / "r").__enter__()


TASK = "def build_model(seed): ...\ndef batches(num_iterations): ...\n"
CONFIG = (
    'name = "t"\ntask = "task.py"\niterations = 1\n[layout]\nranks = 1\n[packing]\ntoken_budget = 6\n[checkpoint]\n'
)


@pytest.mark.parametrize(("where", "field"), [("saved", 'path = "saved"'), ("runs/t/checkpoints", "")])
def test_checkpoints_that_cannot_be_written_are_reported_before_training(
    tmp_path: Path, where: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.toml").write_text(CONFIG + field)
    (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / where).touch()
    assert run(["train", str(tmp_path / "train.toml"), "--runs", str(tmp_path / "runs"), "--from-scratch"]) == 2
    message = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert f"{tmp_path / where}" in message
    assert re.search("cannot be written: (file exists|not a directory); remove", message), message


@pytest.mark.parametrize("where", ["task.py", "runs/t", "runs/t/checkpoints"])
def test_a_link_to_itself_is_refused_in_one_line(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.toml").write_text(CONFIG)
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    assert run(["train", str(tmp_path / "train.toml"), "--runs", str(tmp_path / "runs")]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pipeloom: ")]
    assert where.rpartition("/")[2] in line


@pytest.mark.parametrize("where", ["runs/t", "saved"])
def test_a_second_run_in_a_folder_is_refused(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.toml").write_text(CONFIG + 'path = "saved"\n')
    kept = tmp_path / where / "history.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("of the other run")
    with held(tmp_path / where) as pid:
        assert run(["train", str(tmp_path / "train.toml"), "--runs", str(tmp_path / "runs"), "--from-scratch"]) == 2
    message = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert f"{tmp_path / where}: is in use by the run of process {pid};" in message
    assert kept.read_text() == "of the other run"
