"""Processes that tests start begin warm: forked from one that has imported everything already.

A rank is an interpreter of its own, and importing torch takes it longer than most tests take. So here ranks and
planners are forked from a server (`multiprocessing.forkserver`) which starts with the first of them. They are
processes like any other: they can be killed and can hang. What a fork leaves untried, that an interpreter starts from
nothing, is tried by tests marked ``cold``, and by all of them with ``--cold``. Training runs fork their processes
themselves (`pipeloom.forks`); this is for all that tests start, and from one server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from pipeloom import forks
from pipeloom.planner.process import STORE_SECRET, PlannerProcess

_QUIET = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


class _Target(forks.ForkTarget):
    """What a new process calls."""

    def begin(self) -> None:
        """Let it ask the tests' server for further ones."""
        # As `_start_server` leaves it: whoever begins warm here starts no server of its own.
        forkserver._forkserver._preload_modules = ["tests.warm"]  # type: ignore[attr-defined]
        PlannerProcess.start = _start_planner  # type: ignore[method-assign]


def _start_server() -> None:
    if "tests.warm" not in forkserver._forkserver._preload_modules:  # type: ignore[attr-defined]
        forkserver.set_forkserver_preload(["tests.warm", "tests.warm_imports"])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def end_server() -> None:
    """End the server; what it has forked has ended with the tests, or ends with whoever asked for it."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        # A server that the product has started ignores SIGTERM.
        os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)
        server._forkserver_pid = None


def _process(target: Callable[..., None], **named: Any) -> Any:
    """As the ``Process`` of a context."""
    return multiprocessing.get_context("forkserver").Process(target=_Target(target), **named)


class _Planner:
    """As `subprocess.Popen`, of a planner."""

    def __init__(self, address: str, secret: str) -> None:
        # A daemon: whoever leaves does not wait for it.
        self._process = _process(_plan, args=(address, secret), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("planner", timeout)
        return self._process.exitcode


def _plan(address: str, secret: str) -> None:
    from pipeloom.cli.app import run

    # Its parent as the system sees it is the server, which stays.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(_QUIET, **{STORE_SECRET: secret})
    sys.exit(run(["planner", "--store", address]))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start_planner(self: PlannerProcess) -> None:
    self._process = _Planner(self.address, self.secret)  # type: ignore[assignment]


def begin_warm(patch: pytest.MonkeyPatch) -> None:
    """From here on ranks and planners are forked from the server."""
    usual = multiprocessing.get_context

    def process(**named: Any) -> Any:
        _start_server()
        return _process(**named)

    def get_context(method: str | None = None) -> Any:
        return SimpleNamespace(Pipe=usual(method).Pipe, Process=process) if method == "spawn" else usual(method)

    def start(self: PlannerProcess) -> None:
        _start_server()
        _start_planner(self)

    # A run's own server would be a second one, and has not imported what tests do.
    patch.setattr(forks._SERVER, "ready", False)
    patch.setattr(multiprocessing, "get_context", get_context)
    patch.setattr(PlannerProcess, "start", start)
