"""Baselines on the batches of a training run, with the run's costs, memory and packing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from pipeloom.compare.result import BaselineResult, uniform_recomputation
from pipeloom.errors import InfeasibleError
from pipeloom.layout import LayerLoad, chain_of_stages
from pipeloom.layout.layouts import chunk_counts, with_encoder_dp
from pipeloom.packing import Packing, check_budget, cost_loads, packed_batch, packing_of
from pipeloom.packing.choices import SLOWER, even_microbatches, numbers, walk
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.planner.planning import PlannedBatch, plan_batch
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget
from pipeloom.search.schedules import SCHEDULES, ScheduleSettings, schedule_name
from pipeloom.spec import Batch, Layout
from pipeloom.taskgraph import build_graph
from pipeloom.taskgraph.iteration import iteration_graph
from pipeloom.timeline import bound_of, simulate


def chain_layouts(problem: PlanningProblem, load: LayerLoad, batches: Sequence[Batch]) -> dict[str, Layout]:
    """Return the layouts of the baselines: all modules as one chain of stages, balanced by ``load``.

    The interleaved layout has the number of chunks per rank, two or more, that is fastest on ``batches``. It is left
    out for models with fewer layers than stages.
    """
    ranks = problem.layout.num_ranks

    def chain(chunks_per_rank: int) -> Layout:
        layout = chain_of_stages(problem.model, ranks, chunks_per_rank, load)
        if not problem.layout.encoder_dp_modules:
            return layout
        # Baselines use the same tensor parallelism as the run, encoder data parallelism included.
        layout = msgspec.structs.replace(layout, parallelism=problem.layout.parallelism)
        return with_encoder_dp(layout, problem.layout.encoder_dp_modules)

    layouts = {"1f1b": chain(1)}

    def cost(layout: Layout) -> tuple[int, float]:
        """Return the number of batches that do not fit into memory, and the seconds of all."""
        results = [baseline(problem, "interleaved", layout, batch) for batch in batches]
        return sum(not one.fits for one in results), sum(one.iteration_s for one in results)

    counts = chunk_counts(ranks, problem.model.modules)[1:]
    if counts:
        layouts["interleaved"] = min(map(chain, counts), key=cost)
    return layouts


def compare_systems(
    problem: PlanningProblem, layouts: dict[str, Layout], batch: Batch, *, budget: Budget | None = None
) -> tuple[BaselineResult, ...]:
    """Time a batch under each baseline and under its own plan.

    ``layouts`` has the layout of each baseline by name, from `chain_layouts`; ``gpipe`` and ``1f1b`` need one stage per
    rank. The default ``budget`` of the per-batch plan is ``problem.budget_s`` seconds. Return the baselines in the
    order of ``layouts``, then ``per-batch plan``. With memory strategies, a baseline uses one for all pairs: the
    fastest that fits, or the first one without a limit if none fits.
    """
    results = [baseline(problem, name, layout, batch) for name, layout in layouts.items()]
    return (*results, planned_result(problem, plan_batch(problem, batch, budget=budget)))


def baseline(problem: PlanningProblem, name: str, layout: Layout, batch: Batch) -> BaselineResult:
    """Time a batch under ``gpipe``, ``1f1b`` or ``interleaved``; see `compare_systems`.

    If plans choose their own microbatches, a baseline also gets its best number of microbatches.
    """
    model, spec, costs = problem.model, problem.packing, problem.costs
    if not problem.plans_packing:
        return _timed(problem, name, layout, packed_batch(batch, model, layout, costs, spec))
    check_budget(batch, model, spec.token_budget)
    loads, params = cost_loads(batch, model, layout, costs), problem.search.packings
    found: list[BaselineResult] = []

    def evaluate(number: int) -> float:
        packing = packing_of(batch, model, layout, even_microbatches(loads, spec, number, batch.iteration))
        found.append(_timed(problem, name, layout, packing))
        return found[-1].iteration_s if found[-1].fits else float("inf")

    walk(numbers(loads, spec), MICROBATCHES_PER_RANK * layout.num_ranks, SLOWER, params.misses, evaluate)
    return min(found, key=lambda one: (not one.fits, one.iteration_s))


def _timed(problem: PlanningProblem, name: str, layout: Layout, packing: Packing) -> BaselineResult:
    schedule_of = SCHEDULES[schedule_name(name)].orders(layout.num_ranks, ScheduleSettings())[0]
    costs = problem.whole_backwards().costs
    try:
        # A baseline needs the same reserve for computations as a plan.
        memory = replace(problem.memory, reserve_bytes=())
        graph = iteration_graph(layout, packing, costs, name, memory).graph
        schedule = schedule_of(graph)
        if graph.candidates is not None:
            with contextlib.suppress(InfeasibleError):
                return replace(uniform_recomputation(name, layout, graph, schedule), packing=packing)
    except InfeasibleError:
        graph = build_graph(layout, packing, costs, name=name, capacity_bytes=problem.memory.capacity_bytes)
        schedule = schedule_of(graph)
    timeline = simulate(graph, schedule)
    bound = bound_of(graph, schedule, timeline)
    return BaselineResult(name, layout, graph, schedule, timeline, bound, packing=packing)


def planned_result(problem: PlanningProblem, planned: PlannedBatch) -> BaselineResult:
    """Return a planned batch as a result to compare with baselines."""
    graph = replace(planned.graph, name="per-batch plan")
    return BaselineResult(
        "per-batch plan",
        problem.layout,
        graph,
        planned.schedule,
        planned.timeline,
        planned.lower_bound,
        packing=planned.packing,
    )
