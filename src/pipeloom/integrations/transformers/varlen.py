"""Attention within packed sequences by one kernel, where device, dtype and what is asked of it allow that."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[["Packed", Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys and values as tokens x heads x numbers; gives the same."""

_UNDERSTOOD = frozenset(
    ("dropout", "scaling", "sliding_window", "position_ids", "position_embeddings", "cache_position")
)
"""What changes no number, or is in the mask."""
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Packed:
    """Sequences of a pack, and what each of their tokens sees."""

    lengths: tuple[int, ...]
    causal: bool
    window: int | None = None
    """A token sees so many, itself included; None: all."""
    scale: float | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """How many tokens before and behind itself each sees; -1: all."""
        reach = -1 if self.window is None else self.window - 1
        return reach, 0 if self.causal else reach

    def ends(self, device: torch.device) -> Tensor:
        """Return where sequences begin, and where the last one ends."""
        return _ends(self.lengths, device)


@functools.lru_cache(maxsize=32)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # Every layer asks for it.
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def choose(query: Tensor, key: Tensor, value: Tensor, asked: dict[str, Any]) -> Kernel | None:
    """Return the kernel that attends; None: none can, sequences are attended one by one.

    Parameters
    ----------
    query, key, value : Tensor
        As the library's attention functions take them: 1 x heads x tokens x numbers.
    asked : dict
        What the model asks of attention beside that.
    """
    if query.device.type != "cuda" or query.dtype not in _HALVES:
        return None
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    width = query.shape[-1]
    if not width == key.shape[-1] == value.shape[-1] or width > 256 or width % 8:
        return None
    if any(value is not None and value is not False for name, value in asked.items() if name not in _UNDERSTOOD):
        return None
    if asked.get("dropout"):
        return None
    return _torch_kernel()


@functools.cache
def _torch_kernel() -> Kernel | None:
    """Torch's own, where it has windows and fewer heads of keys."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    call: Callable[..., Any] = varlen_attn
    if not {"window_size", "enable_gqa", "scale"} <= inspect.signature(call).parameters.keys():
        return None

    def kernel(packed: Packed, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ends, most = packed.ends(query.device), max(packed.lengths)
        out: Tensor = call(
            query,
            key,
            value,
            ends,
            ends,
            most,
            most,
            scale=packed.scale,
            window_size=packed.sides,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out

    return kernel


def attend(kernel: Kernel, packed: Packed, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by a kernel; takes what `choose` takes, gives 1 x tokens x heads x numbers."""
    return kernel(packed, *(state[0].transpose(0, 1) for state in (query, key, value)))[None]
