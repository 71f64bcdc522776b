"""What others run: published makespans on uniform chains, and their partitions on unequal ones."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.errors import InputError
from pipeloom.layout.cooptimize import LayerChain, chain_of_layers
from pipeloom.layout.cooptimize.cuts import balanced_cuts, settled_cuts, stage_cuts
from pipeloom.layout.cooptimize.standard import equal_cuts, one_f_one_b_peaks
from pipeloom.layout.layouts import equal_layers
from pipeloom.timeline import check
from pipeloom_lab.adaptis.systems import SYSTEMS, mist_stages, run_system
from tests.chains import uniform_layers
from tests.layout.cooptimize.chains import table


def makespan(name: str, chain: LayerChain) -> int:
    found = run_system(name, chain)
    assert not check(found.graph, found.schedule, found.timeline)
    return found.timeline.makespan_ns


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_published_makespans(p: int, m: int) -> None:
    whole = uniform_layers(p, p, m, split=False)
    # GPipe and 1F1B: m + p - 1 times forward and backward.
    assert makespan("GPipe", whole) == makespan("S-1F1B", whole) == makespan("Mist", whole) == 3 * (m + p - 1)
    # Interleaved, v = 2: the bubble of p - 1 shrinks by v (Narayanan et al. 2021, section 2.2).
    assert makespan("I-1F1B", uniform_layers(2 * p, p, m, split=False)) == 6 * m + 3 * (p - 1)
    # ZB-H1 with F = B = W: (p - 1) (F + B - W) of bubble (Qi et al. 2024, table 1), in 1F1B's memory.
    assert makespan("ZB-H1", uniform_layers(p, p, m)) == 3 * m + p - 1
    peak = run_system("ZB-H1", uniform_layers(p, p, m)).timeline.peak_bytes
    assert peak.max() == p


def test_interleaved_has_any_number_of_chunks() -> None:
    """On a uniform chain the bubble of p - 1 shrinks by as many chunks as there are layers for."""
    assert makespan("I-1F1B", uniform_layers(7 * 2, 2, 4, split=False)) == 3 * 7 * 4 + 3


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16)])
def test_zero_bubble_v_begins_late_and_never_idles(p: int, m: int) -> None:
    # The last rank begins p - 1 late; after that no rank idles where F = B = W and 1F1B's memory is there.
    found = run_system("ZB-V", uniform_layers(2 * p, p, m))
    # The greedy rule finds that, or stays one unit behind.
    assert 0 <= found.timeline.makespan_ns - (6 * m + p - 1) <= 1
    assert found.timeline.peak_bytes.max() <= 2 * p
    assert found.fits


def test_one_wave_on_two_ranks_by_hand() -> None:
    # F down 0-1-2-3 in a V, f = b = 1: the second rank works from 1 to 9 without idling.
    assert makespan("Hanayo", uniform_layers(4, 2, 2, 1, 1, 0, split=False)) == 10


def test_dual_pipe_v_runs_the_published_steps() -> None:
    found = run_system("DualPipeV", uniform_layers(4, 2, 4))
    graph = found.graph
    orders = []
    for rank in range(2):
        words = []
        for task in found.schedule.order[rank].tolist():
            stage = 0 if graph.task(task).number // 4 % 4 == rank else 1
            words.append(f"{graph.task(task).kind}{stage}")
        orders.append(" ".join(words))
    # Rank 0: 2 F0; F0 F1; I1 W1 F1; once F0 I1 W1 F1 I0 W0; I1 W1 F1 I0 W0; I1 W1 I0; I0 between delayed W.
    assert orders[0] == "F0 F0 F0 F1 I1 W1 F1 F0 I1 W1 F1 I0 W0 I1 W1 F1 I0 W0 I1 W1 I0 W0 I0 W0"
    assert orders[1] == ("F0 F1 F0 F1 F0 I1 W1 F1 I0 W0 F0 I1 W1 F1 I0 W0 I1 W1 I0 W0 I1 I0 W1 W0")
    assert not check(graph, found.schedule, found.timeline)


def test_too_few_microbatches_or_layers_are_refused() -> None:
    with pytest.raises(InputError, match="below twice the ranks"):
        run_system("DualPipeV", uniform_layers(4, 2, 3))
    with pytest.raises(InputError, match="cannot fill"):
        run_system("S-1F1B", uniform_layers(3, 4, 4))
    with pytest.raises(InputError, match="is unknown"):
        run_system("1G1B", uniform_layers(4, 2, 4))


def test_mist_balances_load_within_memory() -> None:
    small = LayerCost("layer", 1e-9, 1, 0, backward_s=1e-9)
    head = LayerCost("head", 3e-9, 1, 0, backward_s=3e-9)
    chain = chain_of_layers(LayerTable("head", 2, 4, 0.0, 0, (*[small] * 7, head)))
    assert mist_stages(chain).cuts == (0, 5, 8)
    # The first stage holds two microbatches: five layers need ten bytes.
    assert mist_stages(chain.with_capacity(9)).cuts == (0, 4, 8)
    assert mist_stages(chain.with_capacity(1)).cuts == (0, 5, 8)


def test_balanced_systems_cut_by_time() -> None:
    """A head of five layers' time: equal numbers of layers leave the last rank with most of the work."""

    def layer(name: str, seconds: float) -> LayerCost:
        return LayerCost(name, seconds, 1, 0, backward_input_s=seconds, backward_weight_s=seconds)

    layers, head = [layer(f"layer.{i}", 1e-3) for i in range(23)], layer("head", 5e-3)
    found = LayerTable("ends", 4, 8, 0.0, 0, (*layers, head))
    for name, split in (("I-1F1B", False), ("ZB-H1", True), ("ZB-V", True)):
        chain = chain_of_layers(found, split=split)
        assert makespan(f"{name}, balanced", chain) < makespan(name, chain)
    peak = run_system("ZB-H1, balanced", chain).timeline.peak_bytes.max()
    assert peak <= one_f_one_b_peaks(chain, mist_stages(chain)).max()


