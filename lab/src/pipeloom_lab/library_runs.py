"""Search methods over the instance library: runs and a table of their gaps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipeloom.search.budget import Budget
from pipeloom.search.result import Progress
from pipeloom.search.solve import solve
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import gap
from pipeloom_instances import instance


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
        """Return the makespan above the lower bound, relative to the bound."""
        return gap(self.makespan_ns, self.bound_ns)

    def gap_at(self, seconds: float) -> float:
        """Return the gap of the best schedule at this time, or of the first one before it."""
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
    """Solve every instance with every method and budget on one thread, with the instance's seed."""
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

    found = solve(graph, budget=Budget(seconds=budget_s, clock=clock), seed=seed, method=method, on_progress=note)
    end = (found.elapsed_s, found.timeline.makespan_ns)
    if not trace or end[1] < trace[-1][1]:
        trace.append(end)
    bound = found.lower_bound
    return Run(name, method, budget_s, end[1], bound.ns, bound.name, found.evaluations, tuple(trace))


def gap_table(runs: Iterable[Run]) -> str:
    """Return Markdown: a row per family and budget, a column per method, median gaps in per cent."""
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
