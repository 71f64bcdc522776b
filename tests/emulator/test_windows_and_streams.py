"""Attention within windows, and streams between modules: pairs, bytes, and what waits for what."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator import modules as m
from pipeloom.emulator.build import count_parameters
from pipeloom.emulator.size import Size, Window, window_pairs
from pipeloom.emulator.tape import Context
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.iteration import Draw, Points, emulate, sweep
from pipeloom.spec import Sample, Workload
from pipeloom.spec import architecture as a
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import BACKWARD, FORWARD, NO_TASK
from tests.emulator.cases import ATTENTION, PLAIN, machine
from tests.integrations.hand_counted import architecture_of
from tests.integrations.published import QWEN2_5_VL_7B, QWEN3_VL_8B

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(tuple)


def mask(length, window):
    """Which keys each query sees, written out."""
    query, key = np.indices((length, length))
    if window.slides:
        return (key <= query) & (query - key < window.length)
    return query // window.length == key // window.length


@given(lengths, st.integers(1, 70), st.booleans())
def test_pairs_within_windows(sequences, length, slides):
    window = Window(length, slides)
    assert window.pairs(sequences) == sum(int(mask(n, window).sum()) for n in sequences)


@given(lengths, st.integers(1, 20), st.integers(1, 20))
def test_sizes_with_windows_add_and_scale(sequences, one, other):
    work = Workload(sequences)
    pairs = {n: window_pairs(n, causal=True) for n in (one, other)}
    total = (pairs[one] * 3 + Size(tokens=2.0) + pairs[other]) / 2 + 5
    expected = (3 * pairs[one].of(work) + 2 * sum(sequences) + pairs[other].of(work)) / 2 + 5
    assert total.of(work) == pytest.approx(expected)


@pytest.mark.parametrize("causal", [True, False])
def test_windows_save_operations_beyond_their_length_alone(causal):
    full = LayerTemplate(m.Attention(4, 2, 4, causal=causal, hidden=16), 16, Context(), PLAIN)
    local = LayerTemplate(m.Attention(4, 2, 4, causal=causal, window=8, hidden=16), 16, Context(), PLAIN)
    short, long = Workload((8, 5)), Workload((64,))
    assert local.on(short).model_flops == full.on(short).model_flops
    pairs = Window(8, causal).pairs((64,))
    saved = (64 * 65 // 2 if causal else 64**2) - pairs
    assert full.on(long).model_flops - local.on(long).model_flops == 2 * saved * 4 * 8
    # The backward is shorter too; what is kept is the same.
    for part in ("F", "B"):
        times = [layer.on(long).leaves["keep", part].duration_ps.sum() for layer in (local, full)]
        assert times[0] < times[1]
    assert local.on(long).activation_bytes == full.on(long).activation_bytes


def test_sliding_and_full_attention_are_two_kinds_and_equal_layers_one():
    block = a.ResidualLayer(hidden=32, mixers=(ATTENTION,))
    slides = msgspec.structs.replace(block, mixers=(msgspec.structs.replace(ATTENTION, window=4),))
    layers = (slides, block, msgspec.structs.replace(slides, count=2), block)
    model = a.Architecture("m", "made up", (a.ModuleArchitecture("lm", "sequence", layers),))
    kinds = [layer.kind for layer in EmulatedCosts(model, machine(), Degrees()).model_spec.module("lm").layers]
    assert kinds == ["block0", "block1", "block0", "block1"]


TAP = (a.JoinStep(4), a.NormStep(), a.LinearStep(48), a.ActivationStep(), a.LinearStep(32))


def tapped(*, taps=True):
    """An encoder whose second block's features go to the second block of a language model."""
    block = a.ResidualLayer(hidden=32, mixers=(ATTENTION,))
    gives = msgspec.structs.replace(block, emits="inner", tap=TAP) if taps else block
    takes = msgspec.structs.replace(block, takes="inner") if taps else block
    merger = a.PatchMergerLayer(hidden=32, factor=4, out_width=32, inner=64)
    pixels = a.PatchEmbeddingLayer(patch_numbers=12, hidden=32)
    vision = a.ModuleArchitecture("vision", "images", (pixels, block, gives, block, merger))
    words = a.TokenEmbeddingLayer(vocabulary=64, hidden=32)
    head = a.LanguageHeadLayer(hidden=32, vocabulary=64)
    lm = a.ModuleArchitecture("lm", "sequence", (words, block, takes, block, head), ("vision",))
    return a.Architecture("tapped", "made up", (vision, lm))


