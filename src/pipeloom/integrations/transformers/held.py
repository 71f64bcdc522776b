"""Run one layer under a memory strategy, as one node of an ordinary autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.execute.blocks import ChunkActivation, ChunkStreams
from pipeloom.runtime.model.model import Emit
from pipeloom.spec import Strategy


def call_held(
    layer: Callable[..., Tensor | Emit],
    strategy: Strategy,
    inputs: tuple[Any, ...],
    context: dict[str, Any],
    taken: Mapping[str, Tensor],
    emits: tuple[str, ...],
) -> Tensor | Emit:
    """Call a layer and hold its activations as the runtime does under a memory strategy.

    Parameters
    ----------
    inputs : tuple
        Positional arguments.
    context : dict
        Keyword arguments that need no gradient.
    taken : mapping
        Streams that the layer takes.
    emits : tuple of str
        Streams that the layer emits.
    """
    ports = ChunkStreams({0: tuple(taken)}, {0: emits}, frozenset(emits))
    activation = ChunkActivation(torch.device("cpu"), context, None, ports)
    # Autograd does not see the parameters, on which the output depends. This input makes the output require gradients.
    depends = torch.zeros((), requires_grad=True)
    given = (*inputs, *taken.values())
    output, *rest = _HeldLayer.apply(activation, layer, strategy, tuple(taken), depends, *given)  # type: ignore[no-untyped-call]
    streams = dict(zip(activation.given or {}, rest, strict=False))
    loss = rest[-1] if activation.losses else None
    return Emit(output, streams, loss) if streams or loss is not None else output


class _HeldLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: ChunkActivation, layer: Any, strategy: Strategy, taken: Any, *given: Any) -> Any:
        leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given[1:]]
        count = len(leaves) - len(taken)
        activation.streams = dict(zip(taken, leaves[count:], strict=True))
        output = activation.forward([layer], ((0, 1, strategy),), tuple(leaves[:count]), True)
        activation.offload()
        ctx.activation, ctx.leaves = activation, leaves
        return (output, *(activation.given or {}).values(), *activation.losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *others: Tensor) -> Any:
        activation: ChunkActivation = ctx.activation
        if activation.losses:
            activation.loss_scale = float(others[-1])
        activation.load()
        activation.backward(gradient, dict(zip(activation.given or {}, others, strict=False)))
        return (None,) * 5 + tuple(x.grad if isinstance(x, Tensor) else None for x in ctx.leaves)
