"""Zero-bubble H1 (Qi et al. 2024): 1F1B with split backwards, later ranks delaying more weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from pipeloom.compare.baseline import System, distinct, fixed_systems, in_turn, loads_by
from pipeloom.compare.baselines.nnscaler import stages_that_fit
from pipeloom.compare.model_on_cluster import LEVELS, Microbatches, ModelOnCluster, graph_of
from pipeloom.compare.recomputation import per_rank_recomputation
from pipeloom.compare.result import BaselineResult
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import chain_of_stages
from pipeloom.search import StoppingRule, one_f_one_b, uniform_settings
from pipeloom.search.stage_chain import as_schedule, chain_of
from pipeloom.spec import Layout
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


def zero_bubble_h1(graph: TaskGraph, most_behind: int | None = None) -> Schedule:
    """Run p - r forwards ahead on rank r of p, then I, W and F by turns, W being r microbatches behind I.

    Every rank then holds p microbatches at most, from their F to their W: as much as 1F1B's first rank. A backward
    that is not split is an I without W.

    Parameters
    ----------
    graph : TaskGraph
    most_behind : int, optional
        Microbatches that W may be behind I at most, since with recomputation much memory waits for W.

    Raises
    ------
    InputError
        The graph has no labels, or a rank has more than one stage.
    """
    chain = chain_of(graph)
    p, m = graph.num_ranks, chain.num_microbatches
    stages = len(chain.rank_of_stage)
    if len(set(chain.rank_of_stage)) < stages:
        raise InputError("layout", "has ranks of several stages, zero-bubble H1 takes one")
    order: list[list[int]] = [[] for _ in range(p)]
    for stage, rank in enumerate(chain.rank_of_stage):
        forward = [chain.forward.get((stage, i), []) for i in range(m)]
        # A W directly follows its I in a chain; here they part.
        backward = [chain.backward.get((stage, i), []) for i in range(m)]
        weight = [[t for t in tasks if graph.weight_of[graph.pair[t]] == t] for tasks in backward]
        inputs = [[t for t in tasks if t not in late] for tasks, late in zip(backward, weight, strict=True)]
        ahead = min(stages - stage, m)
        behind = stage if most_behind is None else min(stage, most_behind)
        tasks = [t for unit in forward[:ahead] for t in unit]
        for i in range(m):
            tasks += inputs[i]
            if i >= behind:
                tasks += weight[i - behind]
            if i + ahead < m:
                tasks += forward[i + ahead]
        tasks += [t for unit in weight[max(0, m - behind) :] for t in unit]
        order[rank] = tasks
    return as_schedule(graph, order, "zero-bubble h1")


def zero_bubble(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str = "time") -> System:
    """Zero-bubble H1: 1F1B's chain of stages with split backwards, weight gradients filling the idle time.

    Recomputed activations wait for the weight gradients, so these come as late as memory allows, whichever number
    of microbatches behind is best for the iteration. Every rank recomputes as little as fits. An iteration that does
    not fit so runs by 1F1B with whole backwards.
    """
    costs = EmulatedCosts(case.architecture, case.cluster, case.degrees, LEVELS)

    def system(layout: Layout) -> System:
        def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
            graph = graph_of(case, layout, groups, "zero-bubble H1", costs)
            fastest = np.full(case.num_ranks, uniform_settings(graph)[0])
            best: BaselineResult | None = None
            for behind in range(case.num_ranks):
                with suppress(InfeasibleError):
                    order = zero_bubble_h1(graph, behind)
                    found = per_rank_recomputation("zero-bubble H1", layout, graph, order, fastest)
                    if best is None or found.timeline.makespan_ns < best.timeline.makespan_ns:
                        best = found
            if best is None:
                raise InfeasibleError("zero-bubble H1: does not fit even with full recomputation")
            return best

        return System("zero-bubble H1", layout, run)

    layouts = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in loads_by(case, batches, balance)]
    whole = fixed_systems("zero-bubble H1", case, [*layouts, *stages_that_fit(case, batches)], one_f_one_b)
    return in_turn("zero-bubble H1", [system(layout) for layout in distinct(layouts)], batches, whole)
