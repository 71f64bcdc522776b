"""Large problems under limited memory: checking, the bound, the first schedule, and the gap after half a minute.

Every problem is made and measured in a process of its own, so that peaks of memory are its own.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from pipeloom.report import markdown_table
from pipeloom.search import Budget, Progress, compile_kernels, solve
from pipeloom.timeline import check, lower_bound
from pipeloom_instances import Family, family, generate

TITLE = "Large problems"
_SEARCH_S = 30.0
TIGHT = "vlm-s-m1.5, 4 ranks"
_CKPT_L = family("vlm-l", memory=1.5, recompute=True)
SHAPES: dict[str, tuple[Family, tuple[int, ...]]] = {
    TIGHT: (family("vlm-s", memory=1.5), (64, 1700, 27_000)),
    "vlm-s-ckpt-m1.5, 16 ranks": (family("vlm-s", num_ranks=16, memory=1.5, recompute=True), (420, 6700)),
    "vlm-l-ckpt-k2-m1.5, 8 ranks": (_CKPT_L, (580, 9200)),
    "vlm-s-m1.5, 64 ranks": (family("vlm-s", num_ranks=64, memory=1.5), (104, 1680)),
}
"""Families, and the microbatches for about 1.2 k, 32 k and 512 k tasks."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One problem: CPU seconds of the steps, gaps, and the process's peak of memory."""

    num_tasks: int
    bound_s: float
    first_s: float
    check_s: float
    first_gap: float
    gap: float
    evaluations: int
    peak_gib: float


def measure(of: Family, num_microbatches: int, seconds: float = _SEARCH_S) -> Measurement:
    """Make a problem and search it."""
    graph = generate(replace(of, num_microbatches=num_microbatches), 0)
    begin = time.process_time()
    lower_bound(graph)
    bound_s = time.process_time() - begin
    first: list[tuple[float, int]] = []

    def note(state: Progress) -> None:
        if not first:
            first.append((time.process_time() - begin, state.best_ns))

    begin = time.process_time()
    found = solve(graph, budget=Budget(seconds=seconds, clock="cpu"), seed=0, on_progress=note)
    first_s, best_ns = first[0]
    begin = time.process_time()
    assert not check(graph, found.schedule, found.timeline)
    check_s = time.process_time() - begin
    first_gap = 100 * (best_ns / found.lower_bound.ns - 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Measurement(graph.num_tasks, bound_s, first_s, check_s, first_gap, 100 * found.gap, found.evaluations, peak)


def run() -> str:
    """Measure, and return the section as Markdown."""
    compile_kernels()
    rows = []
    for name, (of, sizes) in SHAPES.items():
        for size in sizes:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                got = pool.submit(_warmly, of, size).result()
            rows.append(
                [
                    f"{name} x {size}",
                    str(got.num_tasks),
                    f"{got.check_s:.2f}",
                    f"{got.bound_s:.2f}",
                    f"{got.first_s:.2f}",
                    f"{got.first_gap:.1f}",
                    f"{got.gap:.2f}",
                    str(got.evaluations),
                    f"{got.peak_gib:.2f}",
                ]
            )
    header = ["problem", "tasks", "check, s", "bound, s", "first schedule, s", "its gap, %", "gap, %", "tried", "GiB"]
    text = (
        "CPU seconds to check a schedule, to compute the lower bound, and to find the first schedule "
        f"(bound included). Gap of the first schedule, and gap after {_SEARCH_S:g} s on one thread, from "
        "the schedules tried, which may be of a sample of the problem. Goals at 512k tasks: check 1 s, "
        "first schedule 10 s, the gap at 32k tasks:"
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _warmly(of: Family, size: int) -> Measurement:
    compile_kernels()
    return measure(of, size)