def test_embedding_and_head_are_no_layers_of_standard_cuts() -> None:
    layers = [LayerCost("embedding", 0.0, 0, 0, backward_s=0.0)]
    layers += [LayerCost(f"layer.{i}", 1e-3, 1, 0, backward_s=1e-3) for i in range(8)]
    layers += [LayerCost("head", 1e-3, 1, 0, backward_s=1e-3)]
    chain = chain_of_layers(LayerTable("ends", 4, 8, 0.0, 0, tuple(layers)))
    assert equal_cuts(chain, 4) == (0, 3, 5, 7, 10)
    assert equal_layers(10, 4) == (0, 3, 6, 8, 10)
    for name in SYSTEMS:
        makespan(name, chain)


def test_settled_cuts_balance_many_ranks() -> None:
    loads = np.random.default_rng(0).integers(60, 140, 512)
    ranks = tuple(j % 64 for j in range(128))
    before = balanced_cuts(loads, ranks)
    after = settled_cuts(loads, ranks, before)
    worst = []
    for cuts in (before, after):
        assert all(a < b for a, b in pairwise(cuts))
        rank = np.zeros(64, np.int64)
        np.add.at(rank, np.array(ranks), np.add.reduceat(loads, np.array(cuts[:-1])))
        worst.append(rank.max() / rank.mean())
    assert worst[1] < worst[0] - 0.02


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_stage_cuts_are_the_best_of_all(seed: int, n: int, p: int, m: int, split: bool) -> None:
    chain = chain_of_layers(table(seed, n, p, m, split=split, boundary_s=0.003), split=split)
    if n < p:
        with pytest.raises(InputError, match="cannot fill"):
            stage_cuts(chain)
        return
    total, forward = chain.total_ns[:, 0], chain.forward_ns[:, 0]
    fillable = bool(chain.weight_ns.any())
    ends = forward if fillable else forward + chain.backward_ns[:, 0]

    def worst(cuts: tuple[int, ...]) -> int:
        hop = chain.delay_ns * (1 if fillable else 2)
        return max(int(total[a:b].sum()) * m + int(ends[:a].sum()) + k * hop for k, (a, b) in enumerate(pairwise(cuts)))

    every = [(0, *inner, n) for inner in combinations(range(1, n), p - 1)]
    assert worst(stage_cuts(chain)) == min(map(worst, every))
