"""The planner's process, which runs beside the training ranks and is restarted if it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from pipeloom.forks import ForkedCommand, can_fork, interrupts_held

# Longest wait in seconds for a killed process to end; the system may delay it.
_KILLED_S = 1.0
STORE_SECRET = "PIPELOOM_STORE_SECRET"
"""Environment variable with the secret of the store. A command line would be visible to all users."""

STARTER = "PIPELOOM_STARTER"
"""Environment variable with the process ID of the process that started a planner as an interpreter."""


@dataclass
class PlannerProcess:
    """Runs ``python -m pipeloom planner`` with the store at an address.

    Parameters
    ----------
    address : str
        ``host:port`` of the store. Can be changed before a restart.
    secret : str
        Secret of the store. Can be changed before a restart.
    max_restarts : int
        After this many restarts the planner is disabled, and training continues with fallback plans.
    """

    address: str
    secret: str
    max_restarts: int = 3
    num_restarts: int = field(init=False, default=0)
    started_s: float = field(init=False, default_factory=time.monotonic)
    """Time of the start or of the last restart, from `time.monotonic`."""
    _process: subprocess.Popen[bytes] | ForkedCommand | None = field(init=False, default=None)

    def start(self) -> None:
        """Start the process with one thread for numerics, so that it takes at most one core from training."""
        # A planner exits when its store ends. The log level suppresses the stack trace of the store.
        quiet = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        environment = {**quiet, STORE_SECRET: self.secret}
        arguments = ["planner", "--store", self.address]
        if can_fork():
            self._process = ForkedCommand(arguments, environment)
            return
        command = [sys.executable, "-m", "pipeloom", *arguments]
        with interrupts_held():
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env={**os.environ, **environment, STARTER: str(os.getpid())}
            )

    @property
    def pid(self) -> int | None:
        """The process ID; None before the start."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def may_restart(self) -> bool:
        """Return whether the planner can be restarted once more."""
        return self.num_restarts < self.max_restarts

    def restart(self) -> None:
        """End the old process and start a new one. If the system refuses, there is none until the next restart."""
        self.num_restarts += 1
        self.started_s = time.monotonic()
        self.kill()
        with suppress(OSError, EOFError):
            self.start()

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)

    def stop(self, grace_s: float = 2.0) -> None:
        """Wait for the process to end, then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
