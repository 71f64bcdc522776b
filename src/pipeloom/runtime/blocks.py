"""A chunk's layers at work on one (sub-)microbatch, in blocks that keep their activations or recompute them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import ExecutionError
from pipeloom.runtime.split import DeferredWeights, backward_inputs

Layer = Callable[..., Tensor]
STRATEGIES = ("keep", "recompute")


@functools.cache
def block_bounds(strategy: str, num_layers: int) -> tuple[tuple[int, int, bool], ...]:
    """Cut layers into blocks: maximal runs of one strategy.

    Parameters
    ----------
    strategy : str
        One word for all layers, or one per layer separated by commas.
    num_layers : int

    Returns
    -------
    tuple of (begin, end, recompute)

    Raises
    ------
    ExecutionError
        For a strategy that this runtime does not have, or a wrong number of them.
    """
    words = strategy.split(",") if strategy else ["keep"]
    if len(words) == 1:
        words *= num_layers
    for word in words:
        if word not in STRATEGIES:
            raise ExecutionError(
                f"memory strategy {word!r} is unknown to this runtime; it has {', '.join(STRATEGIES)}"
            )
    if len(words) != num_layers:
        raise ExecutionError(
            f"memory strategy {strategy!r} is for {len(words)} layers, there are {num_layers}"
        )
    bounds, begin = [], 0
    for word, run in itertools.groupby(words):
        end = begin + len(list(run))
        bounds.append((begin, end, word == "recompute"))
        begin = end
    return tuple(bounds)


@dataclass(slots=True)
class _Block:
    layers: Sequence[Layer]
    inputs: tuple[Any, ...]
    """Arguments of its first layer; the tensors that need a gradient are leaves."""
    recompute: bool
    output: Tensor | None
    """With its graph; None until it is recomputed."""
    random_state: RandomState | None
    deferred: DeferredWeights | None = None


@dataclass(slots=True)
class RandomState:
    """State of the random generators, so that dropout falls alike when recomputed."""

    cpu: Tensor
    device: Tensor | None = None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The state at this moment."""
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_gpu)

    def set(self, device: torch.device) -> None:
        """Put the generators into this state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@dataclass(slots=True)
class Passage:
    """One (sub-)microbatch on its way through a chunk, from F to the end of its backward.

    Attributes
    ----------
    output : torch.Tensor
        The chunk's result, detached; set by `forward`.
    num_recomputed : int
        Layers run a second time so far.
    """

    device: torch.device
    context: dict[str, Any]
    blocks: list[_Block] = field(default_factory=list)
    num_recomputed: int = 0

    def forward(
        self,
        layers: Sequence[Layer],
        bounds: Sequence[tuple[int, int, bool]],
        inputs: tuple[Any, ...],
        trained: bool,
    ) -> Tensor:
        """Run all layers.

        Parameters
        ----------
        layers : sequence of callables
        bounds : sequence of (begin, end, recompute)
            See `block_bounds`.
        inputs : tuple
            Arguments of the first layer.
        trained : bool
            False: nothing is saved, and there will be no backward.
        """
        if not trained:
            with torch.no_grad():
                return self._run(layers, inputs)
        output: Tensor | None = None
        flows = False
        for begin, end, recompute in bounds:
            if output is not None:
                inputs = (output.detach().requires_grad_(flows),)
            part = layers if len(bounds) == 1 else layers[begin:end]
            if recompute:
                state = RandomState.now(self.device)
                with torch.no_grad():
                    output = self._run(part, inputs)
                self.blocks.append(_Block(part, inputs, True, None, state))
                # Whether a gradient would flow is not known without a graph; asking for one costs nothing.
                flows = output.is_floating_point()
            else:
                # Gradients are on unless the caller turned them off; asking is cheaper than setting.
                if torch.is_grad_enabled():
                    output = self._run(part, inputs)
                else:
                    with torch.enable_grad():
                        output = self._run(part, inputs)
                self.blocks.append(_Block(part, inputs, False, output, None))
                flows = output.requires_grad
        if output is None:
            raise AssertionError("a chunk has at least one block")
        return output.detach()

    def _run(self, layers: Sequence[Layer], inputs: tuple[Any, ...]) -> Tensor:
        context = self.context
        output = layers[0](*inputs, **context)
        for layer in layers[1:]:
            output = layer(output, **context)
        return output

    def recompute(self) -> None:
        """Run the blocks that saved nothing once more, now with their graphs."""
        for block in self.blocks:
            self._recompute(block)

    def _recompute(self, block: _Block) -> Tensor:
        if block.output is None:
            state = RandomState.now(self.device)
            if block.random_state is not None:
                block.random_state.set(self.device)
            with torch.enable_grad():
                block.output = self._run(block.layers, block.inputs)
            state.set(self.device)
            self.num_recomputed += len(block.layers)
        return block.output

    def backward(self, gradient: Tensor) -> None:
        """Whole backward: gradients of the weights are accumulated, those of the inputs lie in their ``.grad``."""
        flowing: Tensor | None = gradient
        while self.blocks:
            block = self.blocks.pop()
            output = self._recompute(block)
            if flowing is not None and output.requires_grad:
                torch.autograd.backward(output, flowing)
            flowing = block.inputs[0].grad if self.blocks else None

    def backward_input(self, gradient: Tensor) -> None:
        """First half of a split backward: gradients of the inputs only, each layer recomputed once."""
        flowing: Tensor | None = gradient
        for number in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[number]
            output = self._recompute(block)
            if flowing is not None and output.requires_grad:
                leaves = [x for x in block.inputs if isinstance(x, Tensor) and x.requires_grad]
                block.deferred = backward_inputs(output, flowing, leaves)
            block.output = None
            flowing = block.inputs[0].grad if number else None

    def backward_weight(self) -> None:
        """Second half: gradients of the weights, from what the first half left."""
        while self.blocks:
            deferred = self.blocks.pop().deferred
            if deferred is not None:
                deferred.accumulate()
