"""A bench on which one layer runs: its times and bytes under every memory strategy and a split backward.

All is done as the executor does it, on a device with its clock, with or without autocast.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.cost import StrategyMeasurement
from pipeloom.errors import InputError
from pipeloom.runtime.execute.blocks import ChunkActivation, kept_casts
from pipeloom.runtime.execute.memory import cast_leaf
from pipeloom.runtime.launch.device import moved, synchronise
from pipeloom.spec import Strategy


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is entered; what was made before, and views, do not count.

    Attributes
    ----------
    moments : list of int
        Bytes that lived at the end of each operation since `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[int] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the storages that it made."""
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.moments.append(self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes that live now."""
        self._made = {key: made for key, made in self._made.items() if not _is_gone(made[0])}
        return sum(size for _, size in self._made.values())

    @property
    def peak_bytes(self) -> int:
        """Most that lived at the end of any operation since `forget_peak`."""
        return max(self.moments, default=0)

    def forget_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.moments = [self.num_bytes]

    def beyond(self, num_bytes: int) -> tuple[int, ...]:
        """What lived at each moment beyond so much."""
        return tuple(live - num_bytes for live in self.moments)


def _is_gone(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Workbench:
    """A device on which one layer at a time is run as in training.

    Parameters
    ----------
    autocast : torch.dtype or None
        Precision of autocast regions; None: none.
    excluded : collection of Strategy
        Memory strategies under which the layers do not run; keeping everything is measured in place of them.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    excluded: Collection[Strategy] = ()

    def now_s(self) -> float:
        """Seconds on a clock, once the device has done what it was given."""
        synchronise(self.device)
        return time.perf_counter()

    def take(self, value: Any) -> Any:
        """An argument of a layer, on the device."""
        return moved(value, self.device)

    def region(self) -> AbstractContextManager[object]:
        """Around all measuring: casts of a layer's weights are kept from run to run, as in an iteration."""
        return kept_casts(self.device, self.autocast)

    def real(self, layer: nn.Module) -> nn.Module:
        """The layer; of one that has shapes alone (on ``meta``), a copy with random weights on the device."""
        if not any(parameter.is_meta for parameter in layer.parameters()):
            return layer
        layer = copy.deepcopy(layer)
        made: dict[int, nn.Parameter] = {}
        for part in layer.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.is_meta:
                    if id(parameter) not in made:
                        weights = torch.empty_like(parameter, device=self.device).normal_(std=_STD)
                        made[id(parameter)] = nn.Parameter(weights, parameter.requires_grad)
                    setattr(part, name, made[id(parameter)])
        for name, buffer in layer.named_buffers():
            if buffer.is_meta:
                raise InputError(f"buffer {name!r} of a {type(layer).__name__}", "is on meta", "compute it on the CPU")
        return layer

    def mount(self, layer: nn.Module) -> nn.Module:
        """The layer as training runs it, on the device."""
        layer.to(self.device)
        return layer if self.autocast is None else _UnderAutocast(layer, self.device.type, self.autocast)

    def unmount(self, layer: nn.Module) -> None:
        """Give the device's memory back: a pipeline's model need not fit on one device."""
        if self.device.type != "cpu" and not any(parameter.is_meta for parameter in layer.parameters()):
            layer.to("cpu")
        if self.autocast is not None:
            torch.clear_autocast_cache()

    def keeps(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves is kept for the whole iteration: a cast of a weight."""
        return self.autocast is not None and cast_leaf(tensor) != 0


class _UnderAutocast(nn.Module):
    """A layer in an autocast region, as `ChunkActivation` runs it."""

    def __init__(self, layer: Callable[..., Tensor], kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.kind, self.dtype = layer, kind, dtype

    def forward(self, *args: Any, **context: Any) -> Tensor:
        # Casts of inputs are not kept, nor those made without a graph.
        args = tuple(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in args)
        with torch.autocast(self.kind, self.dtype, cache_enabled=torch.is_grad_enabled()):
            return self.layer(*args, **context)


_WARM_UP = 2
_STD = 0.02
"""Of weights that a layer has none of, while it is measured."""


def measure_strategies(
    layer: Callable[..., Tensor],
    arguments: Sequence[Any],
    context: dict[str, Any],
    parameters: Sequence[Tensor],
    saved_arguments_bytes: int,
    repeats: int,
    bench: Workbench,
) -> StrategyMeasurement:
    """Time and count one layer; gradients of its parameters and arguments are overwritten.

    Parameters
    ----------
    arguments : sequence
        Of the layer; tensors that need a gradient are leaves.
    context : dict
        Keyword arguments, which all layers of the module share.
    saved_arguments_bytes : int
        Those of the arguments that autograd saves.
    repeats : int
        Timed runs after a warm-up; the median counts.
    bench : Workbench
        On which the layer is mounted.
    """
    runs = _Runs(layer, tuple(arguments), context, parameters, bench)
    seconds = [statistics.median(column) for column in zip(*runs.times(repeats), strict=True)]
    given = sum(x.nbytes for x in (*arguments, *context.values()) if isinstance(x, Tensor))
    work, selective, between = runs.count()
    return StrategyMeasurement(
        input_gradient_s=seconds[0],
        weight_gradient_s=seconds[1],
        weight_gradient_bytes=between,
        selective_forward_s=seconds[2],
        selective_backward_s=seconds[3],
        selective_bytes=selective,
        offload_s=seconds[4],
        load_s=seconds[5],
        given_bytes=given,
        unsaved_bytes=max(0, given - saved_arguments_bytes),
        workspace_bytes=max(max(0, *moments) for moments in work),
        forward_workspace_bytes=max(0, *work[0]),
        backward_workspace_bytes=max(0, *work[1]),
        forward_moments=work[0],
        backward_moments=work[1],
        weight_moments=work[2],
    )


def measure_forward(
    layer: Callable[..., Tensor], arguments: Sequence[Any], context: dict[str, Any]
) -> StrategyMeasurement:
    """The same of a layer through which no gradient flows: it holds nothing, but uses some while it runs."""
    with LiveBytes() as live, torch.no_grad():
        layer(*arguments, **context)
    given = sum(x.nbytes for x in (*arguments, *context.values()) if isinstance(x, Tensor))
    counted = {"workspace_bytes": live.peak_bytes, "forward_workspace_bytes": live.peak_bytes}
    # What it is given lives while it runs, though nobody saves it.
    counted |= {"given_bytes": given, "unsaved_bytes": given}
    numbers = [name for name in StrategyMeasurement.__struct_fields__ if not name.endswith("_moments")]
    return StrategyMeasurement(**dict.fromkeys(numbers, 0) | counted, forward_moments=live.beyond(0))


class _Runs:
    """One layer as a chunk of its own, run again and again."""

    def __init__(
        self,
        layer: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        context: dict[str, Any],
        parameters: Sequence[Tensor],
        bench: Workbench,
    ) -> None:
        self.layer, self.arguments, self.context, self.parameters = layer, arguments, context, parameters
        self.bench = bench
        activation, output = self.forward("keep")
        del activation
        self.gradient = torch.ones_like(output)

    def forward(self, strategy: Strategy) -> tuple[ChunkActivation, Tensor]:
        for argument in self.arguments:
            if isinstance(argument, Tensor):
                argument.grad = None
        strategy = "keep" if strategy in self.bench.excluded else strategy
        activation = ChunkActivation(self.bench.device, self.context, self.bench.autocast)
        return activation, activation.forward([self.layer], ((0, 1, strategy),), self.arguments, True)

    def times(self, repeats: int) -> list[tuple[float, ...]]:
        """Seconds of I, W, forward and backward under selective recomputation, moving out and back."""
        now = self.bench.now_s
        rows: list[tuple[float, ...]] = []
        for run in range(_WARM_UP + repeats):
            activation, _ = self.forward("keep")
            moments = [now()]
            activation.backward_input(self.gradient)
            moments.append(now())
            activation.backward_weight()
            moments.append(now())
            activation, _ = self.forward("selective")
            moments.append(now())
            activation.recompute()
            activation.backward(self.gradient)
            moments.append(now())
            activation, _ = self.forward("offload")
            moments.append(now())
            activation.offload()
            moments.append(now())
            activation.load()
            moments.append(now())
            activation.backward(self.gradient)
            if run >= _WARM_UP:
                spent = [after - before for before, after in itertools.pairwise(moments)]
                rows.append((spent[0], spent[1], spent[2], spent[3], spent[5], spent[6]))
        return rows

    def count(self) -> tuple[tuple[tuple[int, ...], ...], int, int]:
        """Moments of a forward, a whole backward and a W; bytes held under selective recomputation; between I and W."""
        # Gradients that are there already are added to, as in all microbatches but the first.
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with LiveBytes() as live:
            activation, output = self.forward("keep")
            del output
            allocated = live.num_bytes
            forward = live.beyond(allocated)
            live.forget_peak()
            activation.backward(self.gradient)
            backward = live.beyond(allocated)
            del activation
        with LiveBytes() as live:
            activation, output = self.forward("selective")
            del output
            selective = live.num_bytes
            activation.backward(self.gradient)
            del activation
        with LiveBytes() as live:
            activation, output = self.forward("keep")
            del output
            activation.backward_input(self.gradient)
            between = live.num_bytes
            live.forget_peak()
            activation.backward_weight()
            weights = live.beyond(between)
            del activation
        return (forward, backward, weights), selective, between
