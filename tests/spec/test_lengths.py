"""Lengths that a sample states for a module by its name."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.errors import InputError
from pipeloom.layout import separate
from pipeloom.packing import POLICIES, PackingSpec, Policy, budget_tokens, check_budget, pack, token_loads
from pipeloom.packing.choices import filled_microbatches, multiples
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


def generator() -> ModelSpec:
    """An image generator: its samples state a prompt, and the number of latents by `lengths`."""
    return ModelSpec("generator", (ModuleSpec("text", "text", LAYER), ModuleSpec("dit", "sequence", LAYER, ("text",))))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "exact"])
def test_they_count_in_the_token_budget(policy: Policy) -> None:
    model = generator()
    rows = [{"id": str(i), "text_tokens": 7, "lengths": {"text": [50], "dit": [900 - i]}} for i in range(8)]
    rows.append({"id": "plain", "text_tokens": 9})
    batch = batch_from_dicts(rows)
    assert budget_tokens(batch, model).tolist() == [900, 899, 898, 897, 896, 895, 894, 893, 9]
    packing = pack(batch, model, separate(model, 1, {}, lambda *_: 1.0), PackingSpec(1000, policy))
    for microbatch in packing.microbatches:
        assert sum(part.workload.num_tokens for part in microbatch.parts[-1]) <= 1000
    with pytest.raises(InputError, match=r"batch.samples\[0\] \('0'\): 900 tokens exceed the token budget of 899"):
        check_budget(batch, model, 899)


def test_samples_without_tokens_are_packed_in_every_way() -> None:
    loads = token_loads(batch_from_dicts([{"id": "a"}, {"id": "b"}]), generator())
    assert loads.tokens.tolist() == [0, 0]
    for packings in (multiples(loads, PackingSpec(8192)), filled_microbatches(loads, PackingSpec(8192))):
        found = list(packings)
        assert 1 <= len(found) <= 2
        assert all(sorted(i for members in groups for i in members) == [0, 1] for groups in found)


def test_samples_without_them_are_written_as_before() -> None:
    """Checkpoints hold digests of what is written."""
    assert b"lengths" not in msgspec.json.encode(Sample("a"))
    assert b'"lengths":{"words":[77]}' in msgspec.json.encode(Sample("a", lengths={"words": (77,)}))
