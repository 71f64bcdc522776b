"""Packed sequences: attention within each sequence, and the arguments of blocks as a layer's context."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeloom.errors import InputError, PipeloomError
from pipeloom.integrations.transformers import varlen
from pipeloom.integrations.transformers.hollow import Arguments, running

ATTENTION = "pipeloom"
"""Name under which the attention of packed sequences is registered with the library."""
EAGER = "pipeloom_eager"
"""The same for models whose own attention function has additional terms, such as sinks."""
LENGTHS = "pipeloom_flash"
"""The same for encoders that would otherwise build a mask over all pairs of patches. The library passes sequence
lengths instead if the name contains ``flash``."""


@dataclass(frozen=True)
class Mask(varlen.PackedSequences):
    """Attention mask of packed sequences: each sequence attends only to itself, under the library's own mask."""

    blocks: tuple[Tensor, ...] = ()
    """The mask of each sequence, if ``causal`` and ``window`` cannot describe it."""


def register() -> None:
    """Register the attention and the masks of packed sequences with the library. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention)
    AttentionInterface.register(LENGTHS, attention)
    AttentionInterface.register(EAGER, eager_attention)
    AttentionMaskInterface.register(ATTENTION, make_mask)
    AttentionMaskInterface.register(EAGER, make_eager_mask)


def make_mask(**options: Any) -> Any:
    """Return a `Mask` if sequences are packed, else the library's own mask."""
    from transformers.masking_utils import sdpa_mask

    now = running()
    if now is None:
        return sdpa_mask(**options)
    if now.lengths is None:
        return None
    window = _window(options)
    if options.get("allow_is_causal_skip"):
        return Mask(now.lengths, True, window)
    if options.get("allow_is_bidirectional_skip") and window is None:
        return Mask(now.lengths, False)
    return _inner_masks(sdpa_mask, now.lengths, options)


def make_eager_mask(**options: Any) -> Any:
    """As `make_mask`, in the form that the models' own attention functions take."""
    from transformers.masking_utils import eager_mask

    now = running()
    if now is None:
        return eager_mask(**options)
    _window(options)
    return None if now.lengths is None else _inner_masks(eager_mask, now.lengths, options)


def _window(options: dict[str, Any]) -> int | None:
    """Return the number of tokens that each token attends to, or None for all."""
    window: int | None = options.get("local_size")
    if window is not None and window != getattr(options.get("config"), "sliding_window", None):
        # The boundaries of chunks depend on the position of the sequence in the pack.
        raise InputError("model", f"has attention in chunks of {window} tokens", "it cannot be packed")
    return window


def _inner_masks(make: Callable[..., Tensor], lengths: tuple[int, ...], options: dict[str, Any]) -> Mask:
    blocks, begin = [], 0
    options |= {"attention_mask": None, "allow_is_bidirectional_skip": False}
    for length in lengths:
        inside = {"q_length": length, "kv_length": length, "q_offset": begin, "kv_offset": begin}
        blocks.append(make(**options | inside))
        begin += length
    return Mask(lengths, False, blocks=tuple(blocks))


def eager_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend within each packed sequence with the model's own attention function."""
    inner = sys.modules[type(module).__module__].eager_attention_forward
    return _attend(inner, module, (query, key, value), attention_mask, kwargs)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend within each packed sequence. Unpacked inputs take the library's own path."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attention_mask = _as_mask(module, attention_mask, kwargs)
    if isinstance(attention_mask, Mask) and not attention_mask.blocks:
        options = {name: value for name, value in kwargs.items() if name != "is_causal"}
        kernel = varlen.choose(query, key, value, options)
        if kernel is not None:
            _check(attention_mask, query)
            packed = replace(attention_mask, scale=kwargs.get("scaling"))
            return varlen.attend(kernel, packed, query, key, value), None
    return _attend(sdpa_attention_forward, module, (query, key, value), attention_mask, kwargs)


def _as_mask(module: torch.nn.Module, mask: Any, kwargs: dict[str, Any]) -> Any:
    """Return the mask, built from sequence lengths if an encoder passes these instead."""
    ends = kwargs.pop("cu_seq_lens_q", None)
    if ends is None or mask is not None:
        return mask
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
    return Mask(tuple(torch.diff(ends).tolist()), causal)


def _check(mask: Mask, query: Tensor) -> None:
    if sum(mask.lengths) != query.shape[2] or len(query) != 1:
        raise PipeloomError(f"attention gets a query of shape {tuple(query.shape)} for {mask.lengths} tokens")


