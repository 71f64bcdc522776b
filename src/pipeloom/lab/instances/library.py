"""The public instance library, and running methods over it.

The library's problems are made by `instance` from nothing but their name; the files in
``benchmarks/instances`` are the same problems written out, for those who use other tools.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipeloom.errors import InputError
from pipeloom.lab.instances.families import Family, family, generate
from pipeloom.search.result import Progress
from pipeloom.search.solve import solve
from pipeloom.search.stopping import Deadline
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import gap

LIBRARY: dict[str, Family] = {
    "vlm-s": family("vlm-s"),
    "vlm-s-m1.5": family("vlm-s", memory=1.5),
    "vlm-s-m2": family("vlm-s", memory=2.0),
    "vlm-s-m4": family("vlm-s", memory=4.0),
    "vlm-s-ckpt-m1.5": family("vlm-s", memory=1.5, recompute=True),
    "vlm-s-ckpt-k3-m2.5": family("vlm-s", segments=3, memory=2.5, recompute=True),
    "vlm-s-k2": family("vlm-s", segments=2),
    "vlm-s-k3": family("vlm-s", segments=3),
    "vlm-s-k3-m2.5": family("vlm-s", segments=3, memory=2.5),
    "vlm-s-split": family("vlm-s", split=True),
    "vlm-s-split-m1.5": family("vlm-s", split=True, memory=1.5),
    "vlm-s-may-split": family("vlm-s", split=True, split_price=0.05),
    "vlm-s-ckpt-may-split-m2": family("vlm-s", split=True, split_price=0.05, recompute=True, memory=2.0),
    "vlm-s-jitter": family("vlm-s", jitter=0.05, delay_ns=500_000),
    "vlm-s-strategies-m1.5": family("vlm-s", strategies=True, memory=1.5),
    "vlm-s-strategies-m4": family("vlm-s", strategies=True, memory=4.0),
    "vlm-m": family("vlm-m"),
    "vlm-m-ckpt-m1.5": family("vlm-m", memory=1.5, recompute=True),
    "vlm-l-k2": family("vlm-l"),
    "vlm-l-k2-m1.5": family("vlm-l", memory=1.5),
    "vlm-l-ckpt-k2-m1.5": family("vlm-l", memory=1.5, recompute=True),
    "vlm-xl": family("vlm-xl"),
    "vlm-xl-ckpt-m1.5": family("vlm-xl", memory=1.5, recompute=True),
    "t2v-s": family("t2v-s"),
    "t2v-s-m1.5": family("t2v-s", memory=1.5),
    "t2v-s-m4": family("t2v-s", memory=4.0),
    "t2v-s-strategies-m1.5": family("t2v-s", strategies=True, memory=1.5),
    "t2v-l": family("t2v-l"),
    "t2v-l-m1.5": family("t2v-l", memory=1.5),
    "uniform-4x16": family("uniform"),
    "uniform-4x16-m1": family("uniform", memory=1.0),
    "uniform-4x16-split": family("uniform", split=True),
    "uniform-4x16-may-split": family("uniform", split=True, split_price=0.05),
    "uniform-8x32-k2": family("uniform", num_ranks=8, num_microbatches=32, segments=2),
    "small-vlm": family("vlm-s", num_microbatches=8),
    "small-vlm-m1.5": family("vlm-s", num_microbatches=8, memory=1.5),
    "tiny-vlm-m1": family("vlm-s", num_ranks=2, num_microbatches=3, memory=1.0),
}
"""Families by name; an instance is one of them with a seed, ``vlm-s/3``."""


def instance(name: str) -> TaskGraph:
    """Problem ``FAMILY/SEED`` of the library."""
    kind, _, seed = name.partition("/")
    if kind not in LIBRARY or not seed.isdigit():
        raise InputError("instance", f"{name!r} is not FAMILY/SEED", f"families: {', '.join(LIBRARY)}")
    return generate(LIBRARY[kind], int(seed), name)


@dataclass(frozen=True, slots=True)
class Run:
    """One method on one instance: times in nanoseconds, gap above the lower bound.

    ``trace`` has, for every better schedule found on the way, when (by the budget's clock) and its makespan.
    """

    instance: str
    method: str
    budget_s: float
    makespan_ns: int
    bound_ns: int
    bound_name: str
    evaluations: int
    trace: tuple[tuple[float, int], ...] = ()

    @property
    def gap(self) -> float:
        """Makespan above the bound, relative to it."""
        return gap(self.makespan_ns, self.bound_ns)

    def gap_at(self, seconds: float) -> float:
        """The gap of the best schedule found so soon, or of the first one where there was none yet."""
        best = self.trace[0][1] if self.trace else self.makespan_ns
        for moment, makespan_ns in self.trace:
            if moment <= seconds:
                best = min(best, makespan_ns)
        return gap(best, self.bound_ns)


def run_library(
    families: Iterable[str],
    methods: Iterable[str],
    *,
    budgets_s: Iterable[float] = (1.0,),
    seeds: Iterable[int] = range(5),
    clock: Literal["wall", "cpu"] = "cpu",
    on_run: Callable[[Run], None] | None = None,
) -> Iterator[Run]:
    """Solve every instance with every method and budget, on one thread; the search's seed is the instance's."""
    seeds, methods, budgets_s = list(seeds), list(methods), list(budgets_s)
    for kind in families:
        for seed in seeds:
            name = f"{kind}/{seed}"
            graph = instance(name)
            for method in methods:
                for budget in budgets_s:
                    run = _run(name, graph, method, budget, seed, clock)
                    if on_run is not None:
                        on_run(run)
                    yield run


def _run(name: str, graph: TaskGraph, method: str, budget_s: float, seed: int, clock: Literal["wall", "cpu"]) -> Run:
    trace: list[tuple[float, int]] = []

    def note(state: Progress) -> None:
        # Makespans under candidates go up between two turns of the search, so only the better ones count.
        if not trace or state.best_ns < trace[-1][1]:
            trace.append((state.elapsed_s, state.best_ns))

    found = solve(graph, budget=Deadline(budget_s, clock), seed=seed, method=method, on_progress=note)
    end = (found.elapsed_s, found.timeline.makespan_ns)
    if not trace or end[1] < trace[-1][1]:
        trace.append(end)
    bound = found.lower_bound
    return Run(name, method, budget_s, end[1], bound.ns, bound.name, found.evaluations, tuple(trace))


def gap_table(runs: Iterable[Run]) -> str:
    """Markdown: one row per family and budget, one column per method, medians of the gap in per cent."""
    runs = list(runs)
    methods = list(dict.fromkeys(run.method for run in runs))
    cells: dict[tuple[str, float], dict[str, list[float]]] = {}
    for run in runs:
        row = cells.setdefault((run.instance.partition("/")[0], run.budget_s), {})
        row.setdefault(run.method, []).append(100 * run.gap)
    lines = ["| family | s | " + " | ".join(methods) + " |", "|---|---|" + "---|" * len(methods)]
    for (kind, budget), row in cells.items():
        shown = (f"{statistics.median(row[m]):.2f}" if m in row else "" for m in methods)
        lines.append(f"| {kind} | {budget:g} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
