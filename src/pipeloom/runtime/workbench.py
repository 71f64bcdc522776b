"""Where layers are measured: a device and its clock, with or without autocast."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.runtime.blocks import kept_casts
from pipeloom.runtime.device import synchronise
from pipeloom.runtime.memory import cast_leaf


@dataclass(frozen=True)
class Workbench:
    """A device on which one layer at a time is run as in training.

    Parameters
    ----------
    device : torch.device
    autocast : torch.dtype or None
        Precision of autocast regions; None: none.
    """

    device: torch.device
    autocast: torch.dtype | None = None

    def now_s(self) -> float:
        """Seconds on a clock, once the device has done what it was given."""
        synchronise(self.device)
        return time.perf_counter()

    def take(self, value: Any) -> Any:
        """An argument of a layer, on the device."""
        return value.to(self.device) if isinstance(value, Tensor) else value

    def region(self) -> AbstractContextManager[object]:
        """Around all measuring: casts of a layer's weights are kept from run to run, as in an iteration."""
        return kept_casts(self.device, self.autocast)

    def mount(self, layer: nn.Module) -> nn.Module:
        """The layer as training runs it, on the device."""
        layer.to(self.device)
        return layer if self.autocast is None else _UnderAutocast(layer, self.device.type, self.autocast)

    def unmount(self, layer: nn.Module) -> None:
        """Give the device's memory back: a pipeline's model need not fit on one device."""
        if self.device.type != "cpu":
            layer.to("cpu")
        if self.autocast is not None:
            torch.clear_autocast_cache()

    def keeps(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves is kept for the whole iteration: a cast of a weight."""
        return self.autocast is not None and cast_leaf(tensor) != 0


class _UnderAutocast(nn.Module):
    """A layer in an autocast region, as `Passage` runs it."""

    def __init__(self, layer: Callable[..., Tensor], kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.kind, self.dtype = layer, kind, dtype

    def forward(self, *args: Any, **context: Any) -> Tensor:
        # Casts of inputs are not kept, nor those made without a graph.
        args = tuple(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in args)
        with torch.autocast(self.kind, self.dtype, cache_enabled=torch.is_grad_enabled()):
            return self.layer(*args, **context)
