"""Training runs that are killed, run out of room or find damaged files: no checkpoint is lost, and nothing hangs.

Seeds choose the faults. Every run is resumed, with further faults, until it ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.runtime.test_keep import DAMAGES, misnumbered
from tests.warm import _process, _start_server

from .test_lost_processes import BOUND_S, children_of, runs, train_here
from .test_train_resume import config

pytestmark = pytest.mark.ranks

FEW, MANY = range(3), range(3, 43)
ITERATIONS = 7
# Read by every process that imports the task.
_LIMIT = """
_limit = Path(__file__).with_name("limit")
if _limit.exists():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (int(_limit.read_text()),) * 2)
"""


@dataclass
class Campaign:
    """One run and everything that happens to it."""

    folder: Path
    choose: random.Random
    took_s: float
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Write the config and the task."""
        self.path = config(self.folder, crash=False)
        task = self.path.with_name("task.py")
        task.write_text(task.read_text() + _LIMIT)
        self.plain = self.path.read_text()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "t" / "checkpoints"

    def train(self, *, fault: str, resume: bool) -> tuple[int | None, str]:
        """Train, with a fault; the exit code and what was printed. It must not hang."""
        keep, asynchronous = self.choose.randint(1, 3), self.choose.choice(["true", "false"])
        text = self.plain.replace("[checkpoint]", f"[checkpoint]\nkeep = {keep}")
        self.path.write_text(text.replace("asynchronous = false", f"asynchronous = {asynchronous}"))
        limit = self.path.with_name("limit")
        limit.unlink(missing_ok=True)
        if fault == "full":
            limit.write_text(str(int(10 ** self.choose.uniform(3.4, 4.7))))
        said, temporary = self.folder / "said.txt", self.folder / "tmp"
        said.unlink(missing_ok=True)
        temporary.mkdir(exist_ok=True)
        arguments = ["train", str(self.path), "--runs", str(self.folder), "--resume" if resume else "--from-scratch"]
        _start_server()
        process = _process(train_here, args=(arguments, str(said), str(temporary), True))
        process.start()
        began, moment = time.monotonic(), self.choose.uniform(0, 1.1) * self.took_s
        while process.exitcode is None:
            others = set(children_of(forkserver._forkserver._forkserver_pid)) - {process.pid}  # type: ignore[attr-defined]
            if fault in ("kill", "terminate") and time.monotonic() - began > moment:
                victim = self.choose.choice([process.pid, *sorted(others)]) if fault == "kill" else process.pid
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
                fault = "done"
            assert time.monotonic() - began < BOUND_S, f"hangs: {self.events}, {said.read_text()}"
            time.sleep(0.01)
        while any(runs(pid) for pid in others):
            assert time.monotonic() - began < 2 * BOUND_S, f"processes stay: {self.events}"
            time.sleep(0.01)
        return process.exitcode, said.read_text() if said.exists() else ""

    def good(self) -> set[int]:
        """Steps whose files are as they were written, without Pipeloom's own checks."""
        return {int(path.name[5:]) for path in self.checkpoints.glob("step-*") if is_good(path)}

    def damage(self) -> None:
        """Damage files of the run, but not its last good checkpoint; or set the clock back."""
        paths = [path for path in sorted(self.checkpoints.glob("step-*")) if is_good(path)]
        for path in self.choose.sample(paths, self.choose.randint(0, max(0, len(paths) - 1))):
            damage = self.choose.choice([each for each in DAMAGES if each is not misnumbered])
            self.events.append(f"{damage.__name__} {path.name}")
            damage(path, self.choose)
        run_folder = self.folder / "t"
        files = [path for path in sorted(run_folder.rglob("*")) if path.is_file() and "checkpoints" not in path.parts]
        how = self.choose.choice(["nothing", "tear", "fifo", "empty", "remove", "clock"])
        if how == "clock":
            for path in run_folder.rglob("*"):
                if path.is_file():
                    os.utime(path, (10**9, self.choose.randint(1, 2 * 10**9)))
        elif how != "nothing" and files:
            path = self.choose.choice(files)
            content = path.read_bytes()
            self.events.append(f"{how} {path.name}")
            path.unlink()
            if how == "fifo":
                os.mkfifo(path)
            elif how != "remove":
                path.write_bytes(content[: self.choose.randrange(len(content) + 1)] if how == "tear" else b"")


