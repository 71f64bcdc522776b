"""Systems by name on the evaluation's iterations; what was timed for one part is not timed again for another."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.compare.baseline import (
    SIZES,
    Seconds,
    System,
    fixed_system,
    in_turn,
    replica_seconds,
    searched_system,
    standing,
)
from pipeloom.compare.baselines.dip import dip_layout
from pipeloom.compare.gain import packing_system, packs_anew
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, assignable_of, graph_of, resized
from pipeloom.compare.recomputation import per_module_recomputation
from pipeloom.compare.registry import BASELINES
from pipeloom.compare.repacking import reordered
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError
from pipeloom.layout.choose import CHAIN, nearest
from pipeloom.planner import FinishingTime
from pipeloom.search import Budget, interleaved_one_f_one_b, solve
from pipeloom.spec import Layout
from pipeloom.spec.datasets import CONTEXT_TOKENS
from pipeloom.taskgraph import NS_PER_S, IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, assignable_bound, check, simulate
from pipeloom_lab.reproduce.dip.setups import LARGE, PaperSetup
from pipeloom_lab.reproduce.part import Options
from pipeloom_lab.reproduce.texts import make_note
from pipeloom_lab.solvers import uniform_start

_ENTRIES = {entry.title: entry for entry in BASELINES.values()}
MEGATRON, MEGATRON_EVEN = BASELINES["interleaved"].title, BASELINES["interleaved-time"].title
NNSCALER, OPTIMUS = BASELINES["nnscaler"].title, BASELINES["optimus"].title
PUBLISHED, PRIORITY = BASELINES["dip"].title, BASELINES["dip-priority"].title
OURS, OURS_SAME = BASELINES["pipeloom"].title, BASELINES["pipeloom-dip-layout"].title
OURS_GIVEN = "Pipeloom, microbatches given"
"""Ours in all but the microbatches, which are those that the others are given."""
UNSEARCHED = "Pipeloom's layouts and packings, no search"
"""What ours would be with Megatron-LM's interleaved order, and one setting of recomputation for each module."""
BASELINE_NAMES = (
    "1f1b",
    "1f1b-time",
    "interleaved",
    "interleaved-time",
    "zero-bubble",
    "nnscaler",
    "optimus",
    "optimus-fine",
    "megascale-omni",
)
"""Systems that the evaluation holds DIP and ours against. Named one by one: what is published must not change when
somebody adds a system to compare with."""
BASELINE_TITLES = tuple(BASELINES[name].title for name in BASELINE_NAMES)
STATIC, NO_SEARCH, NO_STRATEGIES = "DIP's layout, static order", "DIP, no search", "DIP, uniform strategies"
FROM_UNIFORM = "DIP from the best uniform strategies"
FORMS = (PUBLISHED, PRIORITY, FROM_UNIFORM, NO_STRATEGIES, NO_SEARCH)
"""DIP in both published forms; with rollouts that start from the uniform strategies that first in, first out does best
with; searching orders under these alone; and no search at all, but the dual queue under them."""
BEST_FORM = "DIP, best of its forms"
SEARCHED = (PUBLISHED, PRIORITY, FROM_UNIFORM, NO_STRATEGIES)
FIFO = "first in, first out"
MOST_SEARCH = 10
"""Times ``search_s`` for planning an iteration from its samples on, as the paper gives its planner ten seconds."""
FEW_BOUNDS = 3
"""Layouts of the least lower bounds on the sampled iterations, of which the least is taken on the timed ones."""
MOST_TRIED = 3
"""Layouts, the nearest with given microbatches, of which ours takes the best with its own."""
CHOICE = Budget(seconds=2.0, clock="cpu")
"""To plan each sampled iteration under each of them."""


def jittered_s(setting: ModelOnCluster, found: BaselineResult, seed: int, draws: int = 3) -> float:
    """Mean seconds of an iteration in which every pass takes another time than planned, in the planned order.

    Times are log-normal. Their means are those planned, and their relative standard deviation is that of the device.
    """
    rng, jitter = np.random.default_rng(seed), setting.cluster.device.jitter
    chosen = found.schedule.candidate
    graph = found.graph if chosen is None else found.graph.with_candidates(chosen)
    schedule = replace(found.schedule, candidate=None)
    spread = np.sqrt(np.log1p(jitter**2))
    total = 0.0
    for _ in range(draws):
        factor = rng.lognormal(-(spread**2) / 2, spread, graph.num_tasks)
        drawn = replace(graph, duration_ns=np.rint(graph.duration_ns * factor).astype(np.int64))
        total += setting.iteration_s(replace(found, graph=drawn, schedule=schedule, timeline=simulate(drawn, schedule)))
    return total / draws


