from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given

from pipeloom.errors import InfeasibleError
from pipeloom.search.components import find_components
from pipeloom.search.plain import Rules, decode_plain, minimum_memory, segment_priority
from pipeloom.search.strategies import choose_on_rank, choose_strategies
from pipeloom.timeline import Schedule, check, memory_changes
from pipeloom.timeline.options import pair_options
from tests.strategies import graphs


def lean_schedule(graph):
    lean = graph.with_candidates(minimum_memory(graph))
    order = decode_plain(lean, find_components(lean), segment_priority(lean), Rules())
    return Schedule(tuple(np.array(tasks, np.int64) for tasks in order), minimum_memory(graph))


def best_on_rank(graph, schedule, rank):
    """Least total time over all choices of one rank's pairs that fit, by trying all."""
    pairs = [p for p in range(graph.num_pairs) if graph.rank[graph.forward_of[p]] == rank]
    options = pair_options(graph)
    total = options.forward_ns + options.backward_ns + options.weight_ns
    best = None
    for picks in product(*(range(len(graph.candidates[p])) for p in pairs)):
        choice = np.zeros(graph.num_pairs, np.int64)
        choice[pairs] = picks
        at_start, at_end = memory_changes(graph.with_candidates(choice))
        allocated, fits = 0, True
        for task in schedule.order[rank]:
            fits &= graph.capacity_bytes is None or bool(
                allocated + at_start[task] <= graph.capacity_bytes[rank] - graph.static_bytes[rank]
            )
            allocated += at_start[task] + at_end[task]
        if fits:
            spent = int(sum(total[p, j] for p, j in zip(pairs, picks, strict=True)))
            best = spent if best is None else min(best, spent)
    return best


def assert_between_bound_and_optimum(graph, whole, one_rank, most):
    """What ``whole`` chooses is feasible, on each rank not below the bound, nor above ``most`` times the optimum."""
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    chosen = whole(graph, schedule)
    assert check(graph, chosen) == ()
    for rank in range(graph.num_ranks):
        found = one_rank(graph, schedule, rank)
        best = best_on_rank(graph, schedule, rank)
        assert found.bound_ns <= best + 1e-3
        assert best <= found.total_ns <= most * best
        assert found.total_ns == best or found.gap > 0


FEW_CHOICES = {
    "num_candidates": 3,
    "num_microbatches": 2,
    "num_modules": 1,
    "max_parts": 1,
    "max_segments": 2,
    "num_ranks": 2,
}
"""Options of instances whose choices can all be tried."""


@given(graphs(**FEW_CHOICES))
def test_chosen_strategies_are_feasible_and_between_bound_and_optimum(graph):
    assert_between_bound_and_optimum(graph, choose_strategies, choose_on_rank, 1.35)
