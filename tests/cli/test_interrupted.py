"""A command that is interrupted or terminated says so in one line at most, and leaves no process and no file."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeloom.planner.process import STARTER

from .test_lost_processes import BOUND_S, runs
from .test_train_resume import config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

WORDS = {
    signal.SIGINT: "pipeloom: interrupted",
    signal.SIGTERM: "pipeloom: terminated",
    signal.SIGHUP: "",
    signal.SIGQUIT: "",
    signal.SIGKILL: "",
}
IN_IMPORTS = """
import os, signal, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
from pipeloom.cli import main
main(["--version"])
"""

FORK_SERVER = """
import time
from pipeloom.forks import begin_forks, can_fork
begin_forks(["json"])
print(can_fork(), flush=True)
time.sleep(600)
"""


@dataclass
class Ended:
    """How a command ended, and what was left."""

    code: int
    said: list[str]
    files: list[str]


def heed_hangups() -> None:
    """Let a process end at a hangup, also if the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def end(folder: Path, sent: signal.Signals, after_s: float, to_group: bool) -> Ended:
    """Send a signal to a training run some time after its first line, and wait until its processes are gone."""
    # The name of a socket, which lies in it, may have a hundred characters.
    temporary = Path(tempfile.mkdtemp(prefix="pipeloom-test-"))
    command = [sys.executable, "-m", "pipeloom", "train", str(config(folder, crash=False)), "--runs", str(folder)]
    command += ["--iterations", "1000"]
    # Of its own, as one that a terminal starts in the foreground: all of it is in one session.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        preexec_fn=heed_hangups,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Importing PyTorch ...\n"
        time.sleep(after_s)
        (os.killpg if to_group else os.kill)(process.pid, sent)
        # All that it has started holds its output.
        _, said = process.communicate(timeout=BOUND_S)
    give_up = time.monotonic() + BOUND_S
    while left := session(process.pid):
        assert time.monotonic() < give_up, f"{left} run on"
        time.sleep(0.02)
    # PyTorch keeps the inductor's folder from run to run.
    files = [each.name for each in temporary.iterdir() if not each.name.startswith("torchinductor")]
    shutil.rmtree(temporary)
    # A machine without kept kernels compiles them.
    return Ended(process.returncode, [line for line in said.splitlines() if not line.startswith("compiling")], files)


def session(number: int) -> list[int]:
    """Processes of a session that run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == number and runs(int(place.name)):
            found.append(int(place.name))
    return found


def check(ended: Ended, sent: signal.Signals) -> None:
    """One line or none, the signal's exit code, and nothing left."""
    assert ended.files == []
    assert [line for line in ended.said if line != WORDS[sent]] == []
    assert len(ended.said) <= 1
    assert ended.code in (128 + sent, -sent)


def test_ctrl_c_while_the_command_line_is_imported_says_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_IMPORTS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_script_whose_process_group_is_ended_leaves_no_file(sent: signal.Signals) -> None:
    """A program that calls the library handles no signal; the fork server removes its folders."""
    # Short: a socket lies in it.
    temporary = Path(tempfile.mkdtemp(prefix="pipeloom-test-"))
    with subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        preexec_fn=heed_hangups,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        os.killpg(process.pid, sent)
        # The fork server holds the output.
        process.communicate(timeout=BOUND_S)
    assert process.returncode == -sent
    assert list(temporary.iterdir()) == []
    temporary.rmdir()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_while_it_imports_says_one_word(tmp_path: Path, sent: signal.Signals) -> None:
    check(end(tmp_path, sent, 0.3, to_group=sent == signal.SIGINT), sent)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(24))
def test_a_run_that_is_ended_at_any_moment_leaves_nothing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    sent = draw.choice(list(WORDS))
    check(end(tmp_path, sent, draw.uniform(0.0, 12.0), to_group=sent != signal.SIGKILL and draw.random() < 0.7), sent)


@pytest.mark.full
@pytest.mark.ranks
def test_a_training_process_that_is_killed_is_reported_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeloom", "train", str(config(tmp_path, crash=False)), "--runs", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # The first line is of the command, all others are of the process that it forks.
        process.stdout.readline()
        process.stdout.readline()
        (group,) = {os.getpgid(pid) for pid in descendants(process.pid)} - {os.getpgid(process.pid)}
        os.kill(group, signal.SIGKILL)
        _, said = process.communicate(timeout=BOUND_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert said.splitlines()[-1] == "pipeloom: the training process was ended by SIGKILL"


def descendants(parent: int) -> list[int]:
    """All processes that a process has started, and those of the fork server among them."""
    children = [
        int(pid) for task in Path(f"/proc/{parent}/task").glob("*/children") for pid in task.read_text().split()
    ]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.full
def test_a_planner_whose_trainer_is_gone_already_leaves() -> None:
    """The store's port answers nothing: torch would wait for it, and say so, for half a minute."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "pipeloom", "planner", "--store", f"127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(
            command, env={**os.environ, STARTER: str(gone.pid)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as planner:
            said, _ = planner.communicate(timeout=BOUND_S)
    assert said == b""
    assert planner.returncode == 1


CONNECTS_TOO_LATE = """
import os, signal
from pipeloom.errors import PlannerError
from pipeloom.runtime import TcpPlanStore
def connect(*_):
    os.kill(os.getppid(), signal.SIGKILL)
    raise PlannerError("no plan store answers")
TcpPlanStore.connect = connect
from pipeloom.cli import main
"""
PLANNER = 'main(["planner", "--store", "127.0.0.1:1"])'
AS_COMMAND = f'os.environ["{STARTER}"] = str(os.getppid())\n{PLANNER}'
AS_FORK = f"""
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=lambda: {PLANNER})
process.start()
process.join()
"""


@pytest.mark.parametrize(
    "trainer",
    [
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CONNECTS_TOO_LATE + AS_COMMAND!r}])",
        CONNECTS_TOO_LATE + AS_FORK,
    ],
    ids=["command", "fork"],
)
def test_a_planner_whose_trainer_is_killed_while_it_connects_says_nothing(trainer: str) -> None:
    command = [sys.executable, "-c", trainer]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "", "")
