"""A chunk's layers at work on one (sub-)microbatch, in blocks that keep their activations or recompute them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.memory import Offloaded, SelectiveRecompute
from pipeloom.runtime.random_state import RandomState
from pipeloom.runtime.split import DeferredWeights, backward_inputs
from pipeloom.spec import TRAITS, Strategy, word_strategies

Layer = Callable[..., Tensor]
Bounds = tuple[tuple[int, int, Strategy], ...]
"""Blocks of a chunk: first layer, one past the last, memory strategy."""


@functools.cache
def block_bounds(strategy: str, num_layers: int, with_loss: bool = False) -> Bounds:
    """Cut layers into blocks: maximal runs of one strategy.

    Parameters
    ----------
    strategy : str
        One word for all layers, or one per layer separated by commas.
    num_layers : int
    with_loss : bool
        One more layer, the loss, goes with the last.

    Returns
    -------
    tuple of (begin, end, strategy)

    Raises
    ------
    ExecutionError
        For a strategy that this runtime does not have, or a wrong number of them.
    """
    try:
        chosen = word_strategies(strategy)
    except InputError as error:
        raise ExecutionError(f"memory {error}") from error
    if len(chosen) == 1:
        chosen *= num_layers
    if len(chosen) != num_layers:
        raise ExecutionError(f"memory strategy {strategy!r} is for {len(chosen)} layers, there are {num_layers}")
    bounds, begin = [], 0
    for one, run in itertools.groupby(chosen):
        end = begin + len(list(run))
        bounds.append((begin, end, one))
        begin = end
    if with_loss:
        last = bounds[-1]
        bounds[-1] = (last[0], last[1] + 1, last[2])
    return tuple(bounds)


def kept_casts(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """Around an iteration under autocast: weights are cast once for all its passes, not once for each.

    Torch drops the casts of weights where the outermost autocast region ends; without this one that is the end of every
    pass, and each microbatch in flight would hold a copy of the weights for its backward.
    """
    if autocast is None:
        return nullcontext()
    kind = device.type
    # It changes nothing else for what runs inside.
    return torch.autocast(
        kind,
        torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


@dataclass(slots=True)
class _Block:
    layers: Sequence[Layer]
    inputs: tuple[Any, ...]
    """Arguments of its first layer; the tensors that need a gradient are leaves."""
    strategy: Strategy
    edge: GradientEdge | Tensor | None = None
    """End of its graph. The output itself is not held, but for a loss: the graph has what it needs of it."""
    missing: bool = False
    """Whether it has to be recomputed before its backward."""
    random_state: RandomState | None = None
    selective: SelectiveRecompute | None = None
    offloaded: Offloaded | None = None
    deferred: DeferredWeights | None = None


@dataclass(slots=True)
class ChunkActivation:
    """One (sub-)microbatch on its way through a chunk, from F to the end of its backward.

    Attributes
    ----------
    num_recomputed : int
        Layers run a second time so far.
    offloaded_bytes : int
        Moved to the host so far.
    """

    device: torch.device
    context: dict[str, Any]
    autocast: torch.dtype | None = None
    """Precision of autocast regions, forward and recomputed alike; None: none."""
    blocks: list[_Block] = field(default_factory=list)
    num_recomputed: int = 0
    offloaded_bytes: int = 0

    def forward(self, layers: Sequence[Layer], bounds: Bounds, inputs: tuple[Any, ...], trained: bool) -> Tensor:
        """Run all layers, and return the last one's output without its graph.

        Parameters
        ----------
        layers : sequence of callables
        bounds : sequence of (begin, end, strategy)
            See `block_bounds`.
        inputs : tuple
            Arguments of the first layer.
        trained : bool
            False: nothing is saved, and there will be no backward.
        """
        if not trained:
            with torch.no_grad():
                return self._run(layers, inputs, keeps_casts=False)
        output: Tensor | None = None
        flows = False
        for begin, end, strategy in bounds:
            if output is not None:
                inputs = (output.detach().requires_grad_(flows),)
            block = _Block(layers if len(bounds) == 1 else layers[begin:end], inputs, strategy)
            output = self._forward(block)
            # Whether a gradient would flow is not known without a graph; asking for one costs nothing.
            flows = output.is_floating_point() if block.missing else block.edge is not None
            self.blocks.append(block)
        if output is None:
            raise AssertionError("a chunk has at least one block")
        return output.detach()

    def _forward(self, block: _Block) -> Tensor:
        traits = TRAITS[block.strategy]
        if traits.recomputes != "nothing":
            block.missing = True
            block.random_state = RandomState.now(self.device)
            if traits.recomputes == "cheap":
                block.selective = SelectiveRecompute()
            with torch.no_grad() if block.selective is None else block.selective.forward():
                return self._run(block.layers, block.inputs, keeps_casts=False)
        if traits.offloads:
            weights = [p for m in block.layers if isinstance(m, nn.Module) for p in m.parameters()]
            held = [*weights, *block.inputs, *self.context.values()]
            block.offloaded = Offloaded(held, self.autocast is not None)
            with torch.enable_grad(), block.offloaded.saving():
                output = self._run(block.layers, block.inputs)
        elif torch.is_grad_enabled():
            output = self._run(block.layers, block.inputs)
        else:
            with torch.enable_grad():
                output = self._run(block.layers, block.inputs)
        if output.requires_grad:
            block.edge = output if output.dim() == 0 else get_gradient_edge(output)
        return output

    def _run(self, layers: Sequence[Layer], inputs: tuple[Any, ...], keeps_casts: bool = True) -> Tensor:
        """Run layers; ``keeps_casts``: casts of weights may be kept for later passes.

        Not where they are made without a graph, in which a later pass would lose its gradient; nor where every
        operation is counted, of which the recomputation must not have more.
        """
        if self.autocast is None:
            return self._call(layers, inputs)
        # Torch keeps casts of leaves, weights or not; those of inputs are to go when their microbatch does.
        inputs = tuple(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs)
        with torch.autocast(self.device.type, self.autocast, cache_enabled=keeps_casts):
            return self._call(layers, inputs)

    def _call(self, layers: Sequence[Layer], inputs: tuple[Any, ...]) -> Tensor:
        context = self.context
        output = layers[0](*inputs, **context)
        for layer in layers[1:]:
            output = layer(output, **context)
        return output

    def recompute(self) -> None:
        """Run the blocks that saved nothing once more, now with their graphs."""
        for block in self.blocks:
            if block.missing:
                self._recompute(block)

    def _recompute(self, block: _Block) -> None:
        block.missing = False
        state = RandomState.now(self.device)
        if block.random_state is not None:
            block.random_state.set(self.device)
        with torch.enable_grad(), nullcontext() if block.selective is None else block.selective.again():
            output = self._run(block.layers, block.inputs)
        state.set(self.device)
        block.selective = block.random_state = None
        if output.requires_grad:
            block.edge = output if output.dim() == 0 else get_gradient_edge(output)
        self.num_recomputed += len(block.layers)

    def offload(self) -> None:
        """Move what offloading blocks saved to the host."""
        for block in self.blocks:
            if block.offloaded is not None:
                block.offloaded.offload()
                self.offloaded_bytes += block.offloaded.num_bytes

    def load(self) -> None:
        """Begin to bring back what was offloaded."""
        for block in self.blocks:
            if block.offloaded is not None:
                block.offloaded.load()

    def backward(self, gradient: Tensor) -> None:
        """Whole backward: gradients of the weights are accumulated, those of the inputs lie in their ``.grad``."""
        flowing: Tensor | None = gradient
        while self.blocks:
            block = self.blocks.pop()
            if block.missing:
                self._recompute(block)
            if flowing is not None and block.edge is not None:
                torch.autograd.backward(block.edge, flowing)
            flowing = block.inputs[0].grad if self.blocks else None

    def backward_input(self, gradient: Tensor) -> None:
        """First half of a split backward: gradients of the inputs only, each layer recomputed once."""
        flowing: Tensor | None = gradient
        for number in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[number]
            if block.missing:
                self._recompute(block)
            if flowing is not None and block.edge is not None:
                leaves = [x for x in block.inputs if isinstance(x, Tensor) and x.requires_grad]
                edge = block.edge if isinstance(block.edge, GradientEdge) else get_gradient_edge(block.edge)
                block.deferred = backward_inputs([edge], [flowing], leaves)
            block.edge = None
            flowing = block.inputs[0].grad if number else None

    def backward_weight(self) -> None:
        """Second half: gradients of the weights, from what the first half left."""
        while self.blocks:
            deferred = self.blocks.pop().deferred
            if deferred is not None:
                deferred.accumulate()
