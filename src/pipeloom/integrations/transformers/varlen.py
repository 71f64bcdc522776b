"""Attention within packed sequences by one kernel, if device, dtype and options allow it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[["PackedSequences", Tensor, Tensor, Tensor], Tensor]
"""Maps queries, keys and values of shape (tokens, heads, width) to outputs of the same shape."""

_HARMLESS = frozenset(("dropout", "scaling", "sliding_window", "position_ids", "position_embeddings", "cache_position"))
"""Options that do not change the result, or that are part of the mask."""
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of a pack, and which tokens each token attends to."""

    lengths: tuple[int, ...]
    causal: bool
    window: int | None = None
    """Tokens that each token attends to, including itself. None for all."""
    scale: float | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Tokens before and after itself that each token attends to; -1 for all."""
        reach = -1 if self.window is None else self.window - 1
        return reach, 0 if self.causal else reach

    def ends(self, device: torch.device) -> Tensor:
        """Return the first position of each sequence, and the end of the last one."""
        return _ends(self.lengths, device)


@functools.lru_cache(maxsize=32)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # Cached, because each layer calls it.
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def choose(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Kernel | None:
    """Return the kernel, or None if sequences must be attended one by one.

    Queries, keys and values have the shape (1, heads, tokens, width). ``options`` are those of the model's attention.
    """
    if query.device.type != "cuda" or query.dtype not in _HALVES:
        return None
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    width = query.shape[-1]
    if not width == key.shape[-1] == value.shape[-1] or width > 256 or width % 8:
        return None
    if any(value is not None and value is not False for name, value in options.items() if name not in _HARMLESS):
        return None
    if options.get("dropout"):
        return None
    return torch_kernel(grouped=query.shape[1] != key.shape[1])


@functools.cache
def torch_kernel(*, grouped: bool) -> Kernel | None:
    """Return torch's kernel, if this version supports windows and, if ``grouped``, grouped-query attention.

    PyTorch 2.11 has windows, PyTorch 2.12 also has grouped-query attention. The blocks of image encoders need none.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    call: Callable[..., Any] = varlen_attn
    more = {"enable_gqa": True} if grouped else {}
    if not {"window_size", "scale", *more} <= inspect.signature(call).parameters.keys():
        return None

    def kernel(packed: PackedSequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ends, most = packed.ends(query.device), max(packed.lengths)
        out: Tensor = call(
            query, key, value, ends, ends, most, most, scale=packed.scale, window_size=packed.sides, **more
        )
        return out

    return kernel


def attend(kernel: Kernel, packed: PackedSequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with a kernel. Inputs are as in `choose`; the output has shape (1, tokens, heads, width).

    The output has the strides of the query, and a part of a fused projection holds all of it. So inputs are copied
    unless they are contiguous.
    """
    return kernel(packed, *(state[0].transpose(0, 1).contiguous() for state in (query, key, value)))[None]
