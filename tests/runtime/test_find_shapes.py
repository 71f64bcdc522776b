"""Shapes that a model does not state are found from a few samples, and checked like stated ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime import Emit, Model, Module, find_shapes, run_undivided, with_shapes
from pipeloom.spec import Batch, Sample
from tests.runtime.small_models import described, small_documents, streaming_model


def without_shapes(model: Model) -> Model:
    modules = [
        replace(m, hidden=None, output=None, emits={i: dict.fromkeys(s) for i, s in m.emits.items()})
        for m in model.modules
    ]
    return replace(model, modules=modules)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_what_could_be_stated(seed: int) -> None:
    rng = random.Random(seed)
    model = streaming_model(rng, frozen=False)
    documents = small_documents(rng, 8, with_images=True)
    bare = without_shapes(model)
    assert bare.undeclared == "vision"
    found = find_shapes(bare, documents, described(documents).samples)
    assert found.spec == model.spec
    assert with_shapes(bare, found.spec).spec == model.spec
    assert find_shapes(model, (), ()) is model


class Patches(nn.Module):
    """Merges four tokens into one, and emits one row an instance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)

    def forward(self, x: Tensor, *, lengths: tuple[int, ...]) -> Emit:
        means = torch.stack([part.mean(0) for part in x.split(lengths)])
        return Emit(self.inner(x.view(-1, 12)), {"means": means})


class Take(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x: Tensor, *, lengths: tuple[int, ...], means: Tensor) -> Tensor:
        return x + self.inner(means).sum(0)


def merging() -> Model:
    module = Module(
        "lm",
        [Patches(), Take()],
        reads="sequence",
        inputs=lambda part: torch.cat([part.samples[i] for i, _ in part.instances]),
        context=lambda part: {"lengths": tuple(len(part.samples[i]) for i, _ in part.instances)},
        emits={0: {"means": None}},
        takes={1: ("means",)},
    )
    return Model([module], lambda output, part: output.float().sum(), len)


SAMPLES = [torch.randn(n, 3) for n in (8, 4, 12)]
SIZES = [Sample(str(i), len(x)) for i, x in enumerate(SAMPLES)]


def test_parts_of_tokens_and_instances_are_distinguished() -> None:
    (lm,) = find_shapes(merging(), SAMPLES, SIZES).spec.modules
    assert [layer.output.dims for layer in lm.layers] == [("tokens/4", 5), ("tokens/4", 5)]
    assert [(end.stream, end.output.dims) for end in lm.emits] == [("means", ("instances", 3))]


@pytest.mark.parametrize(
    ("weights", "autocast", "wanted"),
    [
        (torch.float32, None, "float32"),
        (torch.float32, torch.bfloat16, "bfloat16"),
        (torch.bfloat16, None, "bfloat16"),
        (torch.float64, None, "float64"),
    ],
)
def test_dtypes_follow_from_weights_and_autocast(weights: torch.dtype, autocast: Any, wanted: str) -> None:
    model = merging()
    for layer in model.modules[0].layers:
        layer.to(weights)
    found = find_shapes(model, [sample.to(weights) for sample in SAMPLES], SIZES, autocast=autocast)
    assert [layer.output.dtype for layer in found.spec.modules[0].layers][:1] == [wanted]


def test_one_sample_is_enough_where_rows_grow() -> None:
    (lm,) = find_shapes(merging(), SAMPLES[:1], SIZES[:1]).spec.modules
    assert lm.layers[0].output.dims == ("tokens/4", 5)


def test_dropout_falls_as_if_nothing_had_run() -> None:
    class Drops(Take):
        def forward(self, x: Tensor, *, lengths: tuple[int, ...], means: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x, lengths=lengths, means=means))

    (lm,) = merging().modules
    model = replace(merging(), modules=[replace(lm, layers=[Patches(), Drops()])])
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    find_shapes(model, SAMPLES, SIZES)
    assert torch.equal(torch.rand(2), wanted)


def test_a_model_without_shapes_says_how_to_find_them() -> None:
    with pytest.raises(InputError, match=r"module 'lm': has no declared shape; give `hidden`.*find_shapes"):
        run_undivided(merging(), Batch(tuple(SIZES)), SAMPLES)


def test_an_extent_that_follows_from_nothing_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
            return x[: len(x) // 3 + 3]

    (lm,) = merging().modules
    model = replace(merging(), modules=[replace(lm, layers=[Odd(), Odd()], emits={}, takes={})])
    with pytest.raises(
        InputError, match=r"module 'lm', layer 0: dimension 0 is 4 for lengths \[4\] and 11 for lengths"
    ):
        find_shapes(model, SAMPLES, SIZES)


def test_a_stream_that_is_never_emitted_is_named() -> None:
    class Silent(Patches):
        def forward(self, x: Tensor, *, lengths: tuple[int, ...]) -> Any:
            return super().forward(x, lengths=lengths).output

    (lm,) = merging().modules
    model = replace(merging(), modules=[replace(lm, layers=[Silent(), Take()])])
    with pytest.raises(InputError, match=r"module 'lm'.emits\[0\]: declares means, the layer emitted none"):
        find_shapes(model, SAMPLES, SIZES)


def test_a_module_without_work_is_named() -> None:
    model = without_shapes(streaming_model(random.Random(0), frozen=False))
    documents = small_documents(random.Random(0), 3, with_images=False)
    with pytest.raises(InputError, match="module 'vision': has no work in the 3 samples"):
        find_shapes(model, documents, described(documents).samples)
