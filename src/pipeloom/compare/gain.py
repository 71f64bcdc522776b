"""Pipeloom with its own packing, and the parts of its gain over the current run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from pipeloom.compare.baseline import System, replica_seconds
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, pack_microbatches, packed_assignable
from pipeloom.compare.now import run_costs, under_static_order
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.iteration import batch_of
from pipeloom.packing import PackingSpec
from pipeloom.packing.loads import budget_tokens
from pipeloom.planner.joint import decide, least_bound
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget, solve
from pipeloom.spec import Layout, ModelSpec
from pipeloom.spec.current_run import CurrentRun
from pipeloom.timeline import Schedule, simulate

PACKED, PACKED_TITLE = "pipeloom-packed", "Pipeloom with its own microbatches"
MOST_TOGETHER = 8
"""Largest ratio of the tokens of our microbatches to those of the given ones, if memory allows."""


@dataclass(frozen=True)
class GainStep:
    """Time of an iteration after one more part of the setup is replaced by Pipeloom's."""

    name: str
    iteration_s: float
    note: str = ""


def packs_anew(setting: ModelOnCluster) -> bool:
    """Return whether samples may be packed in another way. Clips may not, since they are grouped by size."""
    return all(module.reads != "videos" for module in setting.model.modules)


def packed_budget(model: ModelSpec, microbatches: Microbatches, tokens: int) -> int:
    """Return the most tokens of a microbatch of `packing_system`, whose given ones have at most ``tokens``."""
    return max(MOST_TOGETHER * tokens, int(budget_tokens(batch_of(microbatches), model).max()))


def packing_system(name: str, setting: ModelOnCluster, layout: Layout, tokens: int) -> System:
    """Make Pipeloom as in training, which plans microbatches, order and strategies together.

    Its iterations have no padding. The lower bound of a result is the least over all evaluated packings. A given
    microbatch has at most ``tokens``; ours may have `MOST_TOGETHER` times as many.
    """
    after_s = replica_seconds(setting, layout)

    def run(microbatches: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        most = packed_budget(setting.model, microbatches, tokens)
        problem = PlanningProblem(
            setting.model, layout, setting.costs, PackingSpec(most), memory=setting.memory, seed=seed
        )
        problem.compile_kernels()
        planned = decide(problem, batch_of(microbatches), budget)
        return BaselineResult(
            name,
            layout,
            planned.graph,
            planned.schedule,
            planned.timeline,
            least_bound(problem, planned),
            after_s,
            planned.packing,
        )

    return System(name, layout, run)


def split_gain(
    setting: ModelOnCluster,
    run: CurrentRun,
    microbatches: Microbatches,
    ours: BaselineResult,
    budget: Budget,
    seed: int = 0,
) -> tuple[GainStep, ...]:
    """Replace the current run by Pipeloom part by part, and time each step.

    The parts are the layout (with the sizes of its sub-microbatches), the packing, the order, and the memory
    strategies. The sum of all steps is the gain. The share of each part depends on this order, since parts overlap.
    There are fewer than four steps if one of the first does not fit.

    ``microbatches`` are those of the current run. ``ours`` is the result of the last step, with its own packing or on
    these microbatches. ``budget`` is that of the search for the order.
    """
    layout, costs = ours.layout, run_costs(setting, run)
    steps = []
    packings = {"layout": pack_microbatches(setting, layout, microbatches)}
    if ours.packing is not None and ours.packing != packings["layout"]:
        packings["packing"] = ours.packing
    after_s = replica_seconds(setting, layout)
    with suppress(InfeasibleError, InputError):
        for name, packing in packings.items():
            graph = packed_assignable(setting, layout, packing, setting.model.name, costs).graph
            found = under_static_order(name, run, layout, graph)
            candidate = found.schedule.candidate
            recomputes_more = run.strategy is not None and candidate is not None and candidate[0]
            note = "recomputes more, to fit" if recomputes_more else ""
            steps.append(GainStep(name, setting.iteration_s(found) + after_s, note))
        steps.append(GainStep("order", setting.iteration_s(_ordered(found, budget, seed)) + after_s))
    return (*steps, GainStep("memory", setting.iteration_s(ours)))


def _ordered(static: BaselineResult, budget: Budget, seed: int) -> BaselineResult:
    """Search an order with fixed strategies; return the static one if no order is faster."""
    choice = static.schedule.candidate
    graph = static.graph if choice is None else static.graph.with_candidates(choice)
    with suppress(InfeasibleError):
        found = solve(graph, budget=budget, seed=seed).schedule
        schedule = Schedule(found.order, choice, "order")
        timeline = simulate(static.graph, schedule)
        if timeline.makespan_ns < static.timeline.makespan_ns:
            return replace(static, schedule=schedule, timeline=timeline)
    return static
