"""A process that knows no secret talks to every port of a whole run, which goes on as if it were not there."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from tests.cli.test_train_resume import members
from tests.cli.test_train_user_code import GOOD, TASK

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ITERATIONS = 40
# One microbatch an iteration: whatever is planned, sums have one order and losses are bitwise the same.
CONFIG = f"""
name = "t"
task = "task.py"
iterations = {ITERATIONS}
timeout_s = 60
[layout]
ranks = 2
[packing]
token_budget = 9
[planner]
budget_s = 0.05
deadline_s = 20
"""
GROWN_BYTES = 256 << 20
"""Memory that a process may take in any run from its first iterations to its last."""


WAIT = """
        while i == 20 and not Path(__file__).with_name("go").exists():
            time.sleep(0.05)
        time.sleep(0.05)"""


def config(folder: Path) -> Path:
    """A run that waits in its middle until it is told to go on, and takes its time otherwise."""
    text = TASK.replace("[nn.Linear(3, 4)]", "[nn.Linear(3, 4), nn.Linear(4, 4)]")
    loop = "    for i in range(num_iterations):"
    text = text.replace(loop, loop + WAIT)
    for name, code in GOOD.items():
        text = text.replace(name, code)
    folder.mkdir()
    (folder / "task.py").write_text("import time\nfrom pathlib import Path\n" + text)
    (folder / "train.toml").write_text(CONFIG)
    return folder / "train.toml"


def ports(processes: list[int]) -> dict[int, str]:
    """What the processes listen on: ports of this host, by address."""
    inodes = set()
    for process in processes:
        try:
            inodes |= {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}
        except OSError:
            continue
    found = {}
    for line in (line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found[int(port, 16)] = address
    return found


def memory(processes: list[int]) -> dict[int, int]:
    """Bytes of each process that lie in memory."""
    found = {}
    for process in processes:
        try:
            found[process] = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return found


class Stranger:
    """Sends what it can think of; knows no secret, and leaves no connection open but a few that say nothing."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.held: list[socket.socket] = []
        self.refused = self.spoken = 0

    def visit(self, port: int) -> None:
        """Come by once."""
        words = [
            b"",
            self.random.randbytes(self.random.choice([1, 4, 8, 36, 4096])),
            b"\xff" * 64,
            (1 << 62).to_bytes(8, "little") * 4,
            (1 << 30).to_bytes(4, "big") * 8,
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        ]
        try:
            there = socket.create_connection(("127.0.0.1", port), timeout=1.0)
            there.sendall(self.random.choice(words))
            self.spoken += 1
        except OSError:
            self.refused += 1
            return
        if len(self.held) < 20 and self.random.random() < 0.1:
            self.held.append(there)
        else:
            there.close()

    def begin_to_write(self, port: int) -> subprocess.Popen[str]:
        """Where a store answers, set and remove what a run is steered by."""
        return subprocess.Popen(
            [sys.executable, "-c", WRITE, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )


WRITE = f"""
import sys
from datetime import timedelta
import torch.distributed as dist
few = timedelta(seconds=3)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=few, wait_for_workers=False)
for _ in range(5):
    for key in ("stop", "setup", "latest", "ready", "watch", *(f"answer/{{i}}" for i in range({ITERATIONS}))):
        store.set(key, b"1")
        store.delete_key(key)
        store.set(key, bytes(1 << 16))
print("written")
"""


def written(writing: list[subprocess.Popen[str]]) -> int:
    """How many of those who write found a store; others wait for an answer of what is none, and are ended."""
    count = 0
    for each in writing:
        try:
            count += "written" in each.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            each.kill()
            each.communicate()
    return count


@pytest.mark.soak
def test_a_stranger_at_every_port_disturbs_no_run(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    path = config(alone)
    (alone / "go").touch()
    assert run(["train", str(path), "--runs", str(alone)]) == 0
    path, there = config(tmp_path / "there"), tmp_path / "there"
    history, said = there / "t" / "history.jsonl", there / "said"
    stranger, at_first, at_last = Stranger(), {}, {}
    command = [sys.executable, "-m", "pipeloom", "train", str(path), "--runs", str(there)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writing: dict[int, subprocess.Popen[str]] = {}
    num_written = 0
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment, start_new_session=True
        ) as started,
    ):
        while started.poll() is None:
            processes = members(started.pid)
            listening = ports(processes)
            # Nothing of a run on one host is offered to other hosts.
            assert set(listening.values()) <= {"0100007F", "00000000000000000000000001000000"}
            for port in listening:
                stranger.visit(port)
            if history.exists() and history.read_text().count("\n") >= 3:
                for port in listening.keys() - writing.keys():
                    writing[port] = stranger.begin_to_write(port)
                at_last = memory(processes) or at_last
                at_first = at_first or at_last
                if len(writing) == len(listening) and stranger.spoken > 100 and not (there / "go").exists():
                    num_written = written(list(writing.values()))
                    (there / "go").touch()
            time.sleep(0.02)
    for each in stranger.held:
        each.close()
    assert started.returncode == 0, said.read_text()
    # The plan store is one of the ports.
    assert num_written >= 1
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    undisturbed = [json.loads(line) for line in (alone / "t" / "history.jsonl").read_text().splitlines()]
    # Plans follow measured times, and their order of sums is not the same in two runs.
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in undisturbed], rel=1e-6)
    assert len(rows) == ITERATIONS
    summary = json.loads((history.parent / "summary.json").read_text())
    assert summary["plans_fresh"] == ITERATIONS
    assert all(at_last[each] - at_first[each] < GROWN_BYTES for each in at_first.keys() & at_last.keys())
