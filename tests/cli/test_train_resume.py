"""A rank is killed in the middle of an iteration, and training goes on from the checkpoint with the same losses."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeloom import heartbeat
from pipeloom.cli.app import run
from tests.cli.test_train_user_code import GOOD, TASK

pytestmark = pytest.mark.ranks

ITERATIONS = 7
CONFIG = """
name = "t"
task = "task.py"
iterations = 7
dtype = "float64"
timeout_s = 30
[layout]
ranks = 2
[packing]
token_budget = 6
[checkpoint]
every = 2
asynchronous = false
[planner]
budget_s = 0.02
"""
# In the loss of iteration 5, which is in the middle of an iteration, and on the last rank; once.
CRASH = """
import os, signal
from pathlib import Path

def crash(part):
    marker = Path(__file__).with_name("crashed")
    if part.samples[0][2].startswith("5.") and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
"""
# While rank 0 writes the first checkpoint, whose tensors find no room there, the run ends for another reason.
FULL = """
import resource
import pipeloom

class Full(pipeloom.Callback):
    def on_step(self, row):
        if row.iteration == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        if row.iteration == 2:
            raise RuntimeError("stop")

def callbacks():
    return [Full()]
"""

# Ranks take a while to start.
SLOW = """
import multiprocessing
import time

_build_model = build_model

def build_model(seed):
    if "rank" in multiprocessing.current_process().name:
        time.sleep(1)
    return _build_model(seed)
"""


def config(folder: Path, *, crash: bool) -> Path:
    text = TASK.replace("[nn.Linear(3, 4)]", "[nn.Linear(3, 4), nn.Linear(4, 4)]") + CRASH
    for name, code in (GOOD | {"LOSS": "out.logsumexp(1).sum() + crash(part)"}).items():
        text = text.replace(name, code)
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(text)
    if not crash:
        (folder / "crashed").touch()
    (folder / "train.toml").write_text(CONFIG)
    return folder / "train.toml"


def losses(folder: Path) -> list[float]:
    """Loss of every iteration, each of which is there once and in its place."""
    rows = [json.loads(line) for line in (folder / "t" / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    path = config(folder, crash=False)
    # The number of iterations limits batches without an end.
    task = path.with_name("task.py")
    task.write_text(task.read_text().replace("range(num_iterations)", "__import__('itertools').count()"))
    assert run(["train", str(path), "--runs", str(folder)]) == 0
    assert sorted(path.name for path in (folder / "t" / "checkpoints").iterdir()) == ["step-00000006", "step-00000007"]
    return folder, losses(folder)


def test_a_killed_rank_ends_all_and_training_goes_on(
    undisturbed: tuple[Path, list[float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, crash=True)
    arguments = ["train", str(path), "--runs", str(tmp_path)]
    assert run(arguments) == 2
    assert "rank 1: the process was killed by signal 9" in capfd.readouterr().err
    assert run(arguments) == 2
    said = capfd.readouterr().err
    assert "has a checkpoint after 4 iterations; use --resume to continue from it, or --from-scratch" in said
    assert run([*arguments, "--resume"]) == 0
    assert losses(tmp_path) == pytest.approx(undisturbed[1], rel=1e-10)
    summary = json.loads((tmp_path / "t" / "summary.json").read_text())
    assert (summary["iterations"], summary["resumed_at"]) == (ITERATIONS, [4])
    assert len(list((tmp_path / "t" / "plans").iterdir())) == ITERATIONS


def test_a_mistake_in_a_new_config_leaves_what_the_old_run_has_written(
    undisturbed: tuple[Path, list[float]], tmp_path: Path
) -> None:
    shutil.copytree(undisturbed[0] / "t", tmp_path / "t")
    before = written(tmp_path / "t")
    assert {"setup.json", "history.jsonl", "checkpoints/step-00000007"} <= before.keys()
    path = config(tmp_path, crash=False)
    # One is found before anything is measured, the other afterwards.
    for old, new in (("every = 2", 'every = 2\n[optimizer]\nname = "Adamm"'), ("ranks = 2", "ranks = 99")):
        path.write_text(CONFIG.replace(old, new))
        assert run(["train", str(path), "--runs", str(tmp_path), "--from-scratch"]) == 2
        assert written(tmp_path / "t") == before


def written(folder: Path) -> dict[str, bytes]:
    """Contents of all files of a run by name; folders have none."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if path.suffix != ".lock"
    }


