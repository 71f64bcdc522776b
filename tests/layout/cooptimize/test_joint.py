"""The joint search: what it promises, on chains small enough to judge."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.layers import LayerCost, LayerTable, StrategyEntry
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout.cooptimize import (
    CooptimizeParams,
    LayerChain,
    PartitionPlacement,
    chain_of_layers,
    cooptimize,
    one_f_one_b_peaks,
    placement_bound,
)
from pipeloom.layout.cooptimize.cuts import filled
from pipeloom.layout.cooptimize.joint import uniform_strategies
from pipeloom.layout.cooptimize.layer_chain import chunk_costs, rank_work_ns
from pipeloom.layout.cooptimize.params import AnnealParams, BoundParams
from pipeloom.search import Budget
from pipeloom.timeline import check
from tests.layout.cooptimize.chains import table


@pytest.mark.parametrize("split", [False, True])
def test_answers_are_feasible_bounded_and_repeatable(split: bool) -> None:
    chain = chain_of_layers(table(3, 12, 3, 6, split=split), split=split)
    chain = chain.with_capacity(int(one_f_one_b_peaks(chain).max()))
    once, again = (cooptimize(chain, budget=Budget(evaluations=3000), seed=5) for _ in range(2))
    assert once.timeline.makespan_ns == again.timeline.makespan_ns
    assert once.placement == again.placement
    assert not check(once.graph, once.schedule, once.timeline)
    assert placement_bound(chain).ns == once.lower_bound.ns <= once.timeline.makespan_ns
    assert once.evaluations <= 3010
    assert once.timeline.makespan_ns <= min(report.start_ns for report in once.reports)


def test_layers_with_much_to_update_lie_on_different_ranks() -> None:
    # The head alone fills a rank, so the others have time for small layers in any way.
    small = LayerCost("layer", 1e-3, 1, 0, backward_s=1e-3)
    heavy = msgspec.structs.replace(small, update_s=30e-3)
    head = LayerCost("head", 8e-3, 1, 0, backward_s=8e-3)
    chain = chain_of_layers(LayerTable("updated", 3, 8, 0.0, 0, (heavy, heavy, *[small] * 4, head)))
    found = cooptimize(chain, budget=Budget(evaluations=5000))
    rank = np.repeat(found.placement.ranks, np.diff(found.placement.cuts))
    assert rank[0] != rank[1]
    # The end of the iteration is reported, not that of the last task.
    assert found.iteration_ns >= int(found.timeline.end_ns[found.graph.rank == rank[0]].max()) + 30_000_000
    assert found.lower_bound.ns <= found.iteration_ns
    assert found.gap == found.iteration_ns / found.lower_bound.ns - 1


def test_counted_evaluations_do_not_depend_on_the_time_of_the_bound() -> None:
    # Five equal layers on two ranks: only the integer program proves that a rank has three of them.
    layer = LayerCost("layer", 1e-3, 1, 0, backward_s=2e-3)
    chain = chain_of_layers(LayerTable("five", 2, 4, 0.0, 0, (layer,) * 5))
    fast, slow = (
        cooptimize(chain, budget=Budget(evaluations=500), params=CooptimizeParams(bound=BoundParams(seconds=seconds)))
        for seconds in (10.0, 0.0)
    )
    assert fast.lower_bound.ns > slow.lower_bound.ns
    assert fast.evaluations == slow.evaluations
    assert fast.placement == slow.placement


def test_slow_evaluations_have_fewer_walks() -> None:
    slow = CooptimizeParams(annealing=AnnealParams(fewest_steps=1001))
    chain = chain_of_layers(table(3, 12, 3, 6))
    assert len(cooptimize(chain, budget=Budget(evaluations=2000), params=slow).reports) == 1
    assert len(cooptimize(chain, budget=Budget(evaluations=2000)).reports) == CooptimizeParams().walks


def test_threads_agree_on_feasibility() -> None:
    chain = chain_of_layers(table(4, 10, 2, 4))
    found = cooptimize(chain, budget=Budget(evaluations=2000), threads=2)
    assert not check(found.graph, found.schedule, found.timeline)
    assert len(found.reports) == CooptimizeParams().walks


def test_gives_the_head_a_rank_almost_for_itself() -> None:
    # Ten layers of 1 + 1 ms and a head of 8 + 8 on two ranks: nine layers, and one with the head, is the balance;
    # the rank that does not have the first layer begins 1 ms late and ends 1 ms early.
    small = LayerCost("layer", 1e-3, 1, 0, backward_s=1e-3)
    head = LayerCost("head", 8e-3, 1, 0, backward_s=8e-3)
    chain = chain_of_layers(LayerTable("heavy", 2, 8, 0.0, 0, (*[small] * 10, head)))
    found = cooptimize(chain, budget=Budget(evaluations=20_000))
    assert found.lower_bound.ns == (8 * 18 + 2) * 1_000_000
    assert found.gap < 0.02


def test_recomputation_is_chosen_where_memory_asks_for_it() -> None:
    entries = (StrategyEntry("keep", 1e-3, 10, backward_s=2e-3), StrategyEntry("full", 1e-3, 1, backward_s=3e-3))
    layer = LayerCost("layer", 1e-3, 10, 0, backward_s=2e-3, static_bytes=0, candidates=entries)
    tight = chain_of_layers(LayerTable("tight", 2, 6, 0.0, 0, (layer,) * 6)).with_capacity(21)
    found = cooptimize(tight, budget=Budget(evaluations=4000))
    assert any(found.placement.strategies)
    assert found.graph.candidates is not None
    assert not check(found.graph, found.schedule, found.timeline)
    loose = cooptimize(tight.with_capacity(None), budget=Budget(evaluations=4000))
    assert not any(loose.placement.strategies)
    assert loose.timeline.makespan_ns < found.timeline.makespan_ns


def test_layers_of_little_time_and_much_memory_are_spread() -> None:
    # A text encoder before a video decoder: cut by time, the first rank has all of its weights, and does not fit.
    light = LayerCost("text", 1e-4, 1, 0, backward_s=2e-4, static_bytes=10)
    heavy = LayerCost("video", 1e-2, 1, 0, backward_s=2e-2, static_bytes=1)
    chain = chain_of_layers(LayerTable("video", 4, 8, 0.0, 0, (*[light] * 16, *[heavy] * 12)))
    found = cooptimize(chain.with_capacity(70), budget=Budget(evaluations=3000))
    assert not check(found.graph, found.schedule, found.timeline)
    assert found.graph.static_bytes.max() <= 70
    # Where all fits as before, it is cut as before.
    same, free = (cooptimize(chain.with_capacity(c), budget=Budget(evaluations=3000)).placement for c in (10**9, None))
    assert same == free


@pytest.mark.parametrize(
    ("num_layers", "head_bytes", "capacity", "num_microbatches"),
    [(16, None, [15, 40, 40, 40], 8), (8, 20, [30] * 3, 6), (31, 40, [60] * 4, 6), (6, None, [0, 20, 20, 0], 2)],
)
def test_ranks_are_filled_if_no_equal_shares_fit(
    num_layers: int, head_bytes: int | None, capacity: list[int], num_microbatches: int
) -> None:
    """Ranks with less memory have fewer layers, and a head that keeps logits has few layers beside it."""
    layer = LayerCost("layer", 1.0, 1, 0, backward_s=2.0, static_bytes=5)
    heads = () if head_bytes is None else (msgspec.structs.replace(layer, name="head", activation_bytes=head_bytes),)
    layers = (*[layer] * num_layers, *heads)
    chain = chain_of_layers(LayerTable("uneven", len(capacity), num_microbatches, 0.1, 0, layers))
    found = cooptimize(chain.with_capacity(capacity), budget=Budget(evaluations=500))
    assert not check(found.graph, found.schedule, found.timeline)
    assert (found.timeline.peak_bytes <= capacity).all()


@pytest.mark.parametrize(
    ("activations", "capacity"),
    [
        ([12, 24, 11], [36, 28]),  # the second layer lies alone, between two layers of the other rank
        ([4, 27, 15, 8, 23], [31] * 3),
        ([37, 39, 3, 3, 3, 3, 3, 3, 3, 30, 3, 15, 38], [73] * 3),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_ranks_have_several_chunks_if_no_stages_fit(activations: list[int], capacity: list[int], split: bool) -> None:
    times = {"backward_input_s": 1.0, "backward_weight_s": 1.0} if split else {"backward_s": 2.0}
    layers = [LayerCost("layer", 1.0, size, 0, static_bytes=2, **times) for size in activations]
    chain = chain_of_layers(LayerTable("lumpy", len(capacity), 4, 0.1, 0, tuple(layers)), split=split)
    chain = chain.with_capacity(capacity)
    assert filled(chain) is None
    found = cooptimize(chain, budget=Budget(evaluations=500))
    assert not check(found.graph, found.schedule, found.timeline)
    assert (found.timeline.peak_bytes <= capacity).all()
    assert found.placement.num_chunks <= 4 * len(capacity)


def filled_by_hand(chain: LayerChain, strategies: tuple[int, ...]) -> PartitionPlacement | None:
    """Put as many of the next layers on each rank as fit with one microbatch."""
    cuts, ranks = [0], []
    for rank, capacity in enumerate(chain.headroom_bytes.tolist()):
        first = cuts[-1]
        for end in range(chain.num_layers, first, -1):
            # The chunks before and after have a layer or more, or do not exist.
            edges = sorted({0, first, end, chain.num_layers})
            costs = chunk_costs(chain, PartitionPlacement(tuple(edges), (0,) * (len(edges) - 1), strategies))
            at = edges.index(first)
            split = any(chain.weight_ns[i, [0, (*strategies, *[0] * end)[i]]].any() for i in range(first, end))
            held = max(costs.activation_bytes[at], costs.gradient_bytes[at] if split else 0)
            if costs.static_bytes[at] + held <= capacity:
                cuts.append(end)
                ranks.append(rank)
                break
    return PartitionPlacement(tuple(cuts), tuple(ranks)) if cuts[-1] == chain.num_layers else None


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
def test_what_fits_by_filling_ranks_is_found(
    seed: int, num_layers: int, split: bool, candidates: bool, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    chain = chain_of_layers(table(seed, num_layers, num_ranks, 3, split=split, candidates=candidates), split=split)
    held = int((chain.static_bytes + np.maximum(chain.activation_bytes, chain.gradient_bytes).max(axis=1)).sum())
    chain = chain.with_capacity(data.draw(st.lists(st.integers(0, held), min_size=num_ranks, max_size=num_ranks)))
    by_hand = [filled_by_hand(chain, each) for each in uniform_strategies(chain)]
    for each, strategies in zip(by_hand, uniform_strategies(chain), strict=True):
        ours = filled(chain, strategies)
        assert (ours is None) == (each is None)
        if ours is not None and each is not None:
            most = [int(rank_work_ns(chain, replace(one, strategies=strategies)).max()) for one in (ours, each)]
            assert most[0] <= most[1] * (1 + 1e-4)
    if any(by_hand):
        quick = CooptimizeParams(bound=BoundParams(most_ranks=1))
        found = cooptimize(chain, budget=Budget(evaluations=20), params=quick)
        assert not check(found.graph, found.schedule, found.timeline)


@pytest.mark.parametrize("split", [False, True])
def test_a_first_candidate_that_contradicts_its_layer_is_refused(split: bool) -> None:
    costs = {"forward_s": 1e-3, "activation_bytes": 10, "backward_input_s": 2e-3, "backward_weight_s": 1e-3}

    def chain(**changes: float) -> LayerChain:
        first = StrategyEntry("keep", **costs | changes, weight_gradient_bytes=7)
        layer = LayerCost("layer", **costs, parameter_bytes=0, candidates=(first,))
        return chain_of_layers(LayerTable("one", 1, 2, 0.0, 0, (layer,)), split=split)

    assert chain().gradient_bytes.tolist() == [[7]]
    for field, value in costs.items():
        with pytest.raises(InputError, match=r"layers\[0\]\.candidates\[0\]: has \d+ .*, the layer has \d+"):
            chain(**{field: 2 * value})


def test_memory_that_cannot_hold_the_model_is_refused() -> None:
    chain = chain_of_layers(table(1, 6, 2, 4)).with_capacity(3)
    with pytest.raises(InfeasibleError, match="B together"):
        cooptimize(chain, budget=Budget(evaluations=100))


def test_fewer_layers_than_ranks() -> None:
    chain = chain_of_layers(table(2, 2, 4, 3))
    found = cooptimize(chain, budget=Budget(evaluations=500))
    assert found.placement.num_chunks <= 2


def test_at_least_one_thread() -> None:
    with pytest.raises(InputError, match="threads"):
        cooptimize(chain_of_layers(table(2, 2, 1, 1)), budget=Budget(evaluations=1), threads=0)


def test_a_delay_counts_at_every_transfer_only() -> None:
    chain = chain_of_layers(msgspec.structs.replace(table(6, 8, 2, 4), boundary_s=0.05))
    found = cooptimize(chain, budget=Budget(evaluations=2000))
    assert found.timeline.makespan_ns <= int(chain.total_ns.sum()) * 4  # one rank alone needs no boundary transfer
