"""The chain kernel against the plain simulator and the independent checker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.layout.cooptimize import (
    LayerChain,
    PartitionPlacement,
    PriorityRule,
    chain_of_layers,
    evaluate,
    placement_bound,
    schedule_of,
)
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.layer_chain import iteration_ns
from pipeloom.layout.cooptimize.starts import natural_keys
from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, IntArray, TaskGraph
from pipeloom.timeline import Timeline, check, lower_bound, simulate
from tests.layout.cooptimize.chains import placed_chains


@given(placed_chains())
def test_kernel_equals_simulator_and_fits_memory(setting: tuple[LayerChain, PartitionPlacement, PriorityRule]) -> None:
    chain, placement, rule = setting
    makespan = evaluate(chain, placement, rule)
    assert makespan < NEVER, "a rule never deadlocks where one microbatch of each chunk fits"
    graph, schedule = schedule_of(chain, placement, rule)
    timeline = simulate(graph, schedule)
    assert timeline.makespan_ns == makespan
    assert not check(graph, schedule, timeline)
    assert evaluate(chain, placement, rule, makespan + 1) == makespan
    assert evaluate(chain, placement, rule, makespan) == NEVER
    if rule.limits is not None:
        assert (most_in_flight(graph, timeline, placement.num_chunks) <= rule.limits).all()


def most_in_flight(graph: TaskGraph, timeline: Timeline, num_chunks: int) -> IntArray:
    """How many microbatches of every chunk are between the start of F and the end of B or I at most."""
    chunk = graph.pair * num_chunks // graph.num_pairs
    most = np.zeros(num_chunks, np.int64)
    for c in range(num_chunks):
        began = timeline.start_ns[(chunk == c) & (graph.kind == FORWARD)]
        ended = timeline.end_ns[(chunk == c) & np.isin(graph.kind, (BACKWARD, INPUT_GRADIENT))]
        # In their order of dispatch; times alone do not tell it where tasks last no time.
        most[c] = max(i + 1 - int((ended <= at).sum()) for i, at in enumerate(np.sort(began)))
    return most


@given(placed_chains(), st.integers(0, 10**6))
def test_a_pipeline_ends_when_all_ranks_have_updated_their_layers(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule], seed: int
) -> None:
    chain, placement, rule = setting
    update = np.random.default_rng(seed).integers(0, 50_000_000, chain.num_layers)
    chain = replace(chain, update_ns=update)
    graph, schedule = schedule_of(chain, placement, rule)
    ends = np.zeros(chain.num_ranks, np.int64)
    np.maximum.at(ends, graph.rank, simulate(graph, schedule).end_ns)
    np.add.at(ends, np.repeat(placement.ranks, np.diff(placement.cuts)), update)
    assert evaluate(chain, placement, rule) == ends.max() >= placement_bound(chain).ns
    assert iteration_ns(chain, placement, graph, simulate(graph, schedule).end_ns) == ends.max()
    assert evaluate(chain, placement, rule, int(ends.max()) + 1) == ends.max()
    assert evaluate(chain, placement, rule, int(ends.max())) == NEVER


@settings(deadline=None, max_examples=40)
@given(placed_chains(), st.integers(1, 4))
def test_a_spread_adds_a_lone_microbatchs_times(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule], times: int
) -> None:
    chain, placement, rule = setting
    # Keys made outside know nothing of boundary transfers.
    chain = replace(chain, delay_ns=0)
    alone = natural_keys(chain, placement, 0, 0.0)
    alone[2] = 0
    plain = replace(rule, spread=0, keys=rule.keys + times * alone)
    assert evaluate(chain, placement, replace(rule, spread=16 * times)) == evaluate(chain, placement, plain)


@given(placed_chains())
def test_bounds_hold_for_every_placement(setting: tuple[LayerChain, PartitionPlacement, PriorityRule]) -> None:
    chain, placement, rule = setting
    makespan = evaluate(chain, placement, rule)
    assert placement_bound(chain).ns <= makespan
    graph, _ = schedule_of(chain, placement, rule)
    assert lower_bound(graph).ns <= makespan


def uniform(num_layers: int, num_ranks: int, m: int, capacity: int | None = None) -> LayerChain:
    layer = LayerCost("layer", 1e-9, 1, 0, backward_s=2e-9)
    table = LayerTable("uniform", num_ranks, m, 0.0, 0, (layer,) * num_layers)
    return chain_of_layers(table).with_capacity(capacity)


def backward_first(num_chunks: int) -> PriorityRule:
    keys = np.zeros((3, num_chunks), np.int64)
    keys[1] = -1000
    return PriorityRule(keys, np.zeros((3, num_chunks), np.int64))


def test_backward_first_under_its_memory_is_1f1b() -> None:
    # (m + p - 1) * (f + b) with p = 4, m = 8; rank r holds p - r microbatches.
    chain = uniform(4, 4, 8, 4)
    assert evaluate(chain, PartitionPlacement((0, 1, 2, 3, 4), (0, 1, 2, 3)), backward_first(4)) == 11 * 3


def test_two_chunks_on_one_rank_need_no_transfer() -> None:
    layer = LayerCost("layer", 1e-9, 1, 0, backward_s=2e-9)
    chain = chain_of_layers(LayerTable("two", 1, 1, 5e-9, 0, (layer, layer)))
    assert evaluate(chain, PartitionPlacement((0, 1, 2), (0, 0)), backward_first(2)) == 6
    chain = chain_of_layers(LayerTable("two", 2, 1, 5e-9, 0, (layer, layer)))
    assert evaluate(chain, PartitionPlacement((0, 1, 2), (0, 1)), backward_first(2)) == 6 + 10


def test_weight_gradients_fill_bubbles() -> None:
    # Hand-solved: two ranks, three microbatches, F = I = W = 1, room for three: rank 1 starts at 1 and never idles,
    # ending at 10; rank 0 has nine tasks, two idle units before its first I, and W to fill all but them.
    layer = LayerCost("layer", 1e-9, 1, 0, backward_input_s=1e-9, backward_weight_s=1e-9)
    chain = chain_of_layers(LayerTable("zb", 2, 3, 0.0, 0, (layer, layer)), split=True)
    keys = np.array([[0, 0], [-100, -100], [100, 100]])
    rule = PriorityRule(keys, np.zeros((3, 2), np.int64))
    assert evaluate(chain, PartitionPlacement((0, 1, 2), (0, 1)), rule) == 10


def test_waiting_for_a_task_that_is_due() -> None:
    # Rank 1 runs the first microbatch from 3 to 7. At 6, rank 0 could start its third forward, or wait 1 for B.
    first = LayerCost("a", 3e-9, 1, 0, backward_s=1e-9)
    second = LayerCost("b", 1e-9, 1, 0, backward_s=3e-9)
    chain = chain_of_layers(LayerTable("wait", 2, 3, 0.0, 0, (first, second)))
    placement = PartitionPlacement((0, 1, 2), (0, 1))
    keys = np.array([[0, 0], [-100, -100], [0, 0]])
    waits = np.zeros((3, 2), np.int64)
    orders = []
    for tolerance in (0, 1):
        waits[1, 0] = tolerance
        graph, schedule = schedule_of(chain, placement, PriorityRule(keys, waits))
        orders.append([(graph.task(t).kind, graph.task(t).microbatch) for t in schedule.order[0].tolist()])
    assert orders[0][:4] == [("F", 0), ("F", 1), ("F", 2), ("B", 0)]
    assert orders[1][:4] == [("F", 0), ("F", 1), ("B", 0), ("F", 2)]


@pytest.mark.parametrize("capacity", [3, 4])
def test_what_cannot_hold_one_microbatch_is_refused(capacity: int) -> None:
    chain = uniform(4, 1, 2, capacity)
    found = evaluate(chain, PartitionPlacement((0, 1, 2, 3, 4), (0, 0, 0, 0)), backward_first(4))
    assert (found == NEVER) == (capacity < 4)
