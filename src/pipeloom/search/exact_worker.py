"""A process of its own for CP-SAT: `serve` answers calls over its pipes.

OR-Tools and highspy each bring a HiGHS library under one name, and cannot both be loaded in a process.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
from functools import cache
from typing import Any


@cache
def _worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from pipeloom.search.exact_worker import serve; serve()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


def call(*arguments: Any) -> Any:
    """Run ``pipeloom.search.exact.solve_here`` in the worker; only this process writes to it and reads it."""
    process = _worker()
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(arguments, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def serve() -> None:
    """Answer calls until the pipe closes."""
    from pipeloom.search.exact import solve_here

    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(solve_here(*arguments), sys.stdout.buffer)
        sys.stdout.buffer.flush()
