"""A process of a run is killed, whichever and whenever: the others end, nothing stays, and no sample is lost.

Seeds choose the victim and the moment. A rank that is lost is started again with the others, or ends the run, which is
then resumed; so is one whose launching process is lost. A lost planner changes nothing.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from tests.warm import begin_warm

from .test_train_resume import config, losses

pytestmark = pytest.mark.ranks

# Many times what anything takes; no more than a bound on hanging.
BOUND_S = 120.0
FEW, MANY = range(2), range(100)
SHARED_MEMORY = Path("/dev/shm")


def begin(folder: Path) -> Path:
    """Make a config whose iterations take long enough to be hit."""
    path = config(folder, crash=False)
    task = path.with_name("task.py")
    task.write_text(task.read_text().replace("return 0.0", "import time; time.sleep(0.02); return 0.0"))
    return path


def train_here(arguments: list[str], said: str, temporary: str, warm: bool) -> None:
    """Launch a run, as a process of its own."""
    with open(said, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.enable()
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    if warm:
        begin_warm(pytest.MonkeyPatch())
    sys.exit(run(arguments))


@dataclass
class Life:
    """A run that was started, and every process of it that was ever seen."""

    arguments: list[str]
    folder: Path
    warm: bool
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Start it."""
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        given = (self.arguments, str(self.folder / "said.txt"), str(self.temporary), self.warm)
        self.process = multiprocessing.get_context("spawn").Process(target=train_here, args=given)
        self.process.start()

    @property
    def said(self) -> str:
        """What it has printed, on one line; nothing where it was killed before it could."""
        path = self.folder / "said.txt"
        return " ".join(path.read_text().split()) if path.exists() else ""

    def alive(self) -> list[int]:
        """Its processes but the launching one, as far as they run; to be asked often, lest one is never seen."""
        server = forkserver._forkserver._forkserver_pid if self.warm else self.process.pid  # type: ignore[attr-defined]
        self.seen |= set(children_of(server)) - {self.process.pid}
        return sorted(pid for pid in self.seen if runs(pid))

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended within some seconds."""
        give_up = time.monotonic() + seconds
        while self.process.exitcode is None and time.monotonic() < give_up:
            self.alive()
            time.sleep(0.01)
        return self.process.exitcode is not None

    def all_end(self, processes: list[int]) -> float:
        """Wait until some processes have ended, and return how long that took."""
        began = time.monotonic()
        while left := [pid for pid in processes if runs(pid)]:
            assert time.monotonic() - began < BOUND_S, f"{left} of {processes} run on: {self.said}"
            self.alive()
            time.sleep(0.01)
        return time.monotonic() - began

    def check_nothing_is_left(self) -> None:
        """After its end."""
        self.all_end(self.alive())
        assert list(self.temporary.iterdir()) == []
        if SHARED_MEMORY.is_dir():
            ours = {str(pid) for pid in self.seen}
            assert not [each.name for each in SHARED_MEMORY.iterdir() if ours & set(each.name.split("_"))]


def children_of(parent: int | None) -> list[int]:
    """All that it has started, and what those have."""
    found, tasks = list[int](), list[Path]()
    # Any of them may end while it is looked at.
    with suppress(OSError):
        tasks = list(Path(f"/proc/{parent}/task").glob("*/children"))
    for task in tasks:
        mine = list[int]()
        with suppress(OSError):
            mine = [int(pid) for pid in task.read_text().split()]
        found += [*mine, *(each for pid in mine for each in children_of(pid))]
    return found


def runs(pid: int) -> bool:
    """Whether a process runs; one that waits to be read by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    """Losses, and how long it took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = begin(folder)
    assert run(["train", str(path), "--runs", str(folder)]) == 0
    began = time.monotonic()
    assert run(["train", str(path), "--runs", str(folder), "--from-scratch"]) == 0
    return losses(folder), time.monotonic() - began


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.full if seed in FEW else pytest.mark.soak) for seed in MANY]
)
def test_whoever_is_killed_the_others_end_and_no_sample_is_lost(
    seed: int, undisturbed: tuple[list[float], float], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    choose = random.Random(seed)
    restarts = choose.random() < 0.7
    arguments = ["train", str(begin(tmp_path)), "--runs", str(tmp_path)]
    again = ["--restarts", "1"] * restarts
    life = Life([*arguments, *again], tmp_path, not request.config.getoption("--cold"))
    moment = choose.random() * undisturbed[1]
    life.wait(moment)
    others = life.alive()
    launcher = life.process.pid
    assert launcher is not None
    victim = launcher if not others or choose.random() < 0.15 else choose.choice(others)
    others = [pid for pid in others if pid != victim]
    done, who = history(tmp_path), "nobody"
    if life.process.exitcode is None:
        who = "launcher" if victim == launcher else "another"
        os.kill(victim, signal.SIGKILL)
    at, took = time.monotonic(), 0.0
    if who == "launcher":
        assert life.wait(BOUND_S)
        life.all_end(others)
        took = time.monotonic() - at
    if who == "another":
        # A rank takes the others with it; a planner is started again by itself.
        while not lost_a_rank(life.said) and life.process.exitcode is None:
            assert time.monotonic() - at < BOUND_S, life.said
            life.alive()
            time.sleep(0.01)
        who = "rank" if lost_a_rank(life.said) else "planner"
        if who == "rank":
            life.all_end(others)
            took = time.monotonic() - at
    assert life.wait(BOUND_S), life.said
    failed = 2 if who == "rank" and not restarts else 0
    assert life.process.exitcode == (-signal.SIGKILL if who == "launcher" else failed), life.said
    assert ("restarting from" in life.said) == (who == "rank" and restarts)
    life.check_nothing_is_left()
    if life.process.exitcode != 0:
        life = Life([*arguments, "--resume"], tmp_path, life.warm)
        assert life.wait(BOUND_S), life.said
        assert life.process.exitcode == 0, life.said
        life.check_nothing_is_left()
    assert losses(tmp_path) == pytest.approx(undisturbed[0], rel=1e-9)
    summary = json.loads((tmp_path / "t" / "summary.json").read_text())
    row = {"seed": seed, "who": who, "restarts": restarts, "after_s": moment, "iterations": done, "ended_s": took}
    row["fallback"] = summary["plans_fallback"]
    record = os.environ.get("PIPELOOM_SOAK_RECORD")
    if record:
        with open(record, "a") as file:
            file.write(json.dumps(row) + "\n")


def lost_a_rank(said: str) -> bool:
    """Whether a run has noticed that."""
    return "killed by signal 9" in said or "could not be started" in said


def history(folder: Path) -> int:
    """Iterations that were trained."""
    path = folder / "t" / "history.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
