"""One kernel for packed sequences: called as its definition says, and on a GPU the numbers of sample by sample."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.integrations.transformers import packed, varlen
from pipeloom.runtime.execute.blocks import ChunkActivation
from pipeloom.runtime.measure.workbench import LiveBytes

from . import tiny

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def by_definition(said: varlen.PackedSequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a kernel computes, from its arguments as kernels take them."""
    before, behind = said.sides
    ends, places = said.ends(query.device), torch.arange(len(query))
    sequence = torch.bucketize(places, ends[1:].long(), right=True)
    back = places[:, None] - places
    seen = sequence[:, None] == sequence
    seen &= (back <= before if before >= 0 else True) & (-back <= behind if behind >= 0 else True)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if said.scale is None else said.scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


MANY = [pytest.param(name, marks=pytest.mark.full) for name in ("mistral3", "qwen2_5_vl")]


@pytest.mark.parametrize("name", ["qwen3", *MANY])
def test_kernels_are_called_as_they_are_defined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, several queries to one of keys, encoders that tell lengths."""
    said: list[varlen.PackedSequences] = []

    def notes(*args: Any) -> Tensor:
        said.append(args[0])
        return by_definition(*args)

    monkeypatch.setattr(varlen, "choose", lambda *_: notes)
    model, batch = tiny.make(name)
    found = pl.check_gradients(model, batch, ranks=2, plans=2)
    assert found.worst < 1e-9, str(found)
    assert max(len(each.lengths) for each in said) > 1
    assert {each.causal for each in said} == ({True} if name == "qwen3" else {True, False})
    assert ({each.window for each in said} == {None, 3}) == (name == "qwen3")


def states(device: str, dtype: torch.dtype, heads: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, each, 50, 64) for each in (4, heads, heads)]
    return [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes]


def test_without_such_a_kernel_none_is_chosen() -> None:
    assert varlen.choose(*states("cpu", torch.bfloat16), {}) is None


@ON_GPU
def test_what_no_kernel_knows_is_left_to_the_library() -> None:
    given = states("cuda", torch.bfloat16)
    if varlen.choose(*given, {}) is None:
        pytest.skip("this torch has no such kernel, or the GPU is old")
    assert varlen.choose(*given, {"sliding_window": 3, "dropout": 0.0}) is not None
    assert varlen.choose(*given, {"softcap": 30.0}) is None
    assert varlen.choose(*given, {"dropout": 0.1}) is None
    assert varlen.choose(*states("cuda", torch.float32), {}) is None


class Module(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def test_an_older_kernel_without_grouped_queries_serves_attention_without_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch 2.11's function has no ``enable_gqa``."""

    def older(query: Tensor, *rest: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        assert len(rest) == 6
        return query * (scale or 1) + window_size[1]

    kernels = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(kernels, "varlen_attn", older)
    varlen.torch_kernel.cache_clear()
    try:
        assert varlen.torch_kernel(grouped=True) is None
        kernel = varlen.torch_kernel(grouped=False)
        assert kernel is not None
        ones = torch.ones(6, 2, 8)
        assert kernel(varlen.PackedSequences((4, 2), False, None, 3.0), ones, ones, ones).unique().tolist() == [2.0]
    finally:
        varlen.torch_kernel.cache_clear()


LENGTHS = [(5, 5, 5, 2, 2, 5), (3, 4), (6,), (1, 1, 1)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_sequences_of_equal_length_do_not_attend_to_each_other(
    lengths: tuple[int, ...], causal: bool, window: int | None
) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    found, _ = packed.attention(Module(), *given, packed.Mask(lengths, causal, window), scaling=0.3)
    said = varlen.PackedSequences(lengths, causal, window, 0.3)
    wanted = by_definition(said, *(each[0].transpose(0, 1) for each in given))[None]
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), given) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_windows_of_an_image_are_one_batch() -> None:
    """The number of operations, forward and backward, does not grow with the number of windows."""

    def operations(windows: int) -> int:
        given = [torch.ones(1, heads, 4 * windows, 8, requires_grad=True) for heads in (4, 2, 2)]
        with LiveBytes() as live:
            out, _ = packed.attention(Module(), *given, packed.Mask((4,) * windows, False), scaling=0.3)
            out.sum().backward()
        return len(live.moments)

    assert operations(50) == operations(5)


@ON_GPU
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_numbers_and_gradients_are_those_of_sample_by_sample(
    causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = states("cuda", torch.bfloat16, heads=2)
    if varlen.choose(*given, {}) is None:
        pytest.skip("this torch has no such kernel, or the GPU is old")
    mask = packed.Mask((17, 1, 32), causal, window)

    def run() -> list[Tensor]:
        out, _ = packed.attention(Module(), *given, mask, scaling=0.1)
        return [out, *torch.autograd.grad(out.float().square().sum(), given)]

    by_kernel = run()
    monkeypatch.setattr(varlen, "choose", lambda *_: None)
    for one, other in zip(by_kernel, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_selective_recomputation_keeps_the_results_of_the_kernel() -> None:
    kernels = pytest.importorskip("torch.nn.attention.varlen")
    if "window_size" not in inspect.signature(kernels.varlen_attn).parameters:
        pytest.skip("this torch has no such kernel")
    calls = 0

    def on_cpu(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return query + 1, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([0, len(x)], dtype=torch.int32)
            out: Tensor = kernels.varlen_attn(x * 1, x * 1, x * 1, ends, ends, len(x), len(x))
            return out

    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", on_cpu, "CPU")
        activation = ChunkActivation(torch.device("cpu"), {}, None)
        activation.forward([Attention()], ((0, 1, "selective"),), (torch.ones(3, 2, 8, requires_grad=True),), True)
        assert calls == 1
        activation.recompute()
    assert calls == 1