def test_parameters_and_bytes_of_streams():
    model, plain = tapped(), tapped(taps=False)
    merged = 2 * 128 + 128 * 48 + 48 + 48 * 32 + 32
    assert count_parameters(model) - count_parameters(plain) == merged
    costs, work = EmulatedCosts(model, machine(), Degrees()), Workload((64, 16))
    assert costs.stream_bytes("inner", work) == (64 + 16) // 4 * 32 * 2
    spec = costs.model_spec
    (emitted,), (taken,) = spec.module("vision").emits, spec.module("lm").takes
    assert (emitted.stream, emitted.layer, taken.layer) == ("inner", 2, 2)
    assert emitted.output.num_bytes(work) == costs.stream_bytes("inner", work)
    assert spec.sources("lm") == ("vision",)


def test_streams_travel_and_are_waited_for_both_ways():
    samples = [[Sample(f"{i}", 40, (4, 4), (16, 16))] for i in range(2)]
    result = emulate(tapped(), machine(), Degrees(pipeline=2), batch=samples, sub_microbatch={"vision": 1})
    graph, ends = result.graph, result.timeline.end_ns
    emits, takes = ([c for c in result.layout.chunks if c.module == name] for name in ("vision", "lm"))
    source = result.layout.chunks.index(next(c for c in emits if c.layers[1] >= 2))
    target = result.layout.chunks.index(next(c for c in takes if c.layers[1] >= 2))
    found = {FORWARD: 0, BACKWARD: 0}
    for one, other in zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True):
        assert ends[one] <= result.timeline.start_ns[other]
        chunks = [graph.labels[graph.pair[task]].chunk for task in (one, other)]
        if sorted(chunks) == sorted((source, target)):
            found[int(graph.kind[one])] += 1
            assert chunks == [source, target][:: -1 if graph.kind[one] == BACKWARD else 1]
    assert found == {FORWARD: 4, BACKWARD: 4}
    # Frozen encoders get no gradients.
    vision, lm = tapped().modules
    still = a.Architecture("still", "made up", (msgspec.structs.replace(vision, frozen=True), lm))
    frozen = emulate(still, machine(), Degrees(pipeline=2), batch=samples, sub_microbatch={"vision": 1})
    assert (frozen.graph.backward_of[frozen.graph.module[frozen.graph.forward_of] == 0] == NO_TASK).all()
    assert 0 < frozen.iteration_s < result.iteration_s


def test_streams_that_cannot_be_are_reported():
    vision, lm = tapped().modules
    with pytest.raises(InputError, match="no layer takes 'inner'"):
        a.Architecture("m", "made up", (vision,))
    with pytest.raises(InputError, match="no layer emits 'inner'"):
        a.Architecture("m", "made up", (msgspec.structs.replace(lm, after=()),))
    with pytest.raises(InputError, match=r"residual.tap: is given without `emits`"):
        a.ResidualLayer(32, (ATTENTION,), tap=TAP)
    with pytest.raises(InputError, match=r"residual.count: 2 layers share a stream's end"):
        a.ResidualLayer(32, (ATTENTION,), 2, takes="inner")


def test_points_of_a_sweep_that_cannot_be_are_left_out_with_their_reason():
    """Widths of Qwen2.5-VL's encoder are no multiples of 8."""
    entries = sweep(
        architecture_of(QWEN2_5_VL_7B, "m"),
        "dip-h800-64",
        batch=Draw(4),
        points=Points(num_devices=8, strategies=("recompute",)),
    )
    assert len(entries) == 10
    problems = {entry.degrees.tensor: entry.problem for entry in entries if entry.result is None}
    assert problems[8] == "mlp width: 3420 is not a multiple of tensor parallelism 8; use a divisor of 3420"
    assert any(entry.result is not None for entry in entries)
    assert all(entry.degrees.tensor < 8 for entry in entries if entry.result is not None)


def test_features_of_inner_blocks_go_from_an_encoder_to_a_language_model():
    model = architecture_of(QWEN3_VL_8B, "m")
    costs = EmulatedCosts(model, "dip-h800-64", Degrees(tensor=2), ("keep",))
    work = Workload((1024, 256))
    assert costs.stream_bytes("deepstack_1", work) == (1024 + 256) // 4 * 4096 * 2 // 2  # sequence parallel
    assert sum(len(module.emits) for module in costs.model_spec.modules) == 3
