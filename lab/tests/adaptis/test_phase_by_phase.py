"""AdaPtis' generator: moves keep what they must, phases do what they are named for, answers are feasible."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout.cooptimize import (
    LayerChain,
    PartitionPlacement,
    PriorityRule,
    chain_of_layers,
    cooptimize,
    one_f_one_b_peaks,
    schedule_of,
)
from pipeloom.layout.cooptimize.evaluate import evaluate
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.standard import stages
from pipeloom.search import Budget
from pipeloom.timeline import check, simulate
from pipeloom_lab.adaptis import tune_phases
from pipeloom_lab.adaptis.phase_moves import bubble_shares, permutations, transfers
from pipeloom_lab.adaptis.systems import run_system
from tests.layout.cooptimize.chains import placed_chains, table


def layers_of(placement: PartitionPlacement) -> dict[int, int]:
    """Number of layers of every rank."""
    counts: dict[int, int] = {}
    for (first, last), rank in zip(pairwise(placement.cuts), placement.ranks, strict=True):
        assert first < last
        counts[rank] = counts.get(rank, 0) + last - first
    return counts


@given(placed_chains(), st.integers(0, 3), st.integers(0, 3))
def test_a_transfer_moves_one_layer(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule], giver: int, taker: int
) -> None:
    before = layers_of(setting[1])
    for made in transfers(setting[1], giver, taker):
        after = layers_of(made)
        assert made.ranks == setting[1].ranks
        assert giver == taker or after[giver] == before[giver] - 1
        assert giver == taker or after[taker] == before[taker] + 1
        assert sum(after.values()) == sum(before.values())


@given(placed_chains(), st.integers(1, 12))
def test_permutations_keep_the_partition(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule], most: int
) -> None:
    before = layers_of(setting[1])
    for made in permutations(setting[1], most):
        assert layers_of(made) == before
        assert made.num_chunks <= most


@given(placed_chains())
def test_shares_of_the_phases_are_all_bubbles(setting: tuple[LayerChain, PartitionPlacement, PriorityRule]) -> None:
    chain, placement, rule = setting
    graph, schedule = schedule_of(chain, placement, rule)
    timeline = simulate(graph, schedule)
    shares = bubble_shares(graph, timeline)
    idle = timeline.makespan_ns - int(graph.with_candidates(schedule.candidate).duration_ns.sum()) / graph.num_ranks
    assert min(shares.partition, shares.placement, shares.schedule) >= 0
    assert abs(shares.partition + shares.placement + shares.schedule - idle) <= 1


@pytest.mark.parametrize("split", [False, True])
def test_answers_are_feasible_repeatable_and_better_than_the_baselines(split: bool) -> None:
    chain = chain_of_layers(table(3, 14, 3, 6, split=split, boundary_s=0.001), split=split)
    chain = chain.with_capacity(int(one_f_one_b_peaks(chain).max()))
    once, again = (tune_phases(chain, budget=Budget(evaluations=1500)) for _ in range(2))
    assert once.timeline.makespan_ns == again.timeline.makespan_ns
    assert not check(once.graph, once.schedule, once.timeline)
    assert evaluate(chain, once.placement, once.rule) == once.timeline.makespan_ns < NEVER
    assert once.lower_bound.ns <= once.timeline.makespan_ns
    assert once.timeline.makespan_ns <= run_system("S-1F1B", chain).timeline.makespan_ns
    assert once.timeline.makespan_ns <= min(report.start_ns for report in once.reports)


def heavy_head() -> LayerChain:
    small = LayerCost("layer", 1e-3, 1, 0, backward_s=1e-3)
    head = LayerCost("head", 4e-3, 1, 0, backward_s=4e-3)
    return chain_of_layers(LayerTable("heavy", 2, 8, 0.0, 0, (*[small] * 11, head)))


def test_phases_that_are_not_tuned_stay() -> None:
    chain = heavy_head()
    base = stages(chain)
    found = {
        phases: tune_phases(chain, budget=Budget(evaluations=3000), phases=phases)
        for phases in (("schedule",), ("partition",), ("placement",), ("placement", "schedule", "partition"))
    }
    assert found["schedule",].placement == base
    assert found["partition",].placement.ranks == base.ranks
    # Eleven layers of 2 ms and a head of 8: 14 and 16 is the best there is.
    assert found["partition",].placement.cuts == (0, 7, 12)
    assert layers_of(found["placement",].placement) == layers_of(base)
    alone = min(one.timeline.makespan_ns for phases, one in found.items() if len(phases) == 1)
    assert found["placement", "schedule", "partition"].timeline.makespan_ns <= alone


def test_the_joint_search_is_not_worse() -> None:
    chain = chain_of_layers(table(11, 16, 4, 8, split=False))
    theirs = tune_phases(chain, budget=Budget(evaluations=5000))
    ours = cooptimize(chain, budget=Budget(evaluations=20_000))
    assert ours.timeline.makespan_ns <= theirs.timeline.makespan_ns


def test_what_cannot_be_tuned_is_refused() -> None:
    chain = heavy_head()
    with pytest.raises(InputError, match="phases"):
        tune_phases(chain, budget=Budget(evaluations=1), phases=("order",))
    with pytest.raises(InfeasibleError):
        tune_phases(chain.with_capacity(2), budget=Budget(evaluations=1))
    few = tune_phases(chain_of_layers(table(2, 2, 4, 3)), budget=Budget(evaluations=300))
    assert few.placement.num_chunks <= 2
