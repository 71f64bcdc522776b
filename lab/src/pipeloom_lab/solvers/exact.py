"""Exact solvers behind the same interface: CP-SAT here, mixed integer programs and formulas in their own files.

All state the whole problem at once (DIP §5.4 calls it the full ILP baseline), so they are for small
graphs and for judging the others. They answer with an order per rank, the candidates, and a bound they proved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from pipeloom.errors import InputError
from pipeloom.search import Method, Solution, search_orders
from pipeloom.search.budget import WHOLE
from pipeloom.search.context import Context
from pipeloom.search.phases import default
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph, topological_order
from pipeloom.timeline import LowerBound, Schedule, check, simulate
from pipeloom.timeline.options import pair_options
from pipeloom_lab.solvers import exact_worker

START_SHARE = 0.1
"""Fraction of the budget in which the default method finds the schedule that a solver starts from."""
SECONDS = 10.0
"""Time limit of a solver if the budget has no deadline."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The result of an exact solver.

    Attributes
    ----------
    schedule : Schedule
        Best schedule found. It is the hint if the solver found no better one.
    bound_ns : int
        Lower bound of the makespan, in ns.
    proved : bool
        Whether the schedule is optimal.
    """

    schedule: Schedule
    bound_ns: int
    proved: bool


class ExactSolver(Protocol):
    """An exact solver. It gets seconds of wall time, a feasible schedule and a known bound."""

    def __call__(
        self, graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0
    ) -> Exact:
        """Return the best schedule found, and a bound."""
        ...


def exact_method(solver: ExactSolver) -> Method:
    """Return the method that continues from a schedule of the default method with an exact solver."""

    def solve(graph: TaskGraph, context: Context) -> Solution:
        first = search_orders(graph, context, default, WHOLE.first(START_SHARE))
        bound, hint, budget_s = first.lower_bound, first.schedule, context.meter.budget.seconds
        if first.timeline.makespan_ns <= bound.ns:
            return first
        seconds = SECONDS if budget_s is None else (1 - context.meter.spent) * budget_s
        found = solver(graph, seconds=seconds, hint=hint, bound_ns=bound.ns, workers=context.threads, seed=context.seed)
        if found.bound_ns > bound.ns:
            bound = LowerBound(found.bound_ns, context.method)
        return replace(context.solution(graph, found.schedule), lower_bound=bound)

    return Method(solve)


def finish(graph: TaskGraph, hint: Schedule, found: Schedule | None, bound_ns: int, optimal: bool) -> Exact:
    """Return the solver's schedule if it is feasible and shorter than the hint, else the hint, with a valid bound.

    The models know a task that lasts no time only by its moment, so orders among such tasks may not be what the
    solver had in mind, and are checked.
    """
    best, best_ns = hint, simulate(graph, hint).makespan_ns
    if found is not None:
        if check(graph, found):
            optimal = False
        elif (found_ns := simulate(graph, found).makespan_ns) < best_ns:
            best, best_ns = found, found_ns
    bound_ns = min(bound_ns, best_ns)
    return Exact(best, bound_ns, optimal or bound_ns >= best_ns)


def unit_of(graph: TaskGraph) -> int:
    """Return the greatest common divisor of all durations and delays; coarser units solve faster."""
    options = pair_options(graph)
    parts = (options.forward_ns, options.backward_ns, options.weight_ns, graph.duration_ns, graph.edge_delay_ns)
    values = np.concatenate([part.ravel() for part in parts])
    return max(1, int(np.gcd.reduce(values)))


def cp_sat(
    graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0
) -> Exact:
    """Solve with OR-Tools' CP-SAT: intervals on ranks, memory as a cumulative resource.

    Parameters
    ----------
    seconds : float
        Wall-time limit.
    hint : Schedule
        A feasible schedule to start from; it is returned if nothing better is found.
    bound_ns : int
        A known lower bound.
    workers : int
        Threads.
    """
    if find_spec("ortools") is None:
        raise InputError("method", "cp-sat needs OR-Tools, which is not installed", "pip install 'pipeloom-lab[exact]'")
    arguments = (graph, seconds, hint, bound_ns, workers, seed)
    answer: Exact = exact_worker.call("exact.solve_here", *arguments)
    return answer


def solve_here(graph: TaskGraph, seconds: float, hint: Schedule, bound_ns: int, workers: int, seed: int) -> Exact:
    """Run `cp_sat` in the process that loads OR-Tools."""
    from ortools.sat.python import cp_model

    unit = unit_of(graph)
    model = cp_model.CpModel()
    options = pair_options(graph)
    known = simulate(graph, hint)
    horizon = known.makespan_ns // unit
    start = [model.new_int_var(0, horizon, f"s{t}") for t in range(graph.num_tasks)]
    end = [model.new_int_var(0, horizon, f"e{t}") for t in range(graph.num_tasks)]
    picked = _pick_candidates(model, graph)
    length: list[Any] = [int(d) // unit for d in graph.duration_ns]
    tables = (
        (graph.forward_of, options.forward_ns),
        (graph.backward_of, options.backward_ns),
        (graph.weight_of, options.weight_ns),
    )
    for pair, literals in enumerate(picked):
        for tasks, table in tables:
            if tasks[pair] != NO_TASK and graph.candidates is not None:
                chosen = sum(x * int(table[pair, j] // unit) for j, x in enumerate(literals))
                length[tasks[pair]] = model.new_int_var(0, int(table[pair].max()) // unit, "")
                model.add(length[tasks[pair]] == chosen)
    intervals: list[list[Any]] = [[] for _ in range(graph.num_ranks)]
    for t in range(graph.num_tasks):
        model.add(end[t] == start[t] + length[t])
        intervals[graph.rank[t]].append(model.new_interval_var(start[t], length[t], end[t], f"i{t}"))
        model.add_hint(start[t], int(known.start_ns[t]) // unit)
        for e in range(graph.successor_start[t], graph.successor_start[t + 1]):
            model.add(start[int(graph.successor[e])] >= end[t] + int(graph.successor_delay_ns[e]) // unit)
    for row in intervals:
        model.add_no_overlap(row)
    _add_memory(model, graph, start, end, picked, horizon)
    makespan = model.new_int_var(-(-bound_ns // unit), horizon, "makespan")
    model.add_max_equality(makespan, end)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, seconds)
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return finish(graph, hint, None, bound_ns, optimal=False)
    starts = np.array([solver.value(x) for x in start], np.int64)
    ends = np.array([solver.value(x) for x in end], np.int64)
    choice = None
    if graph.candidates is not None:
        choice = np.array([next(j for j, x in enumerate(row) if solver.value(x)) for row in picked], np.int64)
    schedule = Schedule(orders_of(graph, starts, ends), choice, "cp-sat")
    proved_ns = round(solver.best_objective_bound) * unit
    return finish(graph, hint, schedule, max(bound_ns, proved_ns), bool(status == cp_model.OPTIMAL))


def _pick_candidates(model: Any, graph: TaskGraph) -> list[list[Any]]:
    """Return literals of every pair's candidates, exactly one of them true."""
    if graph.candidates is None:
        return [[1] for _ in range(graph.num_pairs)]
    rows = [[model.new_bool_var(f"c{p}.{j}") for j in range(len(row))] for p, row in enumerate(graph.candidates)]
    for row in rows:
        model.add_exactly_one(row)
    return rows


