"""Zero-bubble H1 (Qi et al. 2024): 1F1B with split backwards. Later ranks delay more weight gradients."""

from __future__ import annotations

from pipeloom.errors import InputError
from pipeloom.search.stage_chain import as_schedule, chain_of
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


def zero_bubble_h1(graph: TaskGraph, most_behind: int | None = None) -> Schedule:
    """Run p - r forwards ahead on rank r of p, then alternate I, W and F, with W r microbatches behind I.

    Every rank then holds at most p microbatches between F and W, like the first rank of 1F1B. A backward that is not
    split counts as an I without W.

    Parameters
    ----------
    most_behind : int, optional
        Maximum number of microbatches between I and W. With recomputation, much memory is held until W.

    Raises
    ------
    InputError
        The graph has no labels, or a rank has more than one stage.
    """
    chain = chain_of(graph)
    p, m = graph.num_ranks, chain.num_microbatches
    stages = len(chain.rank_of_stage)
    if len(set(chain.rank_of_stage)) < stages:
        raise InputError("layout", "has ranks with several stages, but zero-bubble H1 needs one stage per rank")
    order: list[list[int]] = [[] for _ in range(p)]
    for stage, rank in enumerate(chain.rank_of_stage):
        forward = [chain.forward.get((stage, i), []) for i in range(m)]
        # A W directly follows its I in a chain. Here the two are separated.
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
