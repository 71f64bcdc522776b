"""Lengths that a sample states for a module by its name."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.errors import InputError
from pipeloom.layout import separate
from pipeloom.packing import PackingSpec, pack
from pipeloom.spec import LayerSpec, ModelSpec, ModuleSpec, Sample, TensorShape, batch_from_dicts

LAYER = (LayerSpec("layer", TensorShape(("tokens", 4))),)
MODEL = ModelSpec("model", (ModuleSpec("words", "sequence", LAYER), ModuleSpec("frames", "images", LAYER, ("words",))))
ROWS = [
    {"id": "a", "text_tokens": 5, "image_tokens": [3, 4], "lengths": {"words": [77], "frames": [10, 20]}},
    {"id": "b", "text_tokens": 6, "image_tokens": [2]},
]


def test_they_are_what_goes_through_the_module() -> None:
    batch = batch_from_dicts(ROWS)
    layout = separate(MODEL, 1, {}, lambda *_: 1.0)
    (microbatch,) = pack(batch, MODEL, layout, PackingSpec(1000, "first_fit")).microbatches
    words, frames = (tuple(n for part in parts for n in part.workload.lengths) for parts in microbatch.parts)
    assert words == (77, 8)
    assert frames == (10, 20, 2)


def test_as_many_as_the_sample_has_of_what_the_module_reads() -> None:
    sample = Sample("a", text_tokens=5, image_tokens=(3,), lengths={"frames": (10, 20)})
    with pytest.raises(InputError, match=r"sample 'a'.lengths\['frames'\]: has 2 entries, the sample 1 of images"):
        MODEL.module("frames").instance_lengths(sample)
    with pytest.raises(InputError, match="0 is below 1"):
        Sample("a", lengths={"words": (0,)})


def test_samples_without_them_are_written_as_before() -> None:
    """Checkpoints hold digests of what is written."""
    assert b"lengths" not in msgspec.json.encode(Sample("a"))
    assert b'"lengths":{"words":[77]}' in msgspec.json.encode(Sample("a", lengths={"words": (77,)}))
