"""A user's sample batch at several sizes, and a copy of his model without memory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.fitting import error_line

Call = Callable[[], Any]

_KEPT = 1 << 20
"""Buffers with at most this many numbers keep them: positions, masks and tables that code may read."""
_SEQUENCE = 8
"""Integers for each sample that are a sequence; fewer are sizes, such as the grid of an image."""


@dataclass(frozen=True)
class SizedBatch:
    """A batch with its number of samples and the length of its sequences.

    Attributes
    ----------
    length : int or None
        None: it has no sequences whose length may vary.
    first : bool
        Whether samples are dimension 0 and places in sequences dimension 1, rather than the other way round.
    copies : int
        How often it repeats the samples of a user's batch.
    number : int
        Place of this batch among the user's.
    """

    batch: Any
    count: int
    length: int | None
    first: bool = True
    copies: int = 1
    number: int = 0


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, in bfloat16 as trainers keep weights. The model is not changed."""
    memo: dict[int, Any] = {}
    held = [*model.parameters(), *model.buffers()]
    if not any(isinstance(each, nn.Parameter) for each in held):
        raise InputError("model", "has no parameters", "build its layers in __init__")
    for each in held:
        dtype = torch.bfloat16 if each.is_floating_point() else each.dtype
        if isinstance(each, nn.Parameter):
            new = torch.empty_like(each, dtype=dtype, device="meta")
            memo[id(each)] = nn.Parameter(new, requires_grad=new.is_floating_point())
        elif each.numel() > _KEPT or each.is_meta:
            memo[id(each)] = torch.empty_like(each, dtype=dtype, device="meta")
        else:
            memo[id(each)] = each.detach().to("cpu", dtype, copy=True)
    try:
        return copy.deepcopy(model, memo).train()
    except Exception as error:
        remedy = "keep processes, files and locks out of its attributes"
        raise InputError("model", f"cannot be copied: {error_line(error)}", remedy) from error


