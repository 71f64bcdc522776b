"""Processes that begin warm have what was imported, and otherwise all that is given to an interpreter of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
COMMAND = [sys.executable, "-m", "tests.forked"]


def run(function: str, **more: str) -> list[dict[str, Any]]:
    """What the processes of `tests.forked` say."""
    environment = {**ENVIRONMENT, **more}
    ended = subprocess.run(
        [*COMMAND, function], capture_output=True, text=True, env=environment, timeout=300, check=True
    )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_forked_processes_have_the_imports_and_the_environment_and_output_of_who_asks() -> None:
    first, further, summary = run("call")
    wanted = {"warm": True, "given": "later", "folder": None, "threads": 1, "forks": True}
    assert [first, further] == [wanted, wanted]
    assert summary == {"forked": True, "codes": [0, 7]}


def test_a_process_with_threads_is_not_forked() -> None:
    first, further, summary = run("begin_a_thread")
    wanted = {"warm": False, "given": "later", "folder": None, "threads": 1, "forks": False}
    assert [first, further] == [wanted, wanted]
    assert summary == {"forked": False, "codes": [0, 7]}


def test_where_the_server_was_killed_interpreters_begin() -> None:
    first, further, summary = run("kill_the_server")
    assert (first["warm"], first["given"], further["warm"]) == (False, "later", False)
    assert summary == {"forked": False, "codes": [0, 7]}


def test_where_the_folder_for_temporary_files_has_a_long_name_interpreters_begin(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    first, further, summary = run("call", TMPDIR=str(folder))
    assert (first["warm"], further["warm"]) == (False, False)
    assert summary == {"forked": False, "codes": [0, 7]}
    assert not list(folder.glob("pipeloom-*"))


@pytest.mark.parametrize("server", ["lives", "kill_the_server"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_fork_that_stands_in_has_the_signals_and_the_end_of_its_process(sent: signal.Signals, server: str) -> None:
    command = [*COMMAND, "stand_in", server]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as started:
        assert started.stdout is not None
        assert int(started.stdout.readline()) != started.pid
        if server == "kill_the_server":
            time.sleep(2.0)
        started.send_signal(sent)
        # Both hold the output: it ends when both are gone.
        assert started.communicate(timeout=300) == ("", "")
    assert started.returncode == (-sent if sent == signal.SIGKILL else sent)


def test_a_signal_before_the_fork_is_ready_is_passed_on() -> None:
    ended = subprocess.run(
        [*COMMAND, "stand_in", "end_at_once"], capture_output=True, text=True, timeout=300, env=ENVIRONMENT, check=False
    )
    # The function may have its own handler already, or not yet.
    assert ended.returncode in (signal.SIGTERM, 128 + signal.SIGTERM)
    assert ended.stderr == ""


def test_a_fork_that_was_killed_is_reported_by_its_code() -> None:
    command = [*COMMAND, "stand_in"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as started:
        assert started.stdout is not None
        os.kill(int(started.stdout.readline()), signal.SIGKILL)
        started.communicate(timeout=300)
    assert started.returncode == 128 + signal.SIGKILL


def test_a_signal_that_the_caller_has_ignored_does_not_reach_the_fork() -> None:
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *COMMAND, "stand_in"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as started:
        assert started.stdout is not None
        started.stdout.readline()
        time.sleep(1.0)  # until it passes signals on
        started.send_signal(signal.SIGINT)
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=300)
    assert started.returncode == signal.SIGTERM
