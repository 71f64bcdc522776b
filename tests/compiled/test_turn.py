"""One process compiles a kernel and the others load it; nothing that happens to it holds them up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pipeloom.compiled.turn import Turn

KERNEL = """
import sys
from pipeloom.compiled import kernel
@kernel
def twice(number):
    return 2 * number
print("ready", flush=True)
sys.stdin.readline()
print(twice(3), sum(twice.stats.cache_hits.values()))
"""
HOLDER = """
import sys
from pathlib import Path
from pipeloom.compiled.turn import Turn
turn = Turn(Path(sys.argv[1]))
turn.take()
print("taken", flush=True)
sys.stdin.readline()
"""


def _start(*command: str, **named: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, **named)
    assert process.stdout.readline()
    return process


@pytest.mark.full
def test_of_processes_that_need_a_kernel_at_once_one_compiles_it(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    processes = [_start(str(file), env=environment) for _ in range(3)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in processes) == ["6 0\n", "6 1\n", "6 1\n"]


def test_the_turn_of_a_process_that_is_killed_ends(tmp_path):
    file = tmp_path / "kernel.lock"
    holder = _start("-c", HOLDER, str(file))
    waiting = Turn(file, longest_s=0.0)
    waiting.take()
    assert not waiting.taken
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    waiting.take()
    assert waiting.taken
    waiting.end()


def test_a_turn_that_has_ended_can_be_taken_by_others_and_again(tmp_path):
    first, second = (Turn(tmp_path / "kernel.lock", longest_s=0.0) for _ in range(2))
    for one, other in ((first, second), (second, first)):
        one.take()
        one.take()
        other.take()
        assert one.taken
        assert not other.taken
        one.end()
        one.end()


def test_where_no_file_can_be_written_nobody_waits(tmp_path):
    turn = Turn(tmp_path / "nowhere" / "kernel.lock")
    turn.take()
    assert not turn.taken
    turn.end()
