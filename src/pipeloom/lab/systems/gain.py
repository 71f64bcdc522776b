"""Pipeloom on its own packing, and where its gain over what somebody runs now comes from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeloom.errors import InfeasibleError
from pipeloom.explain.compare import BaselineResult
from pipeloom.lab.systems.model_on_cluster import Microbatches, ModelOnCluster, batch_of, pack_microbatches
from pipeloom.lab.systems.now import run_costs, static_graph, under_static_order
from pipeloom.lab.systems.systems import SIZES, System, in_turn, replica_seconds, searched_system, sized
from pipeloom.packing import Packing, PackingSpec
from pipeloom.packing.loads import budget_tokens
from pipeloom.planner.joint import decide
from pipeloom.planner.problem import Problem
from pipeloom.search import StoppingRule, solve
from pipeloom.spec import Layout
from pipeloom.spec.current_run import CurrentRun
from pipeloom.timeline import Schedule, simulate

PACKED, PACKED_TITLE = "pipeloom-packed", "Pipeloom with its own microbatches"
MOST_TOGETHER = 8
"""Times the tokens of given microbatches that our own may have, where memory has room for them."""


class Packed(NamedTuple):
    """An iteration that Pipeloom packed itself, together with its schedule.

    The lower bound is the least of all packings that were judged.
    """

    packing: Packing
    result: BaselineResult


@dataclass(frozen=True)
class GainStep:
    """What the pipeline takes once one thing more is Pipeloom's, all else being as before."""

    name: str
    iteration_s: float
    note: str = ""


def packs_anew(case: ModelOnCluster) -> bool:
    """Whether samples may go together otherwise: clips of one size go together, and who groups them knows why."""
    return all(module.reads != "videos" for module in case.model.modules)


def packed_anew(
    case: ModelOnCluster, layout: Layout, real: Microbatches, tokens: int, budget: StoppingRule, seed: int
) -> Packed:
    """Plan an iteration as in training: number, size and contents of microbatches, order and strategies together.

    Parameters
    ----------
    layout : Layout
    real : Microbatches
        Whose samples are taken, without what they were padded with.
    tokens : int
        Of a given microbatch at most; ours may have `MOST_TOGETHER` times as many.

    Raises
    ------
    InfeasibleError
        Nothing fits.
    """
    batch = batch_of(real)
    most = max(MOST_TOGETHER * tokens, int(budget_tokens(batch, case.model).max()))
    problem = Problem(
        case.model, layout, case.costs, PackingSpec(most), capacity_bytes=case.capacity_bytes, reckoned=case.memory
    )
    problem.warm_up()
    made = decide(problem, batch, budget, seed)
    after_s = replica_seconds(case, layout)
    result = BaselineResult(
        PACKED_TITLE, layout, made.graph, made.schedule, made.timeline, made.least_bound, after_s, made.packing
    )
    return Packed(made.packing, result)


def own_system(
    name: str,
    case: ModelOnCluster,
    layouts: Sequence[Layout],
    batches: Sequence[Microbatches],
    tokens: int,
    budget: StoppingRule,
) -> System:
    """Pipeloom as in training: it makes the microbatches of every iteration itself, under the best of some layouts.

    Or it has the given ones, where these are faster on the sampled iterations: of large graphs only few packings can be
    looked at. Where samples may not go together otherwise, it has them halved, or several together, for all iterations.

    Parameters
    ----------
    tokens : int
        As in `packed_anew`.
    budget : StoppingRule
        For each layout and sampled iteration.
    """

    def packing(layout: Layout) -> System:
        def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
            return replace(packed_anew(case, layout, groups, tokens, budget, seed).result, name=name)

        return System(name, layout, run)

    plain = [searched_system(name, case, layout) for layout in layouts]
    if packs_anew(case):
        options = [*map(packing, layouts), *plain]
    else:
        options = [sized(one, size) for one in plain for size in SIZES]
    return replace(in_turn(name, options, batches, budget=budget), packs=True)


def split_gain(
    case: ModelOnCluster,
    run: CurrentRun,
    groups: Microbatches,
    ours: tuple[Layout, Packed | BaselineResult],
    budget: StoppingRule,
    seed: int = 0,
) -> tuple[GainStep, ...]:
    """Replace what somebody runs now by Pipeloom's, one thing after the other.

    The layout (with the sizes of its sub-microbatches), then the packing, the order, and what is held in memory. What
    comes first has what several could have: the sum is the gain, its parts hold for this order alone.

    Parameters
    ----------
    groups : Microbatches
        As they are run now.
    ours : tuple
        Pipeloom's layout, and the last step: with its own packing, or on these groups.
    budget : StoppingRule
        For the order alone.

    Returns
    -------
    tuple of GainStep
        Fewer than four where one of the first does not fit.
    """
    layout, last = ours
    costs = run_costs(case, run)
    steps = []
    given = pack_microbatches(case, layout, groups)
    packings: list[tuple[str, Packing]] = [("layout", given)]
    if isinstance(last, Packed):
        packings.append(("packing", last.packing))
    after_s = replica_seconds(case, layout)
    with suppress(InfeasibleError):
        for name, packing in packings:
            found = under_static_order(name, run, layout, static_graph(case, layout, packing, costs))
            leaner = run.strategy is not None and found.schedule.candidate is not None and found.schedule.candidate[0]
            note = "recomputes more, to fit" if leaner else ""
            steps.append(GainStep(name, found.iteration_s + after_s, note))
        steps.append(GainStep("order", _ordered(found, budget, seed).iteration_s + after_s))
    result = last.result if isinstance(last, Packed) else last
    return (*steps, GainStep("memory", result.iteration_s))


def _ordered(static: BaselineResult, budget: StoppingRule, seed: int) -> BaselineResult:
    """Search an order, what is held staying as it is; the static one where none is faster."""
    choice = static.schedule.candidate
    graph = static.graph if choice is None else static.graph.with_candidates(choice)
    with suppress(InfeasibleError):
        found = solve(graph, budget=budget, seed=seed).schedule
        schedule = Schedule(found.order, choice, "order")
        timeline = simulate(static.graph, schedule)
        if timeline.makespan_ns < static.timeline.makespan_ns:
            return replace(static, schedule=schedule, timeline=timeline)
    return static
