"""Tied parameters: one `Parameter` in several layers, such as an embedding that is also the output head.

On one rank, autograd sums the gradients of all its layers. If its layers are on several ranks, each of them holds a
copy. Their gradients are summed at the end of an iteration, so that all copies take the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime.model.model import Model
from pipeloom.runtime.model.weights import layers_of_rank
from pipeloom.spec import Layout

SumOver = Callable[[tuple[int, ...], Tensor], None]
"""Sums a tensor in place over some pipeline ranks, including this one."""


@dataclass(frozen=True, slots=True, eq=False)
class TiedParameter:
    """A parameter whose layers are on several pipeline ranks."""

    names: tuple[str, ...]
    """Names ``module.layer.parameter`` in model order."""
    ranks: tuple[int, ...]
    """Pipeline ranks that hold it, ascending."""
    parameter: nn.Parameter


def tied_over_ranks(model: Model, layout: Layout) -> tuple[TiedParameter, ...]:
    """Return the parameters of trained modules that a layout places on several ranks.

    Parameters whose ``requires_grad`` is not set are included, because it may change between iterations. Raises
    `InputError` if a tied parameter is frozen in one module and trained in another, is in a replicated module and in a
    pipelined one, or is not shared anymore.
    """
    rank_of = {place: rank for rank in range(layout.num_ranks) for place in layers_of_rank(layout, rank)}
    tied = []
    for names in model.tied:
        places = [name.split(".", 2) for name in names]
        modules = [layout.module(module) for module, _, _ in places]
        first, *others = parameters = [model.parameter(name) for name in names]
        where, same = f"parameter {names[0]!r}", f"is tied to {', '.join(map(repr, names[1:]))}"
        if len({module.frozen for module in modules}) > 1:
            raise InputError(where, f"{same}, frozen in one module and trained in another", "freeze both or neither")
        if modules[0].frozen:
            continue
        separated = any(other is not first for other in others)
        everywhere = {module.on_ranks == "replicated" and layout.num_ranks > 1 for module in modules}
        if (separated or len(everywhere) > 1) and not any(parameter.requires_grad for parameter in parameters):
            continue
        if separated:
            raise InputError(
                where,
                f"{same}, but they were separated after the model was made",
                "leave tied layers out of fully_shard and parallelize_module",
            )
        if len(everywhere) > 1:
            raise InputError(
                where, f"{same}, but one module is on all ranks and the other is pipelined", "place both alike"
            )
        ranks = tuple(sorted({rank_of[module, int(layer)] for module, layer, _ in places}))
        if everywhere == {False} and len(ranks) > 1:
            tied.append(TiedParameter(names, ranks, first))
    return tuple(tied)


def sums_over_ranks(
    model: Model, layout: Layout, timeout: timedelta | None = None, device_type: str = "cpu"
) -> SumOver | None:
    """Make the groups over which tied parameters are summed. All processes of the default group call it together.

    Processes are arranged as by `make_mesh`.

    Returns
    -------
    callable or None
        For `Executor`. None if no parameter of a trained module is tied over ranks.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    beside = layout.parallelism.data * layout.parallelism.tensor
    every = sorted({each.ranks for each in tied_over_ranks(model, layout)})
    if not every:
        return None
    for ranks in every:
        for offset in range(beside):
            members = [rank * beside + offset for rank in ranks]
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                groups[ranks] = group
                # As `make_mesh`: NCCL makes its communicator at the first use, for which the host waits.
                dist.all_reduce(torch.zeros(1, device=device_type), group=group)

    def sum_over(ranks: tuple[int, ...], tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=groups[ranks])

    return sum_over


def check_sums(tied: Iterable[TiedParameter], sum_over: SumOver | None) -> None:
    """Raise `InputError` if parameters are trained now, but their gradients are not summed."""
    trained = next((each for each in tied if each.parameter.requires_grad), None)
    if trained is not None and sum_over is None:
        raise InputError(
            f"parameter {trained.names[0]!r}",
            f"is tied to {trained.names[1]!r}, and they are on ranks {', '.join(map(str, trained.ranks))}",
            "give Executor(sum_tied=sums_over_ranks(model, layout)) and clip_gradients(held_before="
            "executor.held_before), place both on one rank, or untie them",
        )


def sum_tied(tied: Iterable[TiedParameter], sum_over: SumOver | None) -> None:
    """Sum the gradients of tied parameters of this rank that are trained now.

    All ranks that hold them call it together, and train the same ones.
    """
    check_sums(tied, sum_over)
    if sum_over is None:
        return
    by_ranks: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for each in tied:
        if each.parameter.requires_grad:
            by_ranks.setdefault((each.ranks, each.parameter.dtype), []).append(each.parameter)
    for (ranks, _), parameters in by_ranks.items():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sum_over(ranks, flat)
        begin = 0
        for parameter in parameters:
            parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
