"""Compile kernels in several processes.

Each process calls the same functions, which call kernels on small examples, from another one on. Where another process
compiles a kernel, it goes on with the next function and comes back later.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from pipeloom.compiled.decorators import KERNELS, BusyError, has_code, is_storable, skipping_busy

_POLL_S = 0.1
_PAUSE_S = 0.05


class Kernels(NamedTuple):
    """Kernels of packages, and functions that call all of them, as ``module:function``.

    Functions that compile longest come first.
    """

    packages: tuple[str, ...]
    steps: tuple[str, ...]

    def missing(self) -> list[Any]:
        """Import the modules, and return the kernels that have no stored code."""
        for step in self.steps:
            _function(step)
        packages = tuple(f"{each}." for each in self.packages)
        return [each for each in KERNELS if each.py_func.__module__.startswith(packages) and not has_code(each)]


_SEARCH = "pipeloom.search.compilation"
PLANNER = Kernels(
    packages=("pipeloom.packing", "pipeloom.search", "pipeloom.timeline"),
    steps=(
        f"{_SEARCH}:compile_choices",
        f"{_SEARCH}:compile_tabu",
        f"{_SEARCH}:compile_moves",
        "pipeloom.packing.kernels:compile_kernels",
        f"{_SEARCH}:compile_moves_without_limit",
        f"{_SEARCH}:compile_rest",
        "pipeloom.packing.exact_kernels:compile_kernels",
        f"{_SEARCH}:compile_simulation",
    ),
)
"""The kernels of packing and search."""
COMPARE = Kernels(
    packages=(*PLANNER.packages, "pipeloom.emulator"),
    steps=(*PLANNER.steps, "pipeloom.iteration.emulation:compile_kernels"),
)
"""The kernels that ``pipeloom compare`` calls."""
ALL = Kernels(
    packages=("pipeloom",),
    steps=(
        PLANNER.steps[0],
        "pipeloom.layout.cooptimize.joint:compile_kernels",
        "pipeloom.tuning.tune:compile_kernels",
        *COMPARE.steps[1:],
    ),
)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_processes(kernels: Kernels, jobs: int = 0) -> int:
    """Return in how many processes to compile: ``jobs``, or as many as there are cores, but no more than have work."""
    return min(jobs or num_cores(), len(kernels.steps))


def compile_in_processes(kernels: Kernels, count: int, show: Callable[[int, int], None]) -> str:
    """Compile kernels in ``count`` processes, until all have called all functions.

    ``show`` is called several times a second with the number of kernels that are compiled and of those to compile.
    Return exit status and last words of a process that failed; empty if none failed, or if no kernel can be stored.
    """
    left, steps = [each for each in kernels.missing() if is_storable(each)], kernels.steps
    if not left:
        return ""
    # Without the working directory on the path, as in the command ``pipeloom``.
    command = [sys.executable, "-P", "-c", f"from {__name__} import work; work()"]
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        # They begin with different functions.
        processes = [
            subprocess.Popen(
                [*command, *steps[first:], *steps[:first]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=printed,
            )
            for first in (number * len(steps) // count for number in range(count))
        ]
        try:
            while any(process.poll() is None for process in processes):
                show(sum(map(has_code, left)), len(left))
                time.sleep(_POLL_S)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.wait()
        printed.seek(0)
        words = printed.read().split("\n")
    status = next((process.returncode for process in processes if process.returncode), 0)
    last = next((line.strip() for line in reversed(words) if line.strip()), "no message")
    return f"exit status {status}: {last}" if status else ""


def work() -> None:
    """Call the functions that the command line of this process names."""
    left, busy = deque(sys.argv[1:]), 0
    with skipping_busy():
        while left:
            step = left.popleft()
            try:
                _function(step)()
                busy = 0
            except BusyError:
                left.append(step)
                busy += 1
            if busy >= len(left) > 0:
                time.sleep(_PAUSE_S)


def _function(step: str) -> Any:
    module, _, name = step.partition(":")
    return getattr(import_module(module), name)
