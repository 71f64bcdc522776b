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


def config(folder: Path) -> Path:
    text = TASK.replace("[nn.Linear(3, 4)]", "[nn.Linear(3, 4), nn.Linear(4, 4)]")
    # Long enough for a stranger to come by between iterations.
    loop = "    for i in range(num_iterations):"
    text = text.replace(loop, f"{loop}\n        time.sleep(0.1)")
    for name, code in GOOD.items():
        text = text.replace(name, code)
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text("import time\n" + text)
    (folder / "train.toml").write_text(CONFIG)
    return folder / "train.toml"


def members(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


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
        self.asked: set[int] = set()
        self.refused = self.spoken = self.written = 0

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

    def write(self, port: int) -> None:
        """Where a store answers, set and remove what a run is steered by."""
        if port in self.asked:
            return
        self.asked.add(port)
        code = f"""
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
for _ in range(5):
    for key in ("stop", "setup", "latest", "ready", "watch", *(f"answer/{{i}}" for i in range({ITERATIONS}))):
        store.set(key, b"1")
        store.delete_key(key)
        store.set(key, bytes(1 << 16))
print("written")
"""
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=False)
        except subprocess.TimeoutExpired:
            return
        self.written += "written" in done.stdout


@pytest.mark.full
def test_a_stranger_at_every_port_disturbs_no_run(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    assert run(["train", str(config(alone)), "--runs", str(alone)]) == 0
    path, history = config(tmp_path / "there"), tmp_path / "there" / "t" / "history.jsonl"
    stranger, at_first, at_last = Stranger(), {}, {}
    command = [sys.executable, "-m", "pipeloom", "train", str(path), "--runs", str(path.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as started:
        while started.poll() is None:
            there = members(started.pid)
            listening = ports(there)
            # Nothing of a run on one host is offered to other hosts.
            assert all(address in ("0100007F", "00000000000000000000000001000000") for address in listening.values())
            begun = history.exists() and history.read_text().count("\n") >= 3
            for port in listening:
                stranger.visit(port)
                if begun:
                    stranger.write(port)
            if begun:
                at_last = memory(there) or at_last
                at_first = at_first or at_last
            time.sleep(0.02)
        said = started.stderr.read() if started.stderr is not None else ""
    assert started.returncode == 0, said
    assert stranger.spoken > 100
    assert stranger.written >= 1
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    undisturbed = [json.loads(line) for line in (alone / "t" / "history.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed]
    assert len(rows) == ITERATIONS
    summary = json.loads((history.parent / "summary.json").read_text())
    assert summary["plans_fresh"] == ITERATIONS
    assert all(at_last[each] - at_first[each] < GROWN_BYTES for each in at_first.keys() & at_last.keys())