def without_numbers(batch: Any) -> Any:
    """Return a batch whose floating-point tensors are on meta in bfloat16. Ids, masks and places keep their numbers."""

    def change(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if each.is_floating_point():
            return torch.empty(each.shape, dtype=torch.bfloat16, device="meta")
        return each.detach().cpu() if not each.is_meta else torch.zeros(each.shape, dtype=each.dtype)

    return tree_map(change, batch)


def call_of(model: nn.Module, batch: Any) -> Call:
    """Return the call of a model on a batch: a dictionary has keyword arguments, a tuple positional ones."""
    taken = inspect.signature(model.forward).parameters
    if isinstance(batch, Mapping):
        any_name = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        needed = [
            n for n, p in taken.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        unknown = [name for name in batch if name not in taken and not any_name]
        if unknown and len(needed) == 1 and needed[0] not in batch:
            return partial(model, batch)  # the forward pass takes the batch as it is
        lacks = [name for name in needed if name not in batch]
        if lacks or unknown:
            problem = f"lacks {lacks[0]!r}, which" if lacks else f"has {unknown[0]!r}, which no argument of"
            tail = "the forward pass needs" if lacks else "the forward pass takes"
            raise InputError("batch", f"{problem} {tail}", f"its arguments are {', '.join(taken)}")
        return partial(model, **batch)
    args = tuple(batch) if isinstance(batch, tuple) else (batch,)
    try:
        inspect.signature(model.forward).bind(*args)
    except TypeError as error:
        text = str(error)
        raise InputError("batch", f"does not suit the forward pass: {text}", f"give {', '.join(taken)}") from error
    return partial(model, *args)


def sized(batch: Any, *, first: bool = True) -> SizedBatch:
    """Return a batch with its number of samples and the length of its sequences.

    The length is dimension 1 of the first integer tensor that has one, or else of the first tensor of states. If not
    ``first``, samples are dimension 1 and the length is dimension 0.
    """
    tensors = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim()]
    if not tensors:
        raise InputError("batch", "has no tensor", "give what you pass to the model, such as a dictionary of tensors")
    empty = next((each for each in tensors if not each.numel()), None)
    if empty is not None:
        raise InputError("batch", f"has an empty tensor of shape {tuple(empty.shape)}", "give at least one sample")
    known = without_numbers(batch)
    ids = [t for t in tensors if not t.is_floating_point() and t.dim() >= 2]
    states = [t for t in tensors if t.is_floating_point() and t.dim() == 3]
    sequences = next(iter([*ids, *states]), None)
    if sequences is None:
        return SizedBatch(known, tensors[0].shape[0], None)
    count, length = sequences.shape[:2] if first else sequences.shape[1::-1]
    return SizedBatch(known, int(count), int(length), first)


def forms(batches: Sequence[SizedBatch]) -> Iterator[list[SizedBatch]]:
    """Yield lists of sizes, on which counts are fitted, in the order in which they are tried.

    Each ends with the batches themselves, the largest of them last, on which counts are checked. A batch of one sample
    is repeated, because PyTorch needs fewer copies of it than of several. First come shorter
    sequences; then multiples of 256 tokens, for experts and scans that run whole chunks; then longer ones, which keep
    the places of images; and last other numbers of samples alone.
    """
    batches = [_resized(each, 2, each.length) if each.count == 1 else each for each in batches]
    ordered = sorted(batches, key=lambda each: sum(t.numel() for t in tree_leaves(each.batch) if isinstance(t, Tensor)))
    most = ordered[-1]
    n = most.length
    if n is not None:
        for lengths in _lengths(n):
            made = [(1, lengths[0]), (2, lengths[1]), (1, lengths[1]), (1, lengths[2]), (3, lengths[2])]
            yield [*(_resized(most, copies, length) for copies, length in made), *ordered]
    yield [*(_resized(most, copies, n) for copies in (2, 3)), *ordered]
    if len(ordered) > 1:
        yield ordered


def _lengths(n: int) -> list[tuple[int, int, int]]:
    """Return three lengths for every way of changing sequences of ``n`` tokens."""
    step = 64 if n >= 512 else 1
    shorter = tuple(sorted({max(1, n * share // (4 * step)) * step for share in (1, 2, 3)} - {n}))
    base = (n // 256 + 1) * 256  # another length than n, so that there are four
    found = [(base, base + 256, base + 512), (n + max(1, n // 4), n + max(2, n // 2), 2 * n)]
    return ([(shorter[2], shorter[1], shorter[0])] if len(shorter) == 3 else []) + found


def _resized(size: SizedBatch, copies: int, length: int | None) -> SizedBatch:
    """Return a batch with ``copies`` times the samples, cut or extended to ``length`` tokens."""
    axis_of_samples = 0 if size.first else 1

    def change(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.dim():
            return each
        if size.length is not None and length is not None and length != size.length:
            for axis in _length_axes(each, size.length, first=size.first):
                # Other sequences, such as those of a decoder, change in proportion.
                extent = max(1, each.shape[axis] * length // size.length)
                places = torch.arange(extent).clamp(max=each.shape[axis] - 1)
                each = _with_extent(each, axis, extent) if each.is_meta else each.index_select(axis, places)
        if copies > 1 and each.dim() > axis_of_samples:
            many = [1] * each.dim()
            many[axis_of_samples] = copies
            extent = copies * each.shape[axis_of_samples]
            each = _with_extent(each, axis_of_samples, extent) if each.is_meta else each.repeat(many)
        return each

    return replace(
        size, batch=tree_map(change, size.batch), count=copies * size.count, length=length, copies=copies * size.copies
    )


def _with_extent(tensor: Tensor, axis: int, extent: int) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] = extent
    return tensor.new_empty(shape)


def _length_axes(tensor: Tensor, length: int, *, first: bool) -> list[int]:
    """Return the dimensions that are as long as the sequences. The last one of a state is its width."""
    last = tensor.dim() - 1
    if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[int(first)] >= _SEQUENCE:
        return [int(first)]
    axes = [axis for axis in range(tensor.dim()) if tensor.shape[axis] == length and (axis > 0) == (first or last == 0)]
    is_mask = last >= 1 and tensor.shape[last] == tensor.shape[last - 1]
    if tensor.is_floating_point() and tensor.dim() > 2 and not is_mask:
        axes = [axis for axis in axes if axis != last]
    return axes
