"""A workbench for one layer: times and bytes under every memory strategy and a split backward.

Layers run as in the executor, on a device with its clock, with or without autocast.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.cost import StrategyMeasurement
from pipeloom.errors import InputError
from pipeloom.runtime.execute.blocks import ChunkActivation
from pipeloom.runtime.execute.memory import cast_leaf
from pipeloom.runtime.launch.accelerator import synchronize
from pipeloom.spec import Strategy


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages created within this context. Earlier ones and views do not count.

    ``moments`` has the live bytes at the end of each operation since `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[int] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record its new storages."""
        earlier = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in earlier:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.moments.append(self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes that are live now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._made.values())

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes at the end of an operation since `forget_peak`."""
        return max(self.moments, default=0)

    def forget_peak(self) -> None:
        """Reset the peak."""
        self.moments = [self.num_bytes]

    def beyond(self, num_bytes: int) -> tuple[int, ...]:
        """Return the live bytes at each moment minus ``num_bytes``."""
        return tuple(live - num_bytes for live in self.moments)


@dataclass(frozen=True)
class Workbench:
    """A device on which one layer at a time runs as in training."""

    device: torch.device
    autocast: torch.dtype | None = None
    """Precision of autocast regions. None uses no autocast."""
    excluded: Collection[Strategy] = ()
    """Memory strategies with which the layers do not run. Keeping everything is measured instead."""

    def now_s(self) -> float:
        """Return seconds on a clock once the device has finished all enqueued work."""
        synchronize(self.device)
        return time.perf_counter()

    def real(self, layer: nn.Module) -> nn.Module:
        """Return the layer, or a copy with random weights on the device if it is on ``meta``."""
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
        """Return the layer on the device as it runs in training."""
        layer.to(self.device)
        return layer if self.autocast is None else _UnderAutocast(layer, self.device.type, self.autocast)

    def home(self, layer: nn.Module) -> torch.device | None:
        """Return the device of a layer that is to be mounted, or None for one that `real` copies."""
        tensors = [*layer.parameters(), *layer.buffers()]
        return None if not tensors or any(tensor.is_meta for tensor in tensors) else tensors[0].device

    def unmount(self, layer: nn.Module, home: torch.device | None) -> None:
        """Move a layer back to where it was, because the model of a pipeline need not fit on one device."""
        if home is not None:
            layer.to(home)
        if self.autocast is not None:
            torch.clear_autocast_cache()

    def keeps(self, tensor: Tensor) -> bool:
        """Return whether a tensor saved by autograd is kept for the whole iteration as a cast of a weight."""
        return self.autocast is not None and cast_leaf(tensor) != 0


class _UnderAutocast(nn.Module):
    """A layer in an autocast region, as `ChunkActivation` runs it."""

    def __init__(self, layer: Callable[..., Tensor], kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.kind, self.dtype = layer, kind, dtype

    def forward(self, *args: Any, **context: Any) -> Tensor:
        # Casts of inputs and casts without a graph are not kept.
        args = tuple(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in args)
        with torch.autocast(self.kind, self.dtype, cache_enabled=torch.is_grad_enabled()):
            return self.layer(*args, **context)


WARM_UP = 2
_STD = 0.02
"""Standard deviation of random weights for layers without weights."""


def measure_strategies(
    layer: Callable[..., Tensor],
    arguments: Sequence[Any],
    context: dict[str, Any],
    parameters: Sequence[Tensor],
    saved_arguments_bytes: int,
    repeats: int,
    bench: Workbench,
) -> StrategyMeasurement:
    """Time and count one layer, which is mounted on the workbench.

    Gradients of its parameters and arguments are overwritten. Of the arguments, tensors that need a gradient are
    leaves, and autograd saves ``saved_arguments_bytes``. ``context`` has the keyword arguments that all layers of the
    module share. The median of ``repeats`` timed runs after a warm-up counts.
    """
    runs = _Runs(layer, tuple(arguments), context, parameters, bench)
    seconds = [statistics.median(column) for column in zip(*runs.times(repeats), strict=True)]
    argument_bytes = sum(x.nbytes for x in (*arguments, *context.values()) if isinstance(x, Tensor))
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
        given_bytes=argument_bytes,
        unsaved_bytes=max(0, argument_bytes - saved_arguments_bytes),
        workspace_bytes=max(max(0, *moments) for moments in work),
        forward_workspace_bytes=max(0, *work[0]),
        backward_workspace_bytes=max(0, *work[1]),
        forward_moments=work[0],
        backward_moments=work[1],
        weight_moments=work[2],
        first_moments=work[3],
    )


def measure_forward(
    layer: Callable[..., Tensor], arguments: Sequence[Any], context: dict[str, Any]
) -> StrategyMeasurement:
    """Do the same for a layer without gradients, which saves nothing but uses memory while it runs."""
    with LiveBytes() as live, torch.no_grad():
        layer(*arguments, **context)
    argument_bytes = sum(x.nbytes for x in (*arguments, *context.values()) if isinstance(x, Tensor))
    counted = {"workspace_bytes": live.peak_bytes, "forward_workspace_bytes": live.peak_bytes}
    # Its arguments are live while it runs, although nothing saves them.
    counted |= {"given_bytes": argument_bytes, "unsaved_bytes": argument_bytes}
    numbers = [name for name in StrategyMeasurement.__struct_fields__ if not name.endswith("_moments")]
    return StrategyMeasurement(**dict.fromkeys(numbers, 0) | counted, forward_moments=live.beyond(0))


class _Runs:
    """Repeated runs of one layer as a chunk of its own."""

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
        """Return seconds of I, W, selective forward and backward, offload and load for each run."""
        now = self.bench.now_s
        rows: list[tuple[float, ...]] = []
        for run in range(WARM_UP + repeats):
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
            if run >= WARM_UP:
                spent = [after - before for before, after in itertools.pairwise(moments)]
                rows.append((spent[0], spent[1], spent[2], spent[3], spent[5], spent[6]))
        return rows

    def count(self) -> tuple[tuple[tuple[int, ...], ...], int, int]:
        """Return live bytes of forward, backward, W and a first backward, bytes held with selective recomputation, and
        bytes between I and W.
        """
        for parameter in self.parameters:
            parameter.grad = None
        _, first = self._count_passes()
        # Existing gradients are added to, as in all microbatches but the first.
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        forward, backward = self._count_passes()
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
        return (forward, backward, weights, first), selective, between

    def _count_passes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return live bytes of a forward and a whole backward, beyond those held between them."""
        with LiveBytes() as live:
            activation, output = self.forward("keep")
            del output
            allocated = live.num_bytes
            forward = live.beyond(allocated)
            live.forget_peak()
            activation.backward(self.gradient)
            return forward, live.beyond(allocated)
