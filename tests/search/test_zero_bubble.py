"""Zero-bubble schedules that are ordered by the times of their tasks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pipeloom.errors import InputError
from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, graph_of
from pipeloom.search import zero_bubble_in_flight
from pipeloom.search.zero_bubble import zero_bubble_h1
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import check, simulate
from tests.chains import uniform_chain


def v_graph(num_ranks: int, num_microbatches: int, times: tuple[int, int, int] = (1, 1, 1)) -> TaskGraph:
    """Two stages a rank: the first half of the stages from the first rank to the last, the other half back."""
    stages = 2 * num_ranks
    forward, backward, weight, ones = (np.full((stages, 1), each, np.int64) for each in (*times, 1))
    chain = LayerChain(
        name="v",
        layer_names=tuple(map(str, range(stages))),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        delay_ns=0,
        forward_ns=forward,
        backward_ns=backward,
        weight_ns=weight,
        activation_bytes=ones,
        gradient_bytes=ones,
        static_bytes=np.zeros(stages, np.int64),
        strategies=(("keep",),) * stages,
    )
    ranks = (*range(num_ranks), *reversed(range(num_ranks)))
    return graph_of(chain, PartitionPlacement(tuple(range(stages + 1)), ranks))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_twice_the_memory_removes_the_bubble(p: int, m: int) -> None:
    """With F, I and W alike, 2 p - 1 microbatches let no rank idle once it has begun (Qi et al. 2024, table 1)."""
    graph = uniform_chain(p, m, forward_ns=5, backward_ns=10, split=True)
    two = simulate(graph, zero_bubble_in_flight(graph, 2 * p))
    one = simulate(graph, zero_bubble_in_flight(graph, p))
    assert two.makespan_ns == 15 * m + 5 * (p - 1)
    assert two.makespan_ns <= one.makespan_ns <= simulate(graph, zero_bubble_h1(graph)).makespan_ns + 10
    assert one.peak_bytes.max() <= p
    assert two.peak_bytes.max() <= 2 * p


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 24)])
def test_a_v_holds_what_one_stage_a_rank_does_and_hardly_idles(p: int, m: int) -> None:
    graph = v_graph(p, m)
    found = simulate(graph, zero_bubble_in_flight(graph, p))
    assert found.peak_bytes.max() <= 2 * p
    assert 6 * m + p - 1 <= found.makespan_ns <= 6 * m + 2 * p


@pytest.mark.parametrize("seed", range(20))
def test_orders_are_feasible_for_any_times(seed: int) -> None:
    random_ = random.Random(seed)
    p, m = random_.randint(1, 6), random_.randint(1, 12)
    graph = random_.choice([uniform_chain(p, m, split=True), v_graph(p, m)])
    times = np.array([random_.randint(0, 9) for _ in range(graph.num_tasks)], np.int64)
    graph = replace(graph, duration_ns=times)
    for waits in (False, True):
        limit = random_.randint(1, 2 * p)
        schedule = zero_bubble_in_flight(graph, limit, waits=waits)
        timeline = simulate(graph, schedule)
        assert check(graph, schedule, timeline) == ()
        stages = graph.num_pairs // m // p
        assert timeline.peak_bytes.max() <= limit * stages


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="in_flight"):
        zero_bubble_in_flight(uniform_chain(2, 2, split=True), 0)
