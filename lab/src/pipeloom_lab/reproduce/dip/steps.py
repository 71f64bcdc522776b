"""Steps between Megatron-LM and Pipeloom that DIP's ablation measures (`dip.txt` Table 5)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import System, fixed_system
from pipeloom.compare.baselines.dip import dip_layout
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, graph_of
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError
from pipeloom.search import StoppingRule, interleaved_one_f_one_b, solve
from pipeloom.spec import Layout
from pipeloom.timeline import Schedule, lower_bound, simulate
from pipeloom_lab.solvers import uniform_start


def partitioned(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """DIP's layout under Megatron-LM's interleaved order (the first step of `dip.txt` Table 5)."""
    return fixed_system("modality-aware, static order", case, dip_layout(case, batches), interleaved_one_f_one_b)


def unadaptive_system(name: str, case: ModelOnCluster, layout: Layout, method: str, threads: int = 1) -> System:
    """A system that searches orders only, under one setting of recomputation for all.

    The setting is the one under which first in, first out is fastest.
    """

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        graph = graph_of(case, layout, groups, name, case.levels)
        schedule = uniform_start(graph)
        if schedule is None:
            raise InfeasibleError(f"{name}: no setting of recomputation fits")
        choice = schedule.candidate
        if method != "first in, first out":
            single = graph.with_candidates(choice)
            schedule = solve(single, budget=budget, seed=seed, method=method, threads=threads).schedule
        chosen = Schedule(schedule.order, choice, name)
        return BaselineResult(name, layout, graph, chosen, simulate(graph, chosen), lower_bound(graph))

    return System(name, layout, run)
