"""Systems by name on the evaluation's iterations; what was timed for one part is not timed again for another."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeloom.errors import InfeasibleError
from pipeloom.planner.case import Case, Groups
from pipeloom.planner.compare import SystemTimeline
from pipeloom.planner.comparison import SYSTEMS, TITLES
from pipeloom.planner.systems import System, dip_layout, partitioned, searched_system, unadaptive_system
from pipeloom.reproduce.dip.setups import Setup
from pipeloom.reproduce.part import Options
from pipeloom.search import Deadline
from pipeloom.timeline import check

MEGATRON, MEGATRON_EVEN = TITLES["interleaved"], TITLES["interleaved-time"]
NNSCALER, OPTIMUS = TITLES["nnscaler"], TITLES["optimus"]
PUBLISHED, PRIORITY = TITLES["dip"], TITLES["dip-priority"]
OURS, OURS_SAME = TITLES["pipeloom"], TITLES["pipeloom-dip-layout"]
BASELINES = tuple(title for key, title in TITLES.items() if not key.startswith(("dip", "pipeloom")))
STATIC, NO_SEARCH, NO_STRATEGIES = "DIP's layout, static order", "DIP, no search", "DIP, no strategies"
FIFO = "first in, first out"
MOST_SEARCH = 10
"""Times our search time that the published searches get, as the paper gives its planner ten seconds."""

_PARTS: dict[str, Callable[[Case, Sequence[Groups]], System]] = {
    STATIC: partitioned,
    NO_SEARCH: lambda c, t: unadaptive_system(NO_SEARCH, c, dip_layout(c, t), FIFO),
    NO_STRATEGIES: lambda c, t: unadaptive_system(NO_STRATEGIES, c, dip_layout(c, t), "mcts"),
}
_KEYS = {title: key for key, title in TITLES.items()}


@dataclass(frozen=True, slots=True)
class Timed:
    """One iteration under one system.

    Attributes
    ----------
    seconds : float
        Of the iteration, without the update of the weights.
    processor_s : float
        Of planning it: costs, graph, search, strategies and simulation.
    num_tasks : int
    gap : float
        Above the lower bound of the system's own graph, relative to it.
    """

    seconds: float
    processor_s: float
    num_tasks: int
    gap: float


def suits(name: str, setup: Setup) -> bool:
    """Whether a system can train a model: Optimus wants encoders before a language model."""
    return name != OPTIMUS or setup.case.model.modules[-1].reads != "videos"


@functools.lru_cache(maxsize=256)
def system(setup: Setup, name: str) -> System:
    """A system by its title, with its layout chosen on the typical iterations.

    Raises
    ------
    InfeasibleError
        Its layout cannot be made in memory.
    """
    case = setup.case
    if name == OURS:
        return searched_system(OURS, case, setup.layouts[0].layout)
    make = _PARTS.get(name) or SYSTEMS[_KEYS[name]]
    return make(case, setup.typical)


def run(one: System, groups: Groups, search_s: float, seed: int) -> SystemTimeline | None:
    """Plan one iteration and judge it by the independent checker; None: it does not fit."""
    try:
        found = one.run(groups, Deadline(search_s, "cpu"), seed)
    except InfeasibleError:
        return None
    faults = check(found.graph, found.schedule, found.timeline)
    if faults:
        raise AssertionError(f"{one.name}: {faults[0]}")
    return found


@functools.cache
def timed(setup: Setup, name: str, seed: int, number: int, search_s: float) -> Timed | None:
    """Time iteration ``number`` of a seed under a system by its title; None: it does not fit."""
    groups = setup.groups(seed, number)
    try:
        one = system(setup, name)
    except InfeasibleError:
        return None
    begin = time.process_time()
    found = run(one, groups, search_s, seed)
    spent = time.process_time() - begin
    if found is None:
        return None
    gap = found.timeline.makespan_ns / max(found.lower_bound.ns, 1) - 1
    return Timed(found.iteration_s, spent, found.graph.num_tasks, gap)


def iterations(options: Options, count: int | None = None) -> list[tuple[int, int]]:
    """Seed and number of every timed iteration: ``options.iterations`` (or ``count``) for each seed."""
    return [(seed, number) for seed in options.seeds for number in range(count or options.iterations)]


def all_timed(
    setup: Setup, name: str, numbers: Sequence[tuple[int, int]], search_s: float
) -> list[Timed] | None:
    """Time several iterations under a system; None: one of them does not fit."""
    out = []
    for seed, number in numbers:
        found = timed(setup, name, seed, number, search_s)
        if found is None:
            return None
        out.append(found)
    return out


def seconds_of(
    setup: Setup, name: str, numbers: Sequence[tuple[int, int]], search_s: float
) -> list[float] | None:
    """Seconds of several iterations under a system; None: one of them does not fit."""
    found = all_timed(setup, name, numbers, search_s)
    return None if found is None else [one.seconds for one in found]
