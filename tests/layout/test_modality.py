"""The paper's rules for sizes and segments, and chunks that leave ranks even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost import StrategyCost
from pipeloom.errors import InputError
from pipeloom.layout import (
    ModulePlacement,
    even_layout,
    modality_placements,
    segment_counts,
    separate,
    sub_microbatch_size,
)
from tests.cases import ToyCosts, vlm_spec


class _Overhead(ToyCosts):
    """A constant of 3 ms and 1 ms a token for the whole module."""

    def chunk_costs(self, chunk, workload):
        return (StrategyCost("keep", 0.003 + 0.001 * workload.num_tokens, 0.0, 0),)


def test_the_smallest_size_that_keeps_95_percent():
    """Rate n / (3 + n): best of 1..57 is 0.95, and 0.95 of that needs n >= 27.8."""
    choice = sub_microbatch_size(_Overhead(vlm_spec()), "vision", 4, [1] * 57)
    assert choice.chosen == 28
    assert choice.seconds == pytest.approx(0.031)
    assert choice.efficiency[-1] == 1.0


def test_segments_are_in_proportion_and_within_the_layers():
    assert segment_counts({"a": 1.0, "b": 3.9, "c": 40.0}, {"a": 8, "b": 64, "c": 12}, 4) == {"a": 1, "b": 3, "c": 3}
    with pytest.raises(InputError, match="has 3 layers for 4 ranks"):
        segment_counts({"a": 1.0}, {"a": 3}, 4)


def test_placements_by_the_rules():
    """ToyCosts: time is tokens x layers x 3 ms, so one image is enough; 8 x 6 tokens against 4 x 3 give K = 4."""
    model = vlm_spec(4, 16)
    places = modality_placements(model, ToyCosts(model), 2, {"vision": [3, 3], "lm": [6]})
    assert places["vision"] == ModulePlacement(1, 1)
    assert places["lm"] == ModulePlacement(8, None)


@given(st.integers(1, 4), st.integers(4, 13), st.integers(4, 13), st.integers(1, 3), st.integers(1, 9))
def test_even_layouts_are_never_less_even(ranks, vision, lm, segments, weight):
    model = vlm_spec(vision, lm)
    segments = min(segments, vision // ranks, lm // ranks)
    if not segments:
        return
    places = {"vision": ModulePlacement(segments, 2), "lm": ModulePlacement(segments)}

    def load(module, layer):
        return weight * (3.0 if layer.kind == "merge" else 1.0) if module == "vision" else 2.0

    def worst(layout):
        sums = [0.0] * ranks
        for chunk in layout.chunks:
            layers = model.module(chunk.module).flat_layers[chunk.layers[0] : chunk.layers[1] + 1]
            sums[chunk.rank] += sum(load(chunk.module, layer) for layer in layers)
        return sum(s * s for s in sums)

    even = even_layout(model, ranks, places, load)
    plain = separate(model, ranks, places, load)
    assert worst(even) <= worst(plain) + 1e-6
    assert len(even.chunks) == len(plain.chunks)
    assert even.module("vision").sub_microbatch == 2
