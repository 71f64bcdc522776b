"""Optimus, nnScaler* and FSDP: hand-solved cases and properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.compare.baselines.fsdp import fsdp_seconds
from pipeloom.compare.baselines.nnscaler import best_stages
from pipeloom.compare.baselines.optimus_orders import optimus_coarse, optimus_fine
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import separate
from pipeloom.packing import PackingSpec, pack
from pipeloom.search import one_f_one_b
from pipeloom.search.zero_bubble import zero_bubble_h1
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample
from pipeloom.taskgraph import FORWARD, TaskGraph, build_graph
from pipeloom.timeline import Schedule, check, simulate
from tests.cases import ToyCosts, vlm_spec
from tests.chains import uniform_chain
from tests.strategies import graphs


def _vlm_graph(images: list[int], ranks: int = 2):
    """Two layers a rank and module; an image is 1 patch and 1 token, a sample 2 tokens in all."""
    model = vlm_spec(vision_layers=ranks, lm_layers=ranks)
    samples = tuple(Sample(f"s{i}", 2 - n, (1,) * n, (1,) * n) for i, n in enumerate(images))
    layout = separate(model, ranks, {}, lambda _m, _l: 1.0)
    packing = pack(Batch(samples), model, layout, PackingSpec(2, "first_fit"))
    return build_graph(layout, packing, ToyCosts(model))


def test_optimus_by_hand():
    """Vision F 1 B 2, language F 2 B 4 ms on each of two ranks; two microbatches with an image each.

    Rank 0: encoders 0-2, then 1F1B: F 2-4, F 4-6 (one ahead), B of the first when rank 1 has done F 4-6 and
    B 6-10: 10-14; the second's B after rank 1's B 12-16: 16-20. Encoders' backwards come last: those of rank 1
    (16-18 after the first's gradient at 14; 20-22 after the second's), then rank 0 20-22 and 22-24.
    """
    graph = _vlm_graph([1, 1])
    schedule = optimus_coarse(graph)
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    words = _words(graph, schedule)
    assert words[0] == ["Fv0", "Fv1", "Fl0", "Fl1", "Bl0", "Bl1", "Bv0", "Bv1"]
    assert words[1] == ["Fv0", "Fv1", "Fl0", "Bl0", "Fl1", "Bl1", "Bv0", "Bv1"]
    assert timeline.makespan_ns == 24_000_000


def test_bubbles_are_filled_by_hand():
    """Encoder F 1 B 2 on the rank that it is dealt to, language F 2 B 4 ms on each of two ranks; five microbatches.

    The language model alone: rank 0 F 0-2, F 2-4, F 4-6 (two ahead), B 8-12, F 12-14, B 14-18, F 18-20, B 20-24,
    B 26-30, B 32-36, idle at 6-8, 24-26 and 30-32; rank 1 from 2 to 32 without a break. Its first passes of the
    microbatches begin at 0, 2, 4, 12 and 18 and its last end at 12, 18, 24, 30 and 36, all on rank 0. Encoders of even
    microbatches are dealt to rank 0. Forwards: 4 in the bubble at 7-8, 3 at 1-2 on rank 1, 2 only ahead, at -1-0,
    1 at 0-1, 0 at -2--1. Backwards: 0 in the bubble at 24-26, 1 at 32-34 on rank 1, 2 in the bubble at 30-32, 3 at
    34-36, 4 at 36-38. In all 40. Coarse: 3 ahead on rank 0, 36, and 6 behind.
    """
    model = vlm_spec(vision_layers=1, lm_layers=2)
    layout = Layout(
        2,
        (ModuleLayout("vision", on_ranks="replicated"), ModuleLayout("lm", ("vision",))),
        (Chunk("vision", (0, 0), 0), Chunk("vision", (0, 0), 1), Chunk("lm", (0, 0), 0), Chunk("lm", (1, 1), 1)),
    )
    samples = tuple(Sample(f"s{i}", 1, (1,), (1,)) for i in range(5))
    packing = pack(Batch(samples), model, layout, PackingSpec(2, "first_fit"))
    graph = build_graph(layout, packing, ToyCosts(model))
    schedule = optimus_fine(graph)
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    words = _words(graph, schedule)
    assert " ".join(words[0]) == "Fv0 Fv2 Fl0 Fl1 Fl2 Fv4 Bl0 Fl3 Bl1 Fl4 Bl2 Bv0 Bl3 Bv2 Bl4 Bv4"
    assert " ".join(words[1]) == "Fv1 Fv3 Fl0 Bl0 Fl1 Bl1 Fl2 Bl2 Fl3 Bl3 Fl4 Bl4 Bv1 Bv3"
    assert timeline.makespan_ns == 40_000_000
    assert simulate(graph, optimus_coarse(graph)).makespan_ns == 45_000_000


@given(graphs(memory=None, edge_bytes=False))
def test_optimus_never_deadlocks(graph):
    for make in (optimus_coarse, optimus_fine):
        if len(graph.module_names) < 2:
            with pytest.raises(InputError, match="one module"):
                make(graph)
        else:
            assert check(graph, make(graph)) == ()


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_best_stages_is_the_best_of_all_cuts(num_stages, seed):
    random = np.random.default_rng(seed)
    layers, levels = int(random.integers(num_stages, 7)), 3
    seconds = np.sort(random.integers(1, 20, (levels, layers)).astype(float), axis=0)
    held = -np.sort(-random.integers(0, 20, (levels, layers)).astype(float), axis=0)
    static = random.integers(0, 5, layers).astype(float)
    capacity = float(random.integers(10, 150))
    best = np.inf
    for inner in itertools.combinations(range(1, layers), num_stages - 1):
        cuts = (0, *inner, layers)
        worst = 0.0
        for stage, (a, b) in enumerate(itertools.pairwise(cuts)):
            options = [
                seconds[k, a:b].sum()
                for k in range(levels)
                if held[k, a:b].sum() * (num_stages - stage) + static[a:b].sum() <= capacity
            ]
            worst = max(worst, min(options, default=np.inf))
        best = min(best, worst)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            best_stages(seconds, held, static, num_stages, capacity)
        return
    found = best_stages(seconds, held, static, num_stages, capacity)
    assert found.slowest_s == best
    assert found.cuts[0] == 0
    assert found.cuts[-1] == layers
    assert len(found.levels) == num_stages


def test_fsdp_waits_for_the_slowest_replica_in_every_module():
    steps = [[[(1.0, 2.0), (5.0, 9.0)]], [[(3.0, 4.0), (2.0, 4.0)]]]
    assert fsdp_seconds(steps) == 3 + 4 + 5 + 9
    with pytest.raises(InputError, match="unequal"):
        fsdp_seconds([[], steps[0]])


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 8), (4, 12)])
def test_zero_bubble_idles_as_published(p: int, m: int) -> None:
    """With F, I and W alike a rank idles (p - 1)(F + I - W), and holds p microbatches, as 1F1B's first rank does."""
    graph = uniform_chain(p, m, forward_ns=5, backward_ns=10, split=True)
    schedule = zero_bubble_h1(graph)
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    assert timeline.makespan_ns == 15 * m + 5 * (p - 1)
    assert timeline.peak_bytes.max() == p


def test_weight_gradients_at_once_are_one_f_one_b() -> None:
    split, whole = (uniform_chain(4, 8, forward_ns=5, backward_ns=10, split=s) for s in (True, False))
    peaks = []
    for behind in range(4):
        schedule = zero_bubble_h1(split, behind)
        timeline = simulate(split, schedule)
        assert check(split, schedule, timeline) == ()
        peaks.append(timeline.peak_bytes.tolist())
        if behind == 0:
            # A W directly after its I still lets the rank before begin its own I.
            plain = simulate(whole, one_f_one_b(whole))
            assert timeline.makespan_ns <= plain.makespan_ns
            assert peaks[0] == plain.peak_bytes.tolist()
    assert peaks == sorted(peaks)


def _words(graph: TaskGraph, schedule: Schedule) -> list[list[str]]:
    """Orders by rank: direction, module's first letter, microbatch."""
    return [
        [
            f"{'F' if graph.kind[t] == FORWARD else 'B'}{graph.module_names[graph.module[t]][0]}{graph.microbatch[t]}"
            for t in order
        ]
        for order in schedule.order
    ]