def _attend(
    inner: Callable[..., Any], module: torch.nn.Module, states: Sequence[Tensor], mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Any]:
    if not isinstance(mask, Mask):
        out: tuple[Tensor, Any] = inner(module, *states, mask, **kwargs)
        return out
    query = states[0]
    _check(mask, query)
    kwargs.pop("is_causal", None)
    # Neighbors of equal length, such as the windows of an image, are one batch.
    runs = [(length, len(list(same))) for length, same in itertools.groupby(mask.lengths)]
    if mask.blocks:
        runs = [(length, 1) for length in mask.lengths]
    # Not slices: the backward of each slice writes a tensor of all tokens.
    pieces = [torch.split(state, [length * count for length, count in runs], dim=2) for state in states]
    outputs = []
    for number, ((length, count), each) in enumerate(zip(runs, zip(*pieces, strict=True), strict=True)):
        masked = mask.blocks[number] if mask.blocks else _inside(mask, length, query.device)
        batch = (piece[0].unflatten(1, (count, length)).transpose(0, 1) for piece in each)
        output, _ = inner(module, *batch, masked, is_causal=mask.causal, **kwargs)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None], None


def _inside(mask: Mask, length: int, device: torch.device) -> Tensor | None:
    """Return the mask within sequences of one length, or None if ``mask.causal`` describes it."""
    if mask.window is None or mask.window >= length:
        return None
    places = torch.arange(length, device=device)
    back = places[:, None] - places
    return ((back < mask.window) & (back >= 0 if mask.causal else back > -mask.window))[None, None]


# ------------------------------------------------------------------ arguments as context


@dataclass(frozen=True)
class Slot:
    """Placeholder of a tensor in `Calls`."""

    name: str


@dataclass(frozen=True)
class OnHost:
    """A tensor that stays on the host, because the host reads it."""

    tensor: Tensor


@dataclass(frozen=True)
class Calls:
    """Arguments of the blocks of a module and of its own forward pass, with each tensor replaced by a `Slot`."""

    blocks: tuple[Any, ...]
    outer: Any

    def block(self, place: int, tensors: dict[str, Tensor]) -> Any:
        """Return the arguments of a block except the hidden state. None for a block that is left out."""
        found: Arguments | None = _filled(self.blocks[place], tensors)
        return found

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the module's own forward pass."""
        found: dict[str, Any] = _filled(self.outer, tensors)
        return found


def as_context(blocks: Sequence[Arguments], outer: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of blocks as a layer's context: each tensor once, and `Calls` that refer to it."""
    found = as_contexts([(blocks, outer)])
    return found | {"calls": found["calls"][0]}


def as_contexts(each: Sequence[tuple[Sequence[Arguments | None], dict[str, Any]]]) -> dict[str, Any]:
    """Return the context of several calls, each with its own `Calls`. A block that is left out has no arguments."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    calls = tuple(
        Calls(tuple(_emptied(block, tensors) for block in blocks), _emptied(_indices_on_host(outer), tensors))
        for blocks, outer in each
    )
    return {"calls": calls, **dict(tensors.values())}


def _indices_on_host(outer: dict[str, Any]) -> dict[str, Any]:
    values = outer.get("values", {})
    kept = {
        name: OnHost(value) if isinstance(value, Tensor) and not value.is_floating_point() else value
        for name, value in values.items()
    }
    return {**outer, "values": kept}


def _emptied(value: Any, tensors: dict[int, tuple[str, Tensor]]) -> Any:
    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            name, _ = tensors.setdefault(id(leaf), (f"t{len(tensors)}", leaf))
            return Slot(name)
        return replace(leaf, blocks=_emptied(leaf.blocks, tensors)) if isinstance(leaf, Mask) else leaf

    return tree_map(empty, value)


def _filled(value: Any, tensors: dict[str, Tensor]) -> Any:
    # By hand, because each call of each block does this, and torch's own function takes several times as long.
    if isinstance(value, Slot):
        return tensors[value.name]
    if isinstance(value, OnHost):
        return value.tensor
    if isinstance(value, Mask):
        return replace(value, blocks=_filled(value.blocks, tensors)) if value.blocks else value
    if isinstance(value, dict):
        return {key: _filled(each, tensors) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple([_filled(each, tensors) for each in value])
    return [_filled(each, tensors) for each in value] if isinstance(value, list) else value
