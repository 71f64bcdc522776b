"""A rank that is lost is named by the others at once, whatever their main threads do."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.launch.failure_detector import (
    FailureDetector,
    _read,
    address_towards,
    detect_failures,
    interface_towards,
)
from pipeloom.runtime.launch.processes import JoinedGroup, _meet

from .test_torchrun import STARTED

RANK = """
import sys, time
from pathlib import Path
from pipeloom.errors import InputError
from pipeloom.runtime.launch.failure_detector import detect_failures
rank, size, how = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

class Store:
    # In a file: torch takes longer to import than all that is tested here.

    def set(self, key, value):
        Path(sys.argv[1] + ".new").write_text(value)
        Path(sys.argv[1] + ".new").rename(sys.argv[1])

    def get(self, key):
        while not Path(sys.argv[1]).exists():
            time.sleep(0.02)
        return Path(sys.argv[1]).read_bytes()

found = detect_failures(Store(), rank, size)
print("here", flush=True)
if how == "fails" and rank == 1:
    time.sleep(0.5)
    print("said:", found.fail(InputError("batch", "is bad")), file=sys.stderr)
    sys.exit(2)
if how == "ends" and rank == 1:
    found.end()
    sys.exit(0)
time.sleep(3 if how == "ends" else 60)
found.end()
"""


def start(tmp_path: Path, how: str, size: int = 3) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    for each in started:
        assert each.stdout is not None
        assert each.stdout.readline() == "here\n"
    return started


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_rank_is_named_once_and_all_end(tmp_path: Path, lost: int) -> None:
    ranks = start(tmp_path, "sleeps")
    ranks[lost].send_signal(signal.SIGKILL)
    said = [each.communicate(timeout=30)[1] for each in ranks]
    assert [each.returncode for rank, each in enumerate(ranks) if rank != lost] == [2, 2]
    tell = [rank for rank, text in enumerate(said) if f"rank {lost} is lost" in text]
    assert tell == ([1, 2] if lost == 0 else [0])


JOINING = """
import os, sys, time
from pipeloom.errors import PipeloomError
from pipeloom.runtime.launch import processes
if os.environ["RANK"] == "1":
    processes.join_group = lambda *_: os._exit(9)
try:
    processes.join_workers(processes.this_worker(), 600.0)
except PipeloomError as error:
    print(error, file=sys.stderr)
    os._exit(2)
"""


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_that_is_lost_while_ranks_join_is_named_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING],
            env={**os.environ, **STARTED, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [each.communicate(timeout=120)[1] for each in started]
    assert [each.returncode for each in started] == [2, 9, 2], said
    assert [rank for rank, text in enumerate(said) if "rank 1 is lost" in text] == [0]


def test_a_host_that_no_longer_answers_is_as_one_that_has_ended() -> None:
    # What the system says of a connection whose other end answers no question of keep-alive.
    class Silent:
        def recv(self, size: int) -> bytes:
            raise TimeoutError(errno.ETIMEDOUT, f"no {size} bytes: Connection timed out")

    assert _read(Silent(), 4) == b""


def test_a_rank_that_fails_speaks_for_all(tmp_path: Path) -> None:
    ranks = start(tmp_path, "fails")
    said = [each.communicate(timeout=30)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [2, 2, 2]
    assert "said: batch: is bad" in said[1]
    assert "lost" not in "".join(said)


def test_a_rank_that_ends_in_peace_is_not_missed(tmp_path: Path) -> None:
    ranks = start(tmp_path, "ends")
    for each in ranks:
        each.communicate(timeout=60)
    assert [each.returncode for each in ranks] == [0, 0, 0]


def test_strangers_hold_nobody_up_and_are_none_of_us() -> None:
    store, found = dist.HashStore(), {}

    def join(rank: int) -> None:
        found[rank] = detect_failures(store, rank, 3)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1, 2)]
    threads[0].start()
    host, port, _ = store.get("watch").decode().split()
    strangers = [socket.create_connection((host, int(port))) for _ in range(4)]
    strangers[1].sendall(b"half of a sec")
    strangers[2].sendall(bytes(36))
    strangers[3].close()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found[0].others) == [1, 2]
    assert strangers[2].recv(1) == b""
    for rank in (1, 2, 0):
        found[rank].end()
    for thread in threading.enumerate():
        if thread.name == "failure detector":
            thread.join(60)
    for each in (*strangers, *(connection for one in found.values() for connection in one._connections.values())):
        each.close()


def test_an_error_of_waiting_is_reported_as_the_loss_behind_it() -> None:
    alone = FailureDetector(0)
    assert alone.fail(ExecutionError("iteration 3: another rank is gone")) == "iteration 3: another rank is gone"
    assert detect_failures(dist.HashStore(), 0, 1).fail(InputError("a", "b")) == "a: b"


def test_ranks_that_are_started_again_meet_under_a_name_of_their_own() -> None:
    store, found = dist.HashStore(), {}
    # What an earlier round left: a rank that asked and never heard.
    store.set("pipeloom/ask/1", "stale")

    def meet(rank: int) -> None:
        found[rank] = _meet(store, rank, 3)

    # Ranks that ended before they had begun leave nothing to continue.
    for again in (False, False, True):
        if again:
            group = JoinedGroup(False, FailureDetector(0), store)
            assert group.run is None
            group.begin("id")
            assert group.run == "id"
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0, 2)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(30)
        assert [found[rank][1] for rank in range(3)] == [again] * 3
        assert not found[0][0].check(["key"])
        found[0][0].set("key", str(again))
        assert {bytes(found[rank][0].get("key")).decode() for rank in range(3)} == {str(again)}


def test_this_host_knows_its_address_and_interface() -> None:
    assert address_towards("127.0.0.1")[1] == "127.0.0.1"
    if sys.platform == "linux":
        assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None
