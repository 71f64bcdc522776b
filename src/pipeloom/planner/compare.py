"""What other systems' schedules would take on the same batches, with the same costs and the same simulator."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from pipeloom.arrange import LayerLoad, chain
from pipeloom.baselines import gpipe, interleaved_one_f_one_b, one_f_one_b
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.packing import pack
from pipeloom.planner.plan_batch import PlannedBatch, Problem, plan_batch
from pipeloom.search import StoppingRule
from pipeloom.spec import Batch, Layout
from pipeloom.taskgraph import NS_PER_S, TaskGraph, build_graph
from pipeloom.timeline import LowerBound, Schedule, Timeline, lower_bound, simulate

_SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved_one_f_one_b}


@dataclass(frozen=True)
class SystemTimeline:
    """One system's iteration on one batch."""

    name: str
    layout: Layout
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    """Of this system's own graph: its layout fixes what any schedule of it can reach."""
    after_s: float = 0.0
    """What this system alone needs after the pipeline: the gradients of replicated modules."""

    @property
    def iteration_s(self) -> float:
        """The pipeline, and what this system alone needs after it."""
        return self.timeline.makespan_ns / NS_PER_S + self.after_s


def chain_layouts(problem: Problem, load: LayerLoad, chunks_per_rank: int = 2) -> dict[str, Layout]:
    """Layouts under which the baselines run: all modules one chain of stages, cut by ``load``.

    A model with fewer layers than stages has no interleaved layout, and that baseline is left out.
    """
    ranks = problem.layout.num_ranks
    layouts = {"1f1b": chain(problem.model, ranks, 1, load)}
    with contextlib.suppress(InputError):
        layouts["interleaved"] = chain(problem.model, ranks, chunks_per_rank, load)
    return layouts


def compare_systems(
    problem: Problem, layouts: dict[str, Layout], batch: Batch, *, budget: StoppingRule, seed: int
) -> tuple[SystemTimeline, ...]:
    """Time a batch under each baseline and under the plan made for it.

    Parameters
    ----------
    problem : Problem
    layouts : dict
        Layout of each baseline by name, from `chain_layouts`; ``gpipe`` and ``1f1b`` want one stage a rank.
    batch : Batch
    budget : StoppingRule
        For the per-batch plan.
    seed : int

    Returns
    -------
    tuple of SystemTimeline
        The baselines in the order of ``layouts``, then ``per-batch plan``. Where there are memory strategies, a
        baseline uses one for all pairs: the fastest that fits, or where none does, the base without a limit.
    """
    # It needs the types of this module.
    from pipeloom.planner.recomputation import uniform_recomputation

    systems = []
    for name, layout in layouts.items():
        packing = pack(batch, problem.model, layout, problem.packing)
        graph = build_graph(layout, packing, problem.costs, name=name, capacity_bytes=problem.capacity_bytes)
        schedule = _SCHEDULES[name](graph)
        if graph.candidates is not None:
            with contextlib.suppress(InfeasibleError):
                systems.append(uniform_recomputation(name, layout, graph, schedule))
                continue
        timeline = simulate(graph, schedule)
        systems.append(SystemTimeline(name, layout, graph, schedule, timeline, lower_bound(graph)))
    return (*systems, system_of(problem, plan_batch(problem, batch, budget=budget, seed=seed)))


def system_of(problem: Problem, planned: PlannedBatch) -> SystemTimeline:
    """Show a planned batch beside other systems."""
    graph = replace(planned.graph, name="per-batch plan")
    return SystemTimeline(
        "per-batch plan", problem.layout, graph, planned.schedule, planned.timeline, planned.lower_bound
    )
