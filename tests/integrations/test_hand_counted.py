"""Hand-counted models: published parameter counts come out, and windows, streams and kinds of layers are right."""

from __future__ import annotations

import pytest

from pipeloom.emulator import count_parameters
from pipeloom.spec.architecture import AttentionMixer, ResidualLayer
from tests.integrations.hand_counted import architecture_of
from tests.integrations.hand_counted.families import FAMILIES
from tests.integrations.published import (
    BAMBA_9B,
    GEMMA_3_4B,
    LLAVA_7B,
    NEMOTRON_H_8B,
    PUBLISHED,
    QWEN2_5_VL_7B,
    QWEN2_VL_7B,
    QWEN3_30B_A3B,
    QWEN3_VL_8B,
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    config, published = PUBLISHED[name]
    assert count_parameters(architecture_of(config, "m")) == published


def test_modules_and_what_they_read():
    model = architecture_of(QWEN2_VL_7B, "")
    assert model.name == "qwen2_vl"
    assert [(m.name, m.reads, m.after) for m in model.modules] == [
        ("vision", "images", ()),
        ("lm", "sequence", ("vision",)),
    ]
    assert [m.name for m in architecture_of(QWEN3_30B_A3B, "x").modules] == ["lm"]


def test_what_nothing_runs_is_counted_and_not_run():
    vision = architecture_of(LLAVA_7B, "x").modules[0]
    # The last of 24 blocks, and the norm behind them.
    assert len(vision.flat_layers) == 1 + 23 + 1
    assert [type(layer).__name__ for layer in vision.unused] == ["ResidualLayer", "AdapterLayer"]


def windows(config, module):
    """The window of every block's attention."""
    found = [layer.mixers[0] for layer in architecture_of(config, "x").module(module).flat_layers[1:-1]]
    return [mixer.window if isinstance(mixer, AttentionMixer) else "" for mixer in found]


def test_windows():
    seen = windows(QWEN2_5_VL_7B, "vision")
    assert [i for i, window in enumerate(seen) if window is None] == [7, 15, 23, 31]
    assert set(seen) == {64, None}
    assert windows(GEMMA_3_4B, "lm") == [None if (i + 1) % 6 == 0 else 1024 for i in range(34)]
    mistral = {"model_type": "mistral", "num_hidden_layers": 2}
    assert windows(mistral, "lm") == [4096] * 2
    assert windows(mistral | {"sliding_window": None}, "lm") == [None] * 2
    assert [i for i, mixer in enumerate(windows(BAMBA_9B, "lm")) if mixer is None] == [9, 18, 27]


def test_layers_that_are_not_alike_stay_apart_and_equal_ones_are_one_entry():
    lm = architecture_of(NEMOTRON_H_8B, "x").module("lm")
    blocks = [layer for layer in lm.layers if isinstance(layer, ResidualLayer)]
    assert sum(layer.count for layer in blocks) == 52
    assert len(set(blocks)) == 3
    assert [layer.count for layer in architecture_of(QWEN3_30B_A3B, "x").modules[0].layers[1:-1]] == [48]


def test_streams_of_inner_features():
    model = architecture_of(QWEN3_VL_8B, "x")
    vision, lm = model.modules
    assert [(end.stream, end.layer) for end in vision.emits] == [
        ("deepstack_0", 9),
        ("deepstack_1", 17),
        ("deepstack_2", 25),
    ]
    assert [(end.stream, end.layer) for end in lm.takes] == [("deepstack_0", 1), ("deepstack_1", 2), ("deepstack_2", 3)]


def test_every_family_reads_a_config_that_leaves_all_out():
    # The library's own defaults of Gemma 3 have fewer patches than tokens: a model that it makes and cannot run.
    images = {"gemma3": {"vision_config": {"image_size": 896}}}
    for kind in FAMILIES:
        assert count_parameters(architecture_of({"model_type": kind} | images.get(kind, {}), "")) > 10**8