def _add_memory(
    model: Any, graph: TaskGraph, start: list[Any], end: list[Any], picked: list[list[Any]], horizon: int
) -> None:
    """Add the memory limits of every rank and of its host as cumulative resources."""
    options, ranks = pair_options(graph), graph.num_ranks
    spans: list[list[Any]] = [[] for _ in range(2 * ranks)]
    demands: list[list[Any]] = [[] for _ in range(2 * ranks)]

    def hold(rank: int, first: Any, last: Any, amounts: list[int], literals: list[Any]) -> None:
        size = model.new_int_var(0, horizon, "")
        spans[rank].append(model.new_interval_var(first, size, last, ""))
        if len(amounts) == 1:
            demands[rank].append(amounts[0])
            return
        demand = model.new_int_var(0, max(amounts), "")
        model.add(demand == sum(x * amount for x, amount in zip(literals, amounts, strict=True)))
        demands[rank].append(demand)

    for pair in range(graph.num_pairs):
        forward, backward, weight = (int(x[pair]) for x in (graph.forward_of, graph.backward_of, graph.weight_of))
        rank = int(graph.rank[forward])
        width = len(picked[pair])
        last = forward if backward == NO_TASK else backward
        hold(rank, start[forward], end[last], options.activation_bytes[pair, :width].tolist(), picked[pair])
        hold(ranks + rank, start[forward], end[last], options.host_bytes[pair, :width].tolist(), picked[pair])
        if weight != NO_TASK:
            amounts = options.weight_gradient_bytes[pair, :width].tolist()
            hold(rank, end[backward], end[weight], amounts, picked[pair])
    for source, target, held in zip(graph.edge_source, graph.edge_target, graph.edge_bytes, strict=True):
        if held:
            hold(int(graph.rank[source]), end[source], end[target], [int(held)], [1])
    if graph.staging_bytes is not None and graph.candidates is not None:
        home = graph.rank[graph.forward_of].tolist()
        for rank, staged in enumerate(graph.staging_bytes.tolist()):
            stages = model.new_bool_var("")
            for pair in range(graph.num_pairs):
                if home[pair] == rank:
                    for x, away in zip(picked[pair], options.host_bytes[pair].tolist(), strict=False):
                        if away:
                            model.add_implication(x, stages)
            demand = model.new_int_var(0, staged, "")
            model.add(demand == staged * stages)
            spans[rank].append(model.new_fixed_size_interval_var(0, horizon, ""))
            demands[rank].append(demand)
    for first, limits in ((0, graph.most_headroom_bytes), (ranks, graph.host_capacity_bytes)):
        if limits is not None:
            for rank, limit in enumerate(limits.tolist(), first):
                model.add_cumulative(spans[rank], demands[rank], limit)


def orders_of(graph: TaskGraph, start: IntArray, end: IntArray) -> tuple[IntArray, ...]:
    """Return orders by time; tasks of zero length follow precedence within one moment."""
    depth = np.zeros(graph.num_tasks, np.int64)
    depth[topological_order(graph)] = np.arange(graph.num_tasks)
    order = np.lexsort((depth, end, start))
    return tuple(order[graph.rank[order] == r] for r in range(graph.num_ranks))
