from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError, PlanError
from pipeloom.timeline import Schedule, memory_curve, simulate
from tests.columns import graph_of_columns
from tests.strategies import graphs, random_order, reference_simulation


def tiny(**changes):
    """The example of docs/formats.md: one microbatch over two ranks."""
    fields = {
        "name": "tiny",
        "num_ranks": 2,
        "module_names": ("lm",),
        "kind": [0, 0, 1, 1],
        "rank": [0, 1, 1, 0],
        "duration_ns": [1_000_000_000, 1_000_000_000, 2_000_000_000, 2_000_000_000],
        "pair": [0, 1, 1, 0],
        "pass_id": [0, 0, 1, 1],
        "microbatch": [0, 0, 0, 0],
        "module": [0, 0, 0, 0],
        "activation_bytes": [40, 40],
        "weight_gradient_bytes": None,
        "edge_source": [0, 1, 2],
        "edge_target": [1, 2, 3],
        "edge_delay_ns": [10_000_000, 0, 10_000_000],
        "static_bytes": [10, 10],
        "capacity_bytes": [100, 100],
    }
    return graph_of_columns(**{**fields, **changes})


def test_example_of_the_format():
    timeline = simulate(tiny(), Schedule((np.array([0, 3]), np.array([1, 2]))))
    assert timeline.start_ns.tolist() == [0, 1_010_000_000, 2_010_000_000, 4_020_000_000]
    assert timeline.makespan_ns == 6_020_000_000
    assert timeline.peak_bytes.tolist() == [50, 50]


@given(graphs(), st.integers(0, 2**31))
def test_equals_the_reference(graph, seed):
    schedule = random_order(graph, np.random.default_rng(seed))
    reference = reference_simulation(graph, schedule)
    assert reference is not None
    timeline = simulate(graph, schedule)
    chosen = graph.with_candidates(schedule.candidate)
    assert timeline.start_ns.tolist() == reference[0]
    assert (timeline.end_ns - timeline.start_ns == chosen.duration_ns).all()
    curves = [memory_curve(chosen, timeline, rank) for rank in range(graph.num_ranks)]
    assert [int(used.max()) for _, used in curves] == reference[1]
    assert all(used[-1] == graph.static_bytes[rank] for rank, (_, used) in enumerate(curves))
    assert (timeline.peak_bytes >= reference[1]).all()
    if (chosen.duration_ns > 0).all():
        assert timeline.peak_bytes.tolist() == reference[1]


@given(graphs(num_ranks=3), st.integers(0, 2**31))
def test_orders_that_deadlock_are_named(graph, seed):
    rng = np.random.default_rng(seed)
    schedule = random_order(graph, rng)
    shuffled = Schedule(tuple(rng.permutation(tasks) for tasks in schedule.order), schedule.candidate)
    reference = reference_simulation(graph, shuffled)
    if reference is None:
        with pytest.raises(PlanError, match=r"task \d+ .* waits for .*task \d+"):
            simulate(graph, shuffled)
    else:
        assert simulate(graph, shuffled).start_ns.tolist() == reference[0]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (([0, 3], [1]), r"task 2 \(B of lm, microbatch 0, rank 1\) is missing"),
        (([0, 3, 3], [1, 2]), r"task 3 .* occurs 2 times"),
        (([0], [1, 2, 3]), r"task 3 .* is listed on rank 1"),
        (([0, 3], [1, 2, 7]), r"task 7 is not in 0\.\.3"),
        (([0, 3, 1, 2],), r"has 1 ranks, the instance 2"),
    ],
)
def test_orders_that_are_no_permutation_are_refused(order, message):
    with pytest.raises(InputError, match=message):
        simulate(tiny(), Schedule(tuple(np.array(tasks) for tasks in order)))
