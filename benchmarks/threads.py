"""What more threads of the search are worth: the budget in which they come as near to the bound as one thread.

With fewer cores than threads, or busy ones, wall time would say nothing. Then a clock counts the calling thread's
processor time, and a part of that of all others together, as if each had a core of its own: an *emulated* machine,
whose cores share neither caches nor memory lanes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable

from pipeloom.report import markdown_table
from pipeloom.search import Budget, compile_kernels, solve
from pipeloom_instances import instance

TITLE = "Threads of the search"
THREADS = 8
_FAMILIES = ("vlm-s-m1.5", "vlm-s-k3-m2.5", "vlm-l-k2-m1.5", "vlm-l-ckpt-k2-m1.5", "vlm-s", "t2v-l")
_SEEDS = range(5)
_WHOLE_S = 1.0
_PARTS = (0.125, 0.25, 0.5, 1.0)
_BUSY = 0.5
"""Load of the machine beyond which its cores are not idle."""


def clock_of_own_cores(threads: int) -> Callable[[], float]:
    """A clock of the seconds that pass if every thread has a core; only the thread that searches may read it."""

    def now() -> float:
        mine = time.thread_time()
        return mine + (time.process_time() - mine) / threads

    return now


def run() -> str:
    """Measure, and return the section as Markdown."""
    compile_kernels()
    return compare(THREADS)


def compare(
    threads: int, families: Iterable[str] = _FAMILIES, seeds: Iterable[int] = _SEEDS, whole_s: float = _WHOLE_S
) -> str:
    """Gaps of one thread, and of more in parts of its time."""
    cores, load, seeds = len(os.sched_getaffinity(0)), os.getloadavg()[0], list(seeds)
    real = cores >= threads and load < _BUSY
    rows = []
    for kind in families:
        alone = [gap(f"{kind}/{seed}", seed, 1, whole_s, real) for seed in seeds]
        cells, enough = [], "more"
        for part in _PARTS:
            together = [gap(f"{kind}/{seed}", seed, threads, part * whole_s, real) for seed in seeds]
            cells.append(f"{statistics.median(together):.2f}")
            if enough == "more" and statistics.median(together) <= statistics.median(alone):
                enough = f"{part:g}"
        rows.append([kind, f"{statistics.median(alone):.2f}", *cells, enough])
    header = ["family", f"1 thread, {whole_s:g} s", *(f"{threads}, {part * whole_s:g} s" for part in _PARTS), "enough"]
    how = (
        f"Measured: wall time on {cores} idle cores"
        if real
        else f"Emulated, not measured: {cores} cores with load {load:.1f} cannot run {threads} threads at once, so "
        "processor time of all threads but the calling one counts by that part"
    )
    text = (
        f"{how}. Gap to the lower bound in per cent, default method, medians of {len(seeds)} seeds. The "
        "last column is the share of the time in which several threads equal one thread. The goal is "
        "0.25:"
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def gap(name: str, seed: int, threads: int, seconds: float, real: bool) -> float:
    """Per cent above the bound, of an instance by name; ``real``: in wall time."""
    budget = Budget(seconds=seconds, clock="wall" if real else clock_of_own_cores(threads))
    return 100 * solve(instance(name), budget=budget, seed=seed, threads=threads).gap


if __name__ == "__main__":
    compile_kernels()
    print(compare(max(2, len(os.sched_getaffinity(0)) // 2)))
