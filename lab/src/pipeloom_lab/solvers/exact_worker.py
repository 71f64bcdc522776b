"""A process of its own for CP-SAT: `serve` answers calls over its pipes.

OR-Tools and highspy, which the product loads, each bring a HiGHS library under one name, and cannot both be loaded in
a process.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
from functools import cache
from importlib import import_module
from time import process_time
from typing import Any


@cache
def _worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from pipeloom_lab.solvers.exact_worker import serve; serve()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


_spent_s = [0.0]


def spent_s() -> float:
    """Return the processor time of all calls so far."""
    return _spent_s[0]


def call(name: str, *arguments: Any) -> Any:
    """Run a function of ``pipeloom.search``, ``"exact.solve_here"``, in the worker.

    Only this process writes to it and reads it.
    """
    process = _worker()
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump((name, arguments), process.stdin)
    process.stdin.flush()
    answer, seconds = pickle.load(process.stdout)
    _spent_s[0] += seconds
    return answer


def serve() -> None:
    """Answer calls until the pipe closes."""
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        module, _, function = name.partition(".")
        begin = process_time()
        answer = getattr(import_module(f"pipeloom_lab.solvers.{module}"), function)(*arguments)
        pickle.dump((answer, process_time() - begin), sys.stdout.buffer)
        sys.stdout.buffer.flush()
