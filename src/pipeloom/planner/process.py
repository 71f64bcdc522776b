"""The planner's process: started beside the training ranks, watched, and started again when it dies."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from pipeloom.forks import ForkedCommand, can_fork, interrupts_held

# A killed process is gone at once, unless the system itself is stuck with it; then it is left to the system.
_KILLED_S = 1.0
STORE_SECRET = "PIPELOOM_STORE_SECRET"
"""Environment variable by which the process is told the secret of the store: a command line is seen by everybody."""


STARTER = "PIPELOOM_STARTER"
"""Environment variable with the process ID of the one that has started a planner as an interpreter."""


@dataclass
class PlannerProcess:
    """Runs ``python -m pipeloom planner`` against the store at an address.

    Parameters
    ----------
    address : str
        ``host:port`` of the store; may be changed before a restart.
    secret : str
        Of the store; likewise.
    max_restarts : int
        A planner that dies or hangs more often is done without; training goes on with fallback plans.
    """

    address: str
    secret: str
    max_restarts: int = 3
    num_restarts: int = field(init=False, default=0)
    _process: subprocess.Popen[bytes] | ForkedCommand | None = field(init=False, default=None)

    def start(self) -> None:
        """Start the process. It has one thread for numerics, so that it takes one core from training at most."""
        # A store that is gone is no news to a planner: it leaves, without a stack of the store's own.
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
        """Process id, for those who watch it."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def may_restart(self) -> bool:
        """Whether it may be started once more."""
        return self.num_restarts < self.max_restarts

    def restart(self) -> bool:
        """Start the process again where that is still allowed, ending the old one; returns whether it was."""
        if not self.may_restart():
            return False
        self.num_restarts += 1
        self.kill()
        self.start()
        return True

    def kill(self) -> None:
        """End the process where it runs, whatever it is at."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)

    def stop(self, grace_s: float = 2.0) -> None:
        """Wait for the process to end, then make it."""
        if self._process is None:
            return
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
