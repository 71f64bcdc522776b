"""Gradients of chunks that exist several times: over data-parallel replicas, or on all pipeline ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.spec import Layout

ReduceGradients = Callable[[int, Sequence[nn.Parameter]], None]
"""Sums the gradients of a chunk's parameters, in place, over all processes that hold the chunk."""


def all_reduce_gradients(
    layout: Layout,
    *,
    pipeline: dist.ProcessGroup | None = None,
    data: dist.ProcessGroup | None = None,
) -> ReduceGradients:
    """Reduce by all-reduce: over ``data`` for every chunk, and over ``pipeline`` for replicated modules.

    Plans reduce in one order on all replicas, and gradients are already divided by the targets of the global
    batch, so that they are summed here and not averaged.

    Parameters
    ----------
    layout : Layout
    pipeline : torch.distributed.ProcessGroup or None
        The pipeline ranks of this replica; None: the default group.
    data : torch.distributed.ProcessGroup or None
        The replicas of this pipeline rank; None where there are none.
    """
    if layout.parallelism.data > 1 and data is None:
        raise InputError(
            "data", f"no group, the layout has {layout.parallelism.data} replicas", "give their group"
        )
    replicated = [layout.module(chunk.module).on_ranks == "replicated" for chunk in layout.chunks]

    def reduce(chunk: int, parameters: Sequence[nn.Parameter]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                # Nothing was worked on here, but the other replicas wait for this one's share.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for group_of_one_type in _by_type(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in group_of_one_type])
            if replicated[chunk] and layout.num_ranks > 1:
                dist.all_reduce(flat, group=pipeline)
            if data is not None:
                dist.all_reduce(flat, group=data)
            begin = 0
            for gradient in group_of_one_type:
                gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
                begin += gradient.numel()

    return reduce


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
