"""Dealing the parts of replicated modules: the planner chooses the rank of each, together with its place in time.

`pipeloom.taskgraph.build_graph` deals so that all ranks have as much to do, before any order is known. What that
misses: a rank may wait for the backbone's first pass while another encodes for it, a microbatch that goes first or
last wants its parts spread over all ranks, memory differs by rank, and an encoding made on the rank that reads
it need not be sent.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InfeasibleError
from pipeloom.search import dealing_kernels
from pipeloom.search.families import family, generate
from pipeloom.search.plain import first_in_first_out
from pipeloom.search.result import Solution
from pipeloom.search.solve import solve
from pipeloom.search.state import STEPS_PER_ROUND
from pipeloom.search.stopping import StoppingRule, Until, Watch
from pipeloom.search.strategies import choose_strategies
from pipeloom.taskgraph import Dealable
from pipeloom.taskgraph.rows import close_edges, compressed
from pipeloom.timeline import (
    Schedule,
    Timeline,
    dealt_bound,
    heads_and_tails,
    memory_changes,
    running_order,
    simulate,
)

FIRST, SECOND = 0.35, 0.6
"""Parts of the budget after which orders under the dealing at hand have been searched, and orders under one that is
even under the strategies found; the rest is for the annealing of dealing and order."""
MOST_SWAPS = 400
"""Changes that make a dealing even."""
HEAT = 0.03
"""Start of the annealing, in mean durations of a task; it falls to nothing."""
ROUNDS = 4
"""Turns of annealing and of the choice of strategies, where there are any."""
LEAST_EVALUATIONS = 20
"""Budgets of fewer schedules go to one dealing."""
SEARCHES = ("default", "local search", "annealing", "windows")
"""Methods after which the dealing is chosen too; the others stand for one graph as it is."""


@dataclass(frozen=True)
class Dealt:
    """A schedule and the dealing that it is for.

    Attributes
    ----------
    dealable : Dealable
        Its graph is the schedule's.
    solution : Solution
        Its bound holds for every dealing.
    """

    dealable: Dealable
    solution: Solution


def solve_dealt(
    dealable: Dealable,
    *,
    budget: StoppingRule,
    seed: int,
    method: str = "default",
    threads: int = 1,
) -> Dealt:
    """Search for a dealing and a schedule with a short makespan.

    Where nothing can be dealt, this is `solve`. Else orders are searched under the dealing at hand, and under one that
    is even under the strategies found there; from the better of the two, dealing and order are annealed together, by
    turns with the choice of strategies. The fastest is the answer.

    Parameters
    ----------
    dealable : Dealable
    budget : StoppingRule
    seed : int
        The same seed and number of evaluations give the same answer on one thread.
    method : str
        A name in `METHODS` or `EXACT`; the dealing is chosen after those in `SEARCHES` only.
    threads : int
        Of the searches of orders.

    Raises
    ------
    InputError, InfeasibleError
        As `solve`.
    """
    if dealable.free.any():
        warm_up_dealing()
    watch = budget.start()
    few = watch.evaluations is not None and watch.evaluations < LEAST_EVALUATIONS
    if not dealable.free.any() or few or method not in SEARCHES or dealable.graph.edge_bytes.any():
        return Dealt(
            dealable, solve(dealable.graph, budget=budget, seed=seed, method=method, threads=threads)
        )
    bound = dealt_bound(dealable)
    best: Dealt | None = None
    used = 0

    def search(dealing: Dealable, until: float) -> Solution:
        nonlocal used
        rest = Until(watch, used, until)
        found = solve(dealing.graph, budget=rest, seed=seed, method=method, threads=threads)
        used += found.evaluations
        return found

    def offer(dealing: Dealable, solution: Solution) -> None:
        nonlocal best
        if best is None or solution.timeline.makespan_ns < best.solution.timeline.makespan_ns:
            best = Dealt(dealing, replace(solution, lower_bound=bound))

    first = search(dealable, FIRST)
    offer(dealable, first)
    assert best is not None
    if first.timeline.makespan_ns > bound.ns:
        other = rebalanced(dealable, first.schedule)
        with suppress(InfeasibleError):
            offer(other, search(other, SECOND))
    if best.solution.timeline.makespan_ns > bound.ns:
        found = best.solution
        other, schedule, tried = redeal(
            best.dealable,
            found.schedule,
            found.timeline,
            target_ns=bound.ns,
            budget=Until(watch, used, 1.0),
            seed=seed,
        )
        used += tried
        offer(other, replace(found, schedule=schedule, timeline=simulate(other.graph, schedule)))
    solution = replace(best.solution, evaluations=used, elapsed_s=watch.elapsed_s())
    return replace(best, solution=solution)


def rebalanced(dealable: Dealable, schedule: Schedule) -> Dealable:
    """Deal so that all ranks have as much to do under a schedule's strategies, with few changes.

    Parts move, or two change places, from the rank that has most to do, as long as the sum of the squares falls.
    """
    graph = dealable.graph.with_candidates(schedule.candidate)
    time = np.bincount(graph.pair, weights=graph.duration_ns, minlength=graph.num_pairs)
    home = dealable.dealing.copy()
    load = np.bincount(home, weights=time, minlength=graph.num_ranks)
    free = np.flatnonzero(dealable.free)
    for _ in range(MOST_SWAPS):
        full = int(load.argmax())
        mine, others = free[home[free] == full], free[home[free] != full]
        # A part on its own, or for another part: what the full rank gives away.
        given = np.concatenate([
            np.broadcast_to(time[mine][:, None], (len(mine), graph.num_ranks)),
            time[mine][:, None] - time[others][None, :],
        ], axis=1)  # fmt: skip
        goal = np.concatenate([np.arange(graph.num_ranks), home[others]])
        gain = given * (load[full] - load[goal] - given)
        gain[:, full] = 0.0
        row, column = np.unravel_index(int(gain.argmax()), gain.shape) if gain.size else (0, 0)
        if not gain.size or gain[row, column] <= 0.0:
            break
        amount = given[row, column]
        load[full] -= amount
        load[goal[column]] += amount
        home[mine[row]] = goal[column]
        if column >= graph.num_ranks:
            home[others[column - graph.num_ranks]] = full
    return dealable.dealt(home)


def redeal(
    dealable: Dealable,
    schedule: Schedule,
    timeline: Timeline,
    *,
    target_ns: int,
    budget: StoppingRule,
    seed: int,
) -> tuple[Dealable, Schedule, int]:
    """Anneal dealing and order together, from a schedule and under its strategies.

    Parameters
    ----------
    dealable : Dealable
    schedule, timeline
        Of ``dealable.graph``; they fit into memory.
    target_ns : int
        Makespan at which to stop.
    budget : StoppingRule
    seed : int

    Returns
    -------
    Dealable, Schedule
        The best found: no slower than what was given.
    int
        Lists tried.
    """
    random = np.array([(seed * 2 + 1) * 0x9E3779B97F4A7C15 % (1 << 64) | 1], np.uint64)
    watch, used = budget.start(), 0
    best = now = dealable, schedule, timeline.makespan_ns
    rounds = 1 if dealable.graph.candidates is None else ROUNDS
    for turn in range(rounds):
        if best[2] <= target_ns or watch.left(used, 1) == 0:
            break
        annealed, evaluations = _anneal(*now, target_ns, watch, used, (turn + 1) / rounds, random)
        used += evaluations
        best = min(best, annealed, key=lambda each: each[2])
        now = annealed
        if dealable.graph.candidates is not None:
            graph = annealed[0].graph
            tuned = choose_strategies(graph, annealed[1])
            now = annealed[0], tuned, simulate(graph, tuned).makespan_ns
            best = min(best, now, key=lambda each: each[2])
    return best[0], best[1], used


@cache
def warm_up_dealing() -> None:
    """Compile the kernel of the annealing, or load what was compiled."""
    graph = generate(family("uniform", num_ranks=2, num_microbatches=2), 0)
    homes = tuple((0, 1) for _ in graph.module_names)
    made = Dealable(graph, homes, graph.edge_delay_ns)
    deck, _ = _deck(made, first_in_first_out(graph))
    state, random = np.array([1, 1], np.int64), np.array([1], np.uint64)
    dealing_kernels.anneal(deck, state, random, 0.0, 0, 1)


_State = tuple[Dealable, Schedule, int]
"""A dealing, a schedule under it, and its makespan."""


def _anneal(
    dealable: Dealable, schedule: Schedule, makespan: int, target_ns: int, watch: Watch, used: int, until: float,
    random: npt.NDArray[np.uint64],
) -> tuple[_State, int]:  # fmt: skip
    deck, mean_ns = _deck(dealable, schedule)
    state = np.array([makespan, makespan], np.int64)
    wanted = max(1, STEPS_PER_ROUND // dealable.graph.num_tasks)
    before, since = used, watch.share(used)
    while state[1] > target_ns and (spent := watch.share(used)) < until:
        count = wanted if watch.evaluations is None else min(wanted, ceil(until * watch.evaluations) - used)
        heat = HEAT * mean_ns * (until - spent) / (until - since)
        used += max(
            1, int(dealing_kernels.anneal(deck, state, random, heat, target_ns, watch.left(used, count)))
        )
    other = dealable.dealt(deck.best_home)
    listed = deck.best_listed
    order = tuple(listed[other.graph.rank[listed] == rank] for rank in range(other.graph.num_ranks))
    return (other, Schedule(order, schedule.candidate, "dealt"), int(state[1])), used - before


def _deck(dealable: Dealable, schedule: Schedule) -> tuple[dealing_kernels.Deck, float]:
    graph = dealable.graph.with_candidates(schedule.candidate)
    together = np.where(dealable.loose, 0, graph.edge_delay_ns)
    apart = np.where(dealable.loose, dealable.crossing_ns, graph.edge_delay_ns)
    rows = []
    for delay in (together, apart):
        source, target, closed = close_edges(
            graph.edge_source, graph.edge_target, delay, graph.forward_of, graph.backward_of, graph.weight_of
        )
        rows.append(compressed(target, source, closed, graph.num_tasks))
    before_start, before, near = rows[0]
    far = rows[1][2]
    at_start, at_end = memory_changes(graph)
    # A task that lasts no time may start with those that come after it.
    depth = np.empty(graph.num_tasks, np.int64)
    depth[running_order(graph, schedule)] = np.arange(graph.num_tasks)
    listed = np.lexsort((depth, simulate(graph, replace(schedule, candidate=None)).start_ns))
    place = np.empty(graph.num_tasks, np.int64)
    place[listed] = np.arange(graph.num_tasks)
    never = np.iinfo(np.int64).max // 4
    room = (
        np.full(graph.num_ranks, never)
        if graph.capacity_bytes is None
        else graph.capacity_bytes - graph.static_bytes
    )
    _, tail = heads_and_tails(dealable.relaxed, graph.duration_ns)
    home = dealable.dealing.copy()
    deck = dealing_kernels.Deck(
        home=home, listed=listed, place=place, pair=graph.pair, duration=graph.duration_ns, tail=tail,
        at_start=at_start.astype(np.int64), at_end=at_end, room=room, before_start=before_start, before=before,
        together=near, apart=far, after_start=graph.successor_start, after=graph.successor,
        own=np.flatnonzero(dealable.free),
        tasks=np.column_stack([graph.forward_of, graph.backward_of, graph.weight_of]),
        end=np.zeros(graph.num_tasks, np.int64), clock=np.zeros(graph.num_ranks, np.int64),
        level=np.zeros(graph.num_ranks, np.int64), best_home=home.copy(), best_listed=listed.copy(),
    )  # fmt: skip
    return deck, float(graph.duration_ns.mean())