def _least_s(update_ns: IntArray) -> float:
    """The least update of a rank: so much later than its last task an iteration ends at least."""
    return int(update_ns.min()) / NS_PER_S


def partitioned(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """DIP's layout under Megatron-LM's interleaved order (the first step of DIP Table 5)."""
    return fixed_system("modality-aware, static order", setting, dip_layout(setting, batches), interleaved_one_f_one_b)


def unadaptive_system(name: str, setting: ModelOnCluster, layout: Layout, method: str, threads: int = 1) -> System:
    """A system that searches orders only, under one setting of recomputation for all.

    The setting is the one under which first in, first out is fastest.
    """

    def run(groups: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        graph = graph_of(setting, layout, groups, name, setting.levels)
        schedule = uniform_start(graph)
        if schedule is None:
            raise InfeasibleError(f"{name}: no setting of recomputation fits")
        choice = schedule.candidate
        if method != "first in, first out":
            single = graph.with_candidates(choice)
            schedule = solve(single, budget=budget, seed=seed, method=method, threads=threads).schedule
        chosen = Schedule(schedule.order, choice, name)
        return BaselineResult(name, layout, graph, chosen, simulate(graph, chosen))

    return System(name, layout, run)


_PARTS: dict[str, Callable[[ModelOnCluster, Sequence[Microbatches]], System]] = {
    STATIC: partitioned,
    NO_SEARCH: lambda c, t: unadaptive_system(NO_SEARCH, c, dip_layout(c, t), FIFO),
    NO_STRATEGIES: lambda c, t: unadaptive_system(NO_STRATEGIES, c, dip_layout(c, t), "mcts", threads()),
    PUBLISHED: lambda c, t: searched_system(PUBLISHED, c, dip_layout(c, t), "mcts", threads=threads()),
    PRIORITY: lambda c, t: searched_system(PRIORITY, c, dip_layout(c, t), "mcts priority", threads=threads()),
    FROM_UNIFORM: lambda c, t: searched_system(FROM_UNIFORM, c, dip_layout(c, t), "mcts uniform", threads=threads()),
}


def threads() -> int:
    """Half of the cores at hand, as DIP's planner takes (DIP §6.2)."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


_OF_DIP = frozenset({*_PARTS, OURS_SAME})
"""On DIP's layout: their microbatches have one size, the best of it."""


def planning_s(name: str, search_s: float) -> float:
    """Processor seconds that a system has for planning an iteration, from its samples to the plan: one rule for all.

    Ours has ten times ``search_s`` on one, and ``search_s`` where the microbatches are given; every search of DIP has
    ten times ``search_s`` on each of its threads.
    """
    return search_s * (MOST_SEARCH * threads() if name in SEARCHED else MOST_SEARCH if name == OURS else 1)


def rule(options: Options) -> str:
    """The rule of planning times in words."""
    each = options.search_s
    words = make_note("dip/rule", most_s=MOST_SEARCH * each, search_s=each, threads=threads())
    return words.replace("of 1 cores", "of 1 core")


def budget_of(name: str, search_s: float, finishing: FinishingTime | None = None) -> Budget:
    """The budget of an iteration that is planned from now on.

    Our search ends so early that the plan and its proof have their time too: by ``finishing``, or the planner's guess.
    """
    task_s = 0.0 if name in SEARCHED else (finishing or FinishingTime()).task_s
    return Budget(seconds=planning_s(name, search_s), clock="cpu", task_s=task_s).from_now()


@dataclass(frozen=True, slots=True)
class TimedIteration:
    """One iteration under one system."""

    seconds: float
    """Of the whole iteration, with the reduction of gradients and the update of the weights."""
    processor_s: float
    """Of planning it: costs, graph, search, strategies and simulation."""
    num_tasks: int
    bound_s: float
    """The lower bound of the system's own graph, or of all packings that it has judged."""
    jittered_s: float
    """Mean seconds where passes take longer or shorter than planned, as the device's table says."""
    as_chosen: bool
    """Whether it ran under the layout that was chosen; it did not fit that otherwise."""


def suits(name: str, setup: PaperSetup) -> bool:
    """Whether a system can train a model. Those that only this evaluation has are forms of DIP, which train all."""
    entry = _ENTRIES.get(name)
    return entry is None or entry.suits(setup.setting.model)


def sized(system: System, size: int) -> System:
    """The same system with merged or halved microbatches; see `SIZES`."""

    def run(microbatches: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        return system.run(resized(microbatches, size), budget, seed)

    return replace(system, run=run, choice=None)


def any_size(system: System, seconds: Seconds) -> System:
    """The same system with the fastest of all `SIZES` for every iteration, unless it packs itself.

    A system of several options is chosen by their times with the best size, so that layout and size suit each other.
    ``seconds`` returns the time of a result, as for `in_turn`.
    """
    if system.packs:
        return system
    if system.choice is not None:
        system = system.choice.sorted_by(lambda option: any_size(option, seconds))

    def run(microbatches: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        found, problem = list[BaselineResult](), None
        for size in SIZES:
            try:
                found.append(sized(system, size).run(microbatches, budget, seed))
            except InfeasibleError as error:
                problem = problem or error
        if not found:
            assert problem is not None
            raise problem
        return min(found, key=seconds)

    return replace(system, run=run)


def own_system(
    name: str,
    setting: ModelOnCluster,
    layouts: Sequence[Layout],
    batches: Sequence[Microbatches],
    tokens: int,
    budget: Budget,
) -> System:
    """Pipeloom as in training: it packs every iteration itself, under the best of ``layouts``.

    It keeps the given microbatches if these are faster on the sampled iterations, since only few packings of large
    graphs can be evaluated. If samples may not be packed in another way, microbatches are halved or merged for all
    iterations. ``budget`` is that of each layout and sampled iteration; for ``tokens`` see `packing_system`.
    """
    plain = [searched_system(name, setting, layout) for layout in layouts]
    if packs_anew(setting):
        options = [*(packing_system(name, setting, layout, tokens) for layout in layouts), *plain]
    else:
        options = [sized(one, size) for one in plain for size in SIZES]
    return replace(in_turn(name, options, batches, budget=budget, seconds=setting.iteration_s), packs=True)


@functools.lru_cache(maxsize=256)
def system(setup: PaperSetup, name: str) -> System:
    """A system by its title, with its layout chosen on the typical iterations.

    Baselines have microbatches of the size that is best for an iteration, DIP's forms of that which is best on the
    typical ones.

    Raises
    ------
    InfeasibleError
        Its layout cannot be made in memory.
    """
    setting = setup.setting
    if name == OURS_GIVEN:
        return searched_system(OURS_GIVEN, setting, setup.layouts[0].layout)
    if name == OURS:
        fitting = [one for one in setup.layouts if not one.problem]
        few = fitting[:1] if setup in LARGE.values() else nearest(fitting)[:MOST_TRIED]
        return own_system(OURS, setting, [one.layout for one in few], setup.typical, CONTEXT_TOKENS, CHOICE)
    if name == UNSEARCHED:
        return _unsearched(setup)
    make = _PARTS.get(name) or _ENTRIES[name].make
    made = make(setting, setup.typical)
    if name in BASELINE_TITLES:
        return any_size(made, setting.iteration_s)
    return sized(made, _size_of_dip(setup)) if name in _OF_DIP else made


def _unsearched(setup: PaperSetup) -> System:
    """Our layouts and packings under Megatron-LM's interleaved order."""
    setting = setup.setting
    fitting = [one for one in setup.layouts if not one.problem]
    chains = [one for one in fitting if one.name.startswith(CHAIN)]
    layouts = {one.layout.chunks: one.layout for one in (*nearest(fitting)[:MOST_TRIED], *chains)}.values()
    options = [
        fixed_system(UNSEARCHED, setting, layout, interleaved_one_f_one_b, per_module_recomputation)
        for layout in layouts
    ]
    return reordered(in_turn(UNSEARCHED, options, setup.typical, seconds=setting.iteration_s), setting)


@functools.lru_cache(maxsize=64)
def _size_of_dip(setup: PaperSetup) -> int:
    """How many of the given microbatches are best as one on DIP's layout, by its form that does not search."""
    setting = setup.setting
    plain = _PARTS[NO_SEARCH](setting, setup.typical)
    return min(SIZES, key=lambda size: standing(sized(plain, size), setup.typical, seconds=setting.iteration_s))


def chunks_a_rank(setup: PaperSetup, name: str) -> int:
    """Most stages that a rank has under a system's first layout; neighbouring chunks of one rank are one stage."""
    ranks = [rank for rank, _ in itertools.groupby(chunk.rank for chunk in system(setup, name).layout.chunks)]
    return max(ranks.count(rank) for rank in ranks)


def chunks_note(setup: PaperSetup) -> str:
    """How many chunks a rank Megatron-LM has, in words."""
    found = []
    for words, name in (("by parameters", MEGATRON), ("by time", MEGATRON_EVEN)):
        with suppress(InfeasibleError):
            found.append(f"{chunks_a_rank(setup, name)} {words}")
    return f"Megatron-LM interleaved has {', '.join(found)} chunks a rank."


def run(one: System, groups: Microbatches, budget: Budget, seed: int) -> BaselineResult | None:
    """Plan one iteration and judge it by the independent checker; None: it does not fit."""
    try:
        found = one.run(groups, budget, seed)
    except InfeasibleError:
        return None
    judge(found)
    return found


def judge(found: BaselineResult) -> None:
    """Refuse what the independent checker refuses."""
    refuse_faults(found.name, found.graph, found.schedule, found.timeline)


def refuse_faults(name: str, graph: TaskGraph, schedule: Schedule, timeline: Timeline) -> None:
    """Refuse what the independent checker refuses of somebody's schedule."""
    faults = check(graph, schedule, timeline)
    if faults:
        raise AssertionError(f"{name}: {faults[0]}")


@functools.cache
def timed(setup: PaperSetup, name: str, seed: int, number: int, search_s: float) -> TimedIteration | None:
    """Time iteration ``number`` of a seed under a system by its title; None: it does not fit."""
    groups = setup.groups(seed, number)
    try:
        one = system(setup, name)
    except InfeasibleError:
        return None
    begin = time.process_time()
    try:
        found = one.run(groups, budget_of(name, search_s), seed)
    except InfeasibleError:
        return None
    spent = time.process_time() - begin
    judge(found)
    setting = setup.setting
    update_ns = setting.update_ns(found.layout) if found.update_ns is None else found.update_ns
    return TimedIteration(
        setting.iteration_s(found),
        spent,
        found.graph.num_tasks,
        found.lower_bound.ns / NS_PER_S + found.after_s + _least_s(update_ns),
        jittered_s(setting, found, number),
        found.layout == one.layout,
    )


def iterations(options: Options, count: int | None = None) -> list[tuple[int, int]]:
    """Seed and number of every timed iteration: ``options.iterations`` (or ``count``) for each seed."""
    return [(seed, number) for seed in options.seeds for number in range(count or options.iterations)]


def planned_iterations(options: Options, name: str) -> list[tuple[int, int]]:
    """Iterations that a system is timed on: the first of each seed for DIP's, whose searches take longest."""
    few = name in (*FORMS, OURS_SAME) and not options.full
    return iterations(options, 1 if few else None)


def best_form(
    setup: PaperSetup, numbers: Sequence[tuple[int, int]], search_s: float, forms: Sequence[str] = FORMS
) -> tuple[str, float] | None:
    """The form of DIP with the least mean time, and that; None: none fits all iterations."""
    means = []
    for name in forms:
        found = seconds_of(setup, name, numbers, search_s)
        if found is not None:
            means.append((sum(found) / len(found), name))
    if not means:
        return None
    value, name = min(means)
    return name, value


def each_timed(
    setup: PaperSetup, name: str, numbers: Sequence[tuple[int, int]], search_s: float
) -> list[TimedIteration | None]:
    """Time several iterations under a system; None in the place of one that does not fit."""
    return [timed(setup, name, *number, search_s) for number in numbers]


def all_timed(
    setup: PaperSetup, name: str, numbers: Sequence[tuple[int, int]], search_s: float
) -> list[TimedIteration] | None:
    """Time several iterations under a system; None: one of them does not fit."""
    out = []
    for number in numbers:
        found = timed(setup, name, *number, search_s)
        if found is None:
            return None
        out.append(found)
    return out


def seconds_of(setup: PaperSetup, name: str, numbers: Sequence[tuple[int, int]], search_s: float) -> list[float] | None:
    """Seconds of several iterations under a system; None: one of them does not fit."""
    found = all_timed(setup, name, numbers, search_s)
    return None if found is None else [one.seconds for one in found]


def least_bound_s(setup: PaperSetup, groups: Microbatches) -> float:
    """No schedule of these microbatches is shorter, under any layout that was tried for ours."""
    fitting = sorted((one for one in setup.layouts if not one.problem), key=lambda one: one.bound_s)
    bounds = []
    for one in fitting[:FEW_BOUNDS]:
        bound = assignable_bound(assignable_of(setup.setting, one.layout, groups, "bound"))
        after_s = replica_seconds(setup.setting, one.layout) + _least_s(setup.setting.update_ns(one.layout))
        bounds.append(bound.ns / NS_PER_S + after_s)
    return min(bounds)
