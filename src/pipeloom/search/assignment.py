"""Assignment of the parts of replicated modules to ranks, chosen together with the order.

`pipeloom.taskgraph.build_graph` assigns parts so that all ranks have equal work, before any order is known. This
ignores several effects. A rank may wait for the first pass of the backbone while another rank encodes for it. The parts
of the first and last microbatches should be spread over all ranks. Memory differs by rank. An encoding on the rank that
reads it need not be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.search.budget import Budget, Meter, Stretch
from pipeloom.search.components import label_components
from pipeloom.search.example import small_pipeline
from pipeloom.search.kernels import assignment as kernels
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.methods import find_method
from pipeloom.search.params import DEFAULTS, SearchParams
from pipeloom.search.plain import first_in_first_out
from pipeloom.search.result import Solution
from pipeloom.search.solve import solve
from pipeloom.search.state import STEPS_PER_ROUND
from pipeloom.search.strategies import PacedChooser
from pipeloom.taskgraph import Assignable
from pipeloom.taskgraph.rows import close_edges, compressed
from pipeloom.timeline import (
    Schedule,
    assignable_bound,
    longest_paths,
    memory_changes,
    require_feasible,
    running_order,
    simulate,
    within_limits,
)
from pipeloom.timeline.options import fits_alone, least_held, pair_options

MOST_SWAPS = 400
"""Maximum number of changes that make an assignment even."""
LEAST_EVALUATIONS = 20
"""Budgets of fewer evaluations are spent on one assignment."""


@dataclass(frozen=True)
class Assigned:
    """A schedule and its assignment.

    Attributes
    ----------
    assignable : Assignable
        The assignment and the graph of the schedule.
    solution : Solution
        The schedule, with a bound that holds for every assignment.
    """

    assignable: Assignable
    solution: Solution


def solve_assignable(
    assignable: Assignable,
    *,
    budget: Budget,
    seed: int,
    method: str = "default",
    threads: int = 1,
    params: SearchParams = DEFAULTS,
) -> Assigned:
    """Search for an assignment and a schedule with a short makespan.

    If no part can be assigned, this is `solve`. Otherwise orders are searched under the initial assignment, and then
    under an assignment that is even under the strategies found. If nothing fits under the initial assignment, the
    search begins with one that spreads the memory over the ranks. Starting from the better of the two, assignment and
    order are annealed together, alternating with the choice of strategies. The fastest result is returned.

    Parameters
    ----------
    seed : int
        On one thread, the same seed and number of evaluations give the same result.
    method : str
        Name of a method; see `find_method`. The assignment is searched only if the method has ``assigns``.
    threads : int
        Number of threads for the search of orders.

    Raises
    ------
    InputError
        As for `solve`.
    InfeasibleError
        It is proved that no schedule fits under any assignment.
    NothingFoundError
        No schedule that fits was found, but this is not proved for all assignments.
    """
    if assignable.free.any():
        compile_assignment_kernels()
    steps = params.assignment
    few = budget.evaluations is not None and budget.evaluations < LEAST_EVALUATIONS
    searches = find_method(method).assigns
    run = partial(solve, seed=seed, method=method, threads=threads, params=params)
    if not assignable.free.any():
        return Assigned(assignable, run(assignable.graph, budget=budget))
    # A bound for one assignment does not hold for other assignments.
    bound = assignable_bound(assignable)
    meter = budget.start()
    if few or not searches or assignable.graph.edge_bytes.any():
        assignable, found = _first(assignable, lambda each: run(each.graph, budget=meter.rest()))
        return Assigned(assignable, replace(found, lower_bound=bound))
    meter.reserve(assignable.graph.num_tasks)
    best: Assigned | None = None

    def search(assignment: Assignable, until: float) -> Solution:
        found = run(assignment.graph, budget=meter.rest(until))
        meter.used += found.evaluations
        return found

    def offer(assignment: Assignable, solution: Solution) -> None:
        nonlocal best
        if best is None or solution.timeline.makespan_ns < best.solution.timeline.makespan_ns:
            best = Assigned(assignment, replace(solution, lower_bound=bound))

    assignable, first = _first(assignable, lambda each: search(each, steps.first_share))
    offer(assignable, first)
    assert best is not None
    if first.timeline.makespan_ns > bound.ns:
        other = rebalanced(assignable, first.schedule)
        with suppress(InfeasibleError):
            offer(other, search(other, steps.even_share))
    if best.solution.timeline.makespan_ns > bound.ns:
        found = best.solution
        other, schedule, tried = reassign(
            best.assignable, found.schedule, target_ns=bound.ns, budget=meter.rest(), seed=seed, params=params
        )
        meter.used += tried
        timeline = simulate(other.graph, schedule)
        require_feasible(other.graph, schedule, timeline)
        offer(other, replace(found, schedule=schedule, timeline=timeline))
    solution = replace(best.solution, evaluations=meter.used, elapsed_s=meter.elapsed_s())
    return replace(best, solution=solution)


def _first(assignable: Assignable, search: Callable[[Assignable], Solution]) -> tuple[Assignable, Solution]:
    """Search under the given assignment and, if nothing fits under it, under one that spreads the memory.

    If a rank has no memory left or a pair fits on no rank, this is proved for every assignment. Otherwise raise
    `NothingFoundError`.
    """
    try:
        return assignable, search(assignable)
    except InfeasibleError as error:
        failure = error
    graph = assignable.graph
    options = pair_options(graph)
    homes = (np.where(assignable.free, rank, assignable.assignment) for rank in range(graph.num_ranks))
    fits = np.stack([fits_alone(graph, options, home).any(axis=1) for home in homes], axis=1)
    headroom = graph.most_headroom_bytes
    if not fits.any(axis=1).all() or (headroom is not None and (headroom < 0).any()):
        raise failure
    other = assignable if headroom is None else _spread(assignable, fits, headroom)
    try:
        return other, search(other)
    except InfeasibleError as error:
        raise NothingFoundError(
            f"tried two assignments of replicated modules to ranks; not proved impossible for others: {error}"
        ) from failure


def _spread(assignable: Assignable, fits: npt.NDArray[np.bool_], headroom_bytes: npt.NDArray[np.int64]) -> Assignable:
    """Spread the least memory that each microbatch needs at once, largest parts first.

    Each free pair goes to the rank on which the pairs of its component leave most of the headroom.
    """
    graph, free, home = assignable.graph, assignable.free, assignable.assignment.copy()
    size = least_held(graph, pair_options(graph)).min(axis=1)
    component = label_components(graph)[graph.forward_of]
    left = np.tile(headroom_bytes, (int(component.max()) + 1, 1))
    np.subtract.at(left, (component[~free], home[~free]), size[~free])
    for pair in sorted(np.flatnonzero(free).tolist(), key=lambda pair: -size[pair]):
        row = left[component[pair]]
        home[pair] = max(np.flatnonzero(fits[pair]).tolist(), key=lambda rank: row[rank])
        row[home[pair]] -= size[pair]
    return assignable.assigned(home)


def rebalanced(assignable: Assignable, schedule: Schedule) -> Assignable:
    """Balance the loads of the ranks under the strategies of a schedule, with few changes.

    Parts of the rank with the largest load move or are exchanged, as long as the sum of the squared loads decreases.
    """
    graph = assignable.graph
    time = np.zeros((graph.num_pairs, graph.num_ranks))
    np.add.at(time, graph.pair, assignable.durations_ns(schedule.candidate))
    home = assignable.assignment.copy()
    everywhere = np.arange(graph.num_ranks)
    load = np.array([time[home == rank, rank].sum() for rank in everywhere])
    free = np.flatnonzero(assignable.free)
    for _ in range(MOST_SWAPS):
        full = int(load.argmax())
        mine, others = free[home[free] == full], free[home[free] != full]
        goal = np.concatenate([everywhere, home[others]])
        # A part moves alone or in exchange for another part. Compute what the full rank gives and the other rank gets.
        back = np.concatenate([np.zeros((graph.num_ranks, 2)), time[others][:, [full, full]]])
        back[graph.num_ranks :, 1] = time[others, home[others]]
        given = time[mine, full][:, None] - back[:, 0]
        got = time[mine][:, goal] - back[:, 1]
        gain = given * (2 * load[full] - given) - got * (2 * load[goal] + got)
        gain[:, full] = 0.0
        row, column = np.unravel_index(int(gain.argmax()), gain.shape) if gain.size else (0, 0)
        if not gain.size or gain[row, column] <= 0.0:
            break
        load[full] -= given[row, column]
        load[goal[column]] += got[row, column]
        home[mine[row]] = goal[column]
        if column >= graph.num_ranks:
            home[others[column - graph.num_ranks]] = full
    return assignable.assigned(home)


def reassign(
    assignable: Assignable,
    schedule: Schedule,
    *,
    target_ns: int,
    budget: Budget,
    seed: int,
    params: SearchParams = DEFAULTS,
) -> tuple[Assignable, Schedule, int]:
    """Anneal assignment and order together, from a schedule and under its strategies.

    Parameters
    ----------
    schedule : Schedule
        A schedule of ``assignable.graph`` that fits into memory.
    target_ns : int
        Makespan at which to stop.

    Returns
    -------
    Assignable, Schedule
        The best assignment and schedule found, not slower than the initial ones.
    int
        Number of lists tried.
    """
    random = np.array([(seed * 2 + 1) * 0x9E3779B97F4A7C15 % (1 << 64) | 1], np.uint64)
    meter = budget.start()
    best = now = _State(assignable, schedule, simulate(assignable.graph, schedule).makespan_ns)
    rounds = 1 if assignable.graph.candidates is None else params.assignment.rounds
    chooser: PacedChooser | None = None
    for turn in range(rounds):
        # A choice of strategies takes as long as the one before, and the last one ends with the budget.
        share = 0.0 if chooser is None else chooser.share
        until = (turn + 1) / rounds - share
        if best.ns <= target_ns or meter.left(1) == 0:
            break
        if share > 0 and until <= meter.spent:
            continue  # without new orders, the choice would be the last one again
        now = _anneal(now, meter, Stretch(meter.spent, until), target_ns, random, params.assignment.heat)
        best = min(best, now, key=lambda each: each.within_ns)
        if assignable.graph.candidates is not None:
            graph = now.assignable.graph
            chooser = PacedChooser(graph, meter, params.strategies, chooser)
            chosen = chooser.choose(now.schedule)
            now = _State(now.assignable, chosen, simulate(graph, chosen).makespan_ns)
            best = min(best, now, key=lambda each: each.within_ns)
    return best.assignable, best.schedule, meter.used


class _State(NamedTuple):
    """An assignment, a schedule under it, and its makespan."""

    assignable: Assignable
    schedule: Schedule
    ns: int

    @property
    def within_ns(self) -> int:
        """Return the makespan, or `NEVER` if pairs that offload no longer fit on the rank or its host."""
        graph = self.assignable.graph
        if not graph.limits_offload:
            return self.ns
        return self.ns if within_limits(graph, self.schedule, simulate(graph, self.schedule)) else codes.NEVER


def _anneal(
    now: _State, meter: Meter, stretch: Stretch, target_ns: int, random: npt.NDArray[np.uint64], heat: float
) -> _State:
    """Anneal in a part of the budget; return the best result."""
    arrays, mean_ns = _arrays_of(now.assignable, now.schedule)
    state = np.array([now.ns, now.ns], np.int64)
    wanted = max(1, STEPS_PER_ROUND // now.assignable.graph.num_tasks)
    while state[1] > target_ns and (spent := meter.spent) < stretch.until:
        terms = Terms(heat * mean_ns * stretch.cooling(spent), target_ns, meter.left(wanted, stretch.until))
        meter.used += max(1, int(kernels.anneal(arrays, state, random, terms)))
    other = now.assignable.assigned(arrays.best_home)
    listed = arrays.best_listed
    order = tuple(listed[other.graph.rank[listed] == rank] for rank in range(other.graph.num_ranks))
    return _State(other, Schedule(order, now.schedule.candidate, "assigned"), int(state[1]))


@cache
def compile_assignment_kernels() -> None:
    """Compile the annealing kernel, or load it from the cache."""
    graph = small_pipeline(num_ranks=2, num_microbatches=2)
    homes = tuple((0, 1) for _ in graph.module_names)
    link = np.zeros((graph.num_ranks, graph.num_ranks), np.int64)
    made = Assignable(graph, homes, graph.edge_delay_ns[:, None], link, np.ones(graph.num_ranks))
    arrays, _ = _arrays_of(made, first_in_first_out(graph))
    state, random = np.array([1, 1], np.int64), np.array([1], np.uint64)
    kernels.anneal(arrays, state, random, Terms(0.0, 0, 1))


def _arrays_of(assignable: Assignable, schedule: Schedule) -> tuple[kernels.AssignmentArrays, float]:
    graph = assignable.graph.with_candidates(schedule.candidate)
    # One column is for edges within a rank, and one for each link.
    columns = np.column_stack([np.zeros_like(graph.edge_delay_ns), assignable.crossing_ns])
    rows = []
    for column in columns.T:
        delay = np.where(assignable.loose, column, graph.edge_delay_ns)
        source, target, closed = close_edges(
            graph.edge_source, graph.edge_target, delay, graph.forward_of, graph.backward_of, graph.weight_of
        )
        rows.append(compressed(target, source, closed, graph.num_tasks))
    before_start, before, _ = rows[0]
    column_of = assignable.link + 1
    np.fill_diagonal(column_of, 0)
    at_start, at_end = memory_changes(graph)
    # A task without duration may start at the same time as its successors, so sort by depth too.
    depth = np.empty(graph.num_tasks, np.int64)
    depth[running_order(graph, schedule)] = np.arange(graph.num_tasks)
    listed = np.lexsort((depth, simulate(graph, replace(schedule, candidate=None)).start_ns))
    place = np.empty(graph.num_tasks, np.int64)
    place[listed] = np.arange(graph.num_tasks)
    never = np.iinfo(np.int64).max // 4
    capacity = np.full(graph.num_ranks, never) if graph.headroom_bytes is None else graph.headroom_bytes
    duration = assignable.durations_ns(schedule.candidate)
    _, tail = longest_paths(assignable.relaxed, duration.min(axis=1))
    home = assignable.assignment.copy()
    arrays = kernels.AssignmentArrays(
        home=home,
        listed=listed,
        place=place,
        pair=graph.pair,
        duration=duration,
        tail=tail,
        at_start=at_start.astype(np.int64),
        at_end=at_end,
        capacity=capacity,
        before_start=before_start,
        before=before,
        delay=np.column_stack([row[2] for row in rows]),
        column=column_of,
        after_start=graph.successor_start,
        after=graph.successor,
        own=np.flatnonzero(assignable.free),
        tasks=np.column_stack([graph.forward_of, graph.backward_of, graph.weight_of]),
        end=np.zeros(graph.num_tasks, np.int64),
        clock=np.zeros(graph.num_ranks, np.int64),
        allocated=np.zeros(graph.num_ranks, np.int64),
        best_home=home.copy(),
        best_listed=listed.copy(),
    )
    return arrays, float(graph.duration_ns.mean())