def is_good(folder: Path) -> bool:
    """Whether all files of a checkpoint are regular and have the digests beside them."""
    if len(folder.name) != 13 or not folder.is_dir() or not (folder / "digests-metadata.json").is_file():
        return False
    files = sorted(folder.glob("digests-*.json"))
    if not all(file.is_file() for file in files):
        return False
    try:
        known = {name: digest for file in files for name, digest in json.loads(file.read_text()).items()}
    except (ValueError, AttributeError, RecursionError):
        return False
    return {".metadata", "trainer.json", "__0_0.distcp", "__1_0.distcp"} <= set(known) and all(
        (folder / name).is_file() and hashlib.blake2b((folder / name).read_bytes()).hexdigest() == digest
        for name, digest in known.items()
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], float]:
    """Loss of every iteration, and how long a run took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    campaign = Campaign(folder, random.Random(0), 0.0)
    for _ in range(2):
        began = time.monotonic()
        assert campaign.train(fault="none", resume=False)[0] == 0
    assert campaign.good()
    return losses(folder), time.monotonic() - began


def losses(folder: Path) -> dict[int, float]:
    """Loss by iteration."""
    rows = [json.loads(line) for line in (folder / "t" / "history.jsonl").read_text().splitlines()]
    assert len({row["iteration"] for row in rows}) == len(rows)
    return {row["iteration"]: row["loss"] for row in rows}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(
    "seed",
    [*(pytest.param(s, marks=pytest.mark.full) for s in FEW), *(pytest.param(s, marks=pytest.mark.soak) for s in MANY)],
)
def test_no_fault_loses_all_checkpoints_or_hangs(
    seed: int, undisturbed: tuple[dict[int, float], float], tmp_path: Path
) -> None:
    choose = random.Random(seed)
    campaign, counts = Campaign(tmp_path, choose, undisturbed[1]), Counter[str]()
    resume = False
    for number in range(12):
        fault = choose.choice(["kill", "kill", "terminate", "full"]) if number < 2 else "none"
        before = campaign.good()
        code, said = campaign.train(fault=fault, resume=resume)
        after, all_steps = campaign.good(), sorted(path.name for path in campaign.checkpoints.glob("step-*"))
        campaign.events.append(f"{fault}: exit code {code}, good {sorted(after)} of {all_steps}, said {said[-300:]}")
        counts[fault] += 1
        assert "Traceback" not in said, campaign.events
        if resume:
            assert max(after, default=0) >= max(before, default=0), campaign.events
        # Where all is trained, and the history is gone, there is nothing to sum up.
        if fault == "none" and (code == 0 or "history.jsonl: has no iteration" in said):
            break
        if fault == "none":
            # Refused in one line that names what is in the way.
            assert code == 2, campaign.events
            [line] = [line for line in said.splitlines() if line.startswith("pipeloom: ")]
            refused = next(word for word in line.split() if str(tmp_path) in word).rstrip(":;")
            campaign.events.append(f"refused {refused}")
            assert before == set() or "checkpoints" not in refused, campaign.events
            if "checkpoints" in refused:
                resume = False
                continue
            Path(refused).unlink()
        resume = True
        if number < 2:
            campaign.damage()
    else:
        pytest.fail(f"does not end: {campaign.events}")
    assert ITERATIONS in campaign.good(), campaign.events
    found = losses(tmp_path) if code == 0 else {}
    assert {i: undisturbed[0][i] for i in found} == pytest.approx(found, rel=1e-9), campaign.events
    record = os.environ.get("PIPELOOM_SOAK_RECORD")
    if record:
        with open(record, "a") as file:
            file.write(
                json.dumps({"seed": seed, "runs": sum(counts.values()), "faults": counts, "events": campaign.events})
                + "\n"
            )