@pytest.mark.full
def test_all_ranks_are_started_again_where_that_is_asked_for(
    undisturbed: tuple[Path, list[float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, crash=True)
    assert run(["train", str(path), "--runs", str(tmp_path), "--restarts", "1"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "killed by signal 9; restarting from the newest checkpoint, 1 of 1" in shown
    assert losses(tmp_path) == pytest.approx(undisturbed[1], rel=1e-10)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        # A rank refuses batches that are other than its peers' whenever it is started.
        ('f"{i}.{j}.{me}"', "rank 1 has other samples than rank 0"),
        ('[f"{i}.{j}"][me > 0]', "rank 1: iteration 0: batches: raised IndexError: list index out of range"),
    ],
)
def test_what_a_rank_refuses_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sample: str, reason: str
) -> None:
    path = config(tmp_path, crash=False)
    task = path.with_name("task.py")
    other = "import torch.distributed as dist; me = dist.is_initialized() and dist.get_rank()\n    for i in range("
    task.write_text(task.read_text().replace("for i in range(", other).replace('f"{i}.{j}"', sample))
    assert run(["train", str(path), "--runs", str(tmp_path), "--restarts", "3"]) == 2
    said = capfd.readouterr()
    assert reason in said.err
    assert "restarting from" not in said.out


def test_what_a_worker_raises_is_no_defect_of_pipeloom(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("momentum")

    monkeypatch.setattr("pipeloom.training.run.join_workers", fail)
    monkeypatch.setattr(os, "_exit", sys.exit)
    for variable, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match="2"):
        run(["train", str(config(tmp_path, crash=False)), "--runs", str(tmp_path)])
    said = capfd.readouterr().err
    assert "pipeloom: rank 1: KeyError: 'momentum' (PIPELOOM_TRACEBACK=1 shows where)" in said
    assert "Traceback" not in said


@pytest.mark.full
def test_without_checkpoints_a_run_is_started_again_from_the_beginning(
    undisturbed: tuple[Path, list[float]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, crash=True)
    path.write_text(path.read_text().replace("[checkpoint]\nevery = 2\nasynchronous = false\n", ""))
    assert run(["train", str(path), "--runs", str(tmp_path), "--restarts", "1"]) == 0
    assert "restarting from the beginning, 1 of 1" in " ".join(capfd.readouterr().out.split())
    assert losses(tmp_path) == pytest.approx(undisturbed[1], rel=1e-10)


@pytest.mark.full
def test_batches_that_end_early_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, crash=False)
    task = path.with_name("task.py")
    task.write_text(
        task.read_text().replace("for i in range(num_iterations)", "for i in range(min(3, num_iterations))")
    )
    assert run(["train", str(path), "--runs", str(tmp_path)]) == 0
    assert "The batches ended after 3 of 7 iterations." in " ".join(capfd.readouterr().out.split())


@pytest.mark.full
def test_a_run_that_ends_while_a_checkpoint_cannot_be_written_says_so_in_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, crash=False)
    task = path.with_name("task.py")
    task.write_text(task.read_text() + FULL)
    path.write_text(path.read_text().replace("asynchronous = false", "asynchronous = true"))
    assert run(["train", str(path), "--runs", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "step-00000002.partial cannot be written: " in said
    # Rank 1 may find the failed checkpoint before rank 0 calls the callback; whichever is first ends the run.
    [last] = [line for line in said.splitlines() if line.startswith("pipeloom: rank ")]
    reasons = "rank 0: callback Full.on_step: raised RuntimeError: stop", "step-00000002.partial cannot be written: "
    assert any(reason in last for reason in reasons)


@pytest.mark.full
def test_a_run_says_what_it_does_while_ranks_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, "1")
    monkeypatch.setattr(heartbeat, "FIRST_S", 0.2)
    path = config(tmp_path, crash=False)
    task = path.with_name("task.py")
    task.write_text(task.read_text() + SLOW)
    assert run(["train", str(path), "--runs", str(tmp_path), "--iterations", "1"]) == 0
    assert "pipeloom: starting 2 ranks and the planner" in capfd.readouterr().err


def train_as_worker(rank: int, port: int, num_restarts: int, arguments: list[str]) -> None:
    """One of two processes as torchrun starts them."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    sys.exit(run(arguments))


@pytest.mark.full
def test_workers_that_are_started_again_go_on(undisturbed: tuple[Path, list[float]], tmp_path: Path) -> None:
    arguments = ["train", str(config(tmp_path, crash=True)), "--runs", str(tmp_path)]

    def exit_codes(num_restarts: int) -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        start = multiprocessing.get_context("spawn").Process
        workers = [start(target=train_as_worker, args=(rank, port, num_restarts, arguments)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [worker.exitcode for worker in workers]

    assert exit_codes(0) == [2, -signal.SIGKILL]
    assert exit_codes(1) == [0, 0]
    assert losses(tmp_path) == pytest.approx(undisturbed[1], rel=1e-10)
    assert json.loads((tmp_path / "t" / "summary.json").read_text())["resumed_at"] == [4]


def under_torchrun(path: Path, runs: Path) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "pipeloom", "train", str(path), "--runs", str(runs)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.full
def test_torchrun_starts_the_ranks_again_and_training_goes_on(
    undisturbed: tuple[Path, list[float]], tmp_path: Path
) -> None:
    done = under_torchrun(config(tmp_path, crash=True), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Continuing from the checkpoint after 4 iterations" in done.stdout
    assert losses(tmp_path) == pytest.approx(undisturbed[1], rel=1e-10)
    summary = json.loads((tmp_path / "t" / "summary.json").read_text())
    assert summary["resumed_at"] == [4]


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_do_not_continue_the_run_of_another_command(
    undisturbed: tuple[Path, list[float]], tmp_path: Path
) -> None:
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    done = under_torchrun(tmp_path / "train.toml", tmp_path)
    assert done.returncode != 0
    assert "use --resume to continue from it, or --from-scratch to remove it" in done.stderr
    assert "Continuing" not in done.stdout


def test_other_data_than_before_the_checkpoint_is_refused(
    undisturbed: tuple[Path, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    path = undisturbed[0] / "train.toml"
    task = path.with_name("task.py")
    task.write_text(task.read_text().replace('f"{i}.{j}"', 'f"{i}.{j}x"'))
    assert run(["train", str(path), "--runs", str(undisturbed[0]), "--resume", "--iterations", "9"]) == 2
    assert "iteration 6: has other samples than when it was trained" in capfd.readouterr().err


@pytest.mark.full
def test_sigterm_ends_all_ranks_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    path, scratch = config(tmp_path, crash=False), tmp_path / "scratch"
    scratch.mkdir()
    path.write_text(path.read_text().replace("iterations = 7", "iterations = 100000"))
    command = [sys.executable, "-m", "pipeloom", "train", str(path), "--runs", str(tmp_path)]
    history = tmp_path / "t" / "history.jsonl"
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as started:
        while not (history.exists() and history.read_text().count("\n") > 2):
            assert started.poll() is None, started.communicate()[1]
            time.sleep(0.1)
        started.terminate()
        said = started.communicate(timeout=120)[1]
    assert (started.returncode, said) == (143, "pipeloom: terminated\n")
    assert not list(scratch.glob("pipeloom-*"))
    # The planner leaves when rank 0 is gone.
    give_up = time.monotonic() + 120
    while members(started.pid):
        assert time.monotonic() < give_up
        time.sleep(0.1)


def members(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
