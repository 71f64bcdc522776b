"""Pipeloom on its own packing, and where its gain over what somebody runs now comes from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeloom.compare.baseline import SIZES, System, in_turn, replica_seconds, searched_system, sized
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, batch_of, pack_microbatches
from pipeloom.compare.now import run_costs, static_graph, under_static_order
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.packing import PackingSpec
from pipeloom.packing.loads import budget_tokens
from pipeloom.planner.joint import decide, least_bound
from pipeloom.planner.problem import Problem
from pipeloom.search import StoppingRule, solve
from pipeloom.spec import Layout
from pipeloom.spec.current_run import CurrentRun
from pipeloom.timeline import Schedule, simulate

PACKED, PACKED_TITLE = "pipeloom-packed", "Pipeloom with its own microbatches"
MOST_TOGETHER = 8
"""Times the tokens of given microbatches that our own may have, where memory has room for them."""


@dataclass(frozen=True)
class GainStep:
    """What the pipeline takes once one thing more is Pipeloom's, all else being as before."""

    name: str
    iteration_s: float
    note: str = ""


def packs_anew(case: ModelOnCluster) -> bool:
    """Whether samples may go together otherwise: clips of one size go together, and who groups them knows why."""
    return all(module.reads != "videos" for module in case.model.modules)


def packing_system(name: str, case: ModelOnCluster, layout: Layout, tokens: int) -> System:
    """Pipeloom as in training: number, size and contents of microbatches, order and strategies are planned together.

    Its iterations are given without what samples were padded with. The lower bound of a result is the least of all
    packings that were judged.

    Parameters
    ----------
    tokens : int
        Of a given microbatch at most; ours may have `MOST_TOGETHER` times as many.
    """
    after_s = replica_seconds(case, layout)

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        batch = batch_of(groups)
        most = max(MOST_TOGETHER * tokens, int(budget_tokens(batch, case.model).max()))
        problem = Problem(
            case.model, layout, case.costs, PackingSpec(most), capacity_bytes=case.capacity_bytes, reckoned=case.memory
        )
        problem.warm_up()
        made = decide(problem, batch, budget, seed)
        return BaselineResult(
            name, layout, made.graph, made.schedule, made.timeline, least_bound(problem, made), after_s, made.packing
        )

    return System(name, layout, run)


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
        As in `packing_system`.
    budget : StoppingRule
        For each layout and sampled iteration.
    """
    plain = [searched_system(name, case, layout) for layout in layouts]
    if packs_anew(case):
        options = [*(packing_system(name, case, layout, tokens) for layout in layouts), *plain]
    else:
        options = [sized(one, size) for one in plain for size in SIZES]
    return replace(in_turn(name, options, batches, budget=budget), packs=True)


def split_gain(
    case: ModelOnCluster,
    run: CurrentRun,
    groups: Microbatches,
    ours: BaselineResult,
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
    ours : BaselineResult
        The last step: with a packing of its own, or on these groups.
    budget : StoppingRule
        For the order alone.

    Returns
    -------
    tuple of GainStep
        Fewer than four where one of the first does not fit.
    """
    layout, costs = ours.layout, run_costs(case, run)
    steps = []
    packings = {"layout": pack_microbatches(case, layout, groups)}
    if ours.packing is not None and ours.packing != packings["layout"]:
        packings["packing"] = ours.packing
    after_s = replica_seconds(case, layout)
    with suppress(InfeasibleError, InputError):
        for name, packing in packings.items():
            found = under_static_order(name, run, layout, static_graph(case, layout, packing, costs))
            leaner = run.strategy is not None and found.schedule.candidate is not None and found.schedule.candidate[0]
            note = "recomputes more, to fit" if leaner else ""
            steps.append(GainStep(name, found.iteration_s + after_s, note))
        steps.append(GainStep("order", _ordered(found, budget, seed).iteration_s + after_s))
    return (*steps, GainStep("memory", ours.iteration_s))


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
