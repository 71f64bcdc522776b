"""Gradients of chunks that exist several times: on data-parallel replicas, or on all pipeline ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime.launch.mesh import Mesh
from pipeloom.runtime.model.sharding import GradientShare, check_row_shards, give_gradient, local_part, take_shares
from pipeloom.spec import Layout

Finish = Callable[[], None]
ReduceGradients = Callable[[int, Sequence[nn.Module]], Finish | None]
"""Begins to sum the gradients of a chunk's layers over all processes that hold the chunk. The returned function waits
for it and leaves the sums in ``.grad``."""


def all_reduce_gradients(
    layout: Layout,
    *,
    pipeline: dist.ProcessGroup | None = None,
    data: dist.ProcessGroup | None = None,
    tensor: dist.ProcessGroup | None = None,
) -> ReduceGradients:
    """Sum gradients over replicas of every chunk, pipeline ranks of replicated modules, and tensor ranks
    (`encoder_dp`).

    A collective starts once a chunk's last backward is done and is waited for before the optimizer step, so that it
    runs in the cool-down. Layers under `fully_shard` get their rows of the sum, others all of it. Plans reduce in one
    order on all replicas. Gradients are already divided by the targets of the global batch, so they are summed and not
    averaged. Gradients in ``.grad`` from before the iteration are already summed: the executor keeps them separately
    and adds them again.

    Parameters
    ----------
    pipeline : torch.distributed.ProcessGroup or None
        The pipeline ranks of this replica. None is the default group. With NCCL, use another group than that of the
        messages.
    data : torch.distributed.ProcessGroup or None
        The replicas of this pipeline rank. None if there are none.
    tensor : torch.distributed.ProcessGroup or None
        The tensor-parallel ranks of this pipeline rank. None without encoder data parallelism.
    """
    if layout.parallelism.data > 1 and data is None:
        raise InputError("data", f"no group, the layout has {layout.parallelism.data} replicas", "give their group")
    encoder_dp = any(layout.uses_encoder_dp(module.name) for module in layout.modules)
    if encoder_dp and tensor is None:
        raise InputError(
            "tensor", "no group, but modules use encoder data parallelism over tensor ranks", "give their group"
        )
    num_replicas = layout.parallelism.data if data is not None else 1
    over_data = [data] if num_replicas > 1 else []
    inside: list[list[dist.ProcessGroup | None]] = []
    """Per chunk, groups of its replica that hold it whole."""
    for chunk in layout.chunks:
        replicated = layout.num_ranks > 1 and layout.module(chunk.module).on_ranks == "replicated"
        inside.append([pipeline] * replicated + [tensor] * layout.uses_encoder_dp(chunk.module))

    def reduce(chunk: int, layers: Sequence[nn.Module]) -> Finish:
        shares = take_shares(layers)
        whole = [share for share in shares if not share.sharded]
        rows = [share for share in shares if share.sharded]
        finishes = [
            *(_all_reduce(bucket, [*inside[chunk], *over_data]) for bucket in _by_type(whole)),
            *(_reduce_scatter(bucket, data, num_replicas, inside[chunk]) for bucket in _by_type(rows)),
        ]

        def finish() -> None:
            for each in finishes:
                each()

        return finish

    return reduce


def zero_missing(layers: Iterable[nn.Module]) -> None:
    """Set gradients of zero for trained parameters that a batch does not use.

    Sums over replicas contain zeros there. Optimizers distinguish them from missing gradients, for which they skip
    momentum and weight decay.
    """
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def mesh_gradients(layout: Layout, mesh: Mesh) -> ReduceGradients:
    """Return `all_reduce_gradients` over the groups of a mesh."""
    data = mesh.data if layout.parallelism.data > 1 else None
    tensor = mesh.device_mesh.get_group("tp") if layout.parallelism.tensor > 1 else None
    return all_reduce_gradients(layout, pipeline=mesh.reduction, data=data, tensor=tensor)


def _all_reduce(bucket: list[GradientShare], groups: Sequence[dist.ProcessGroup | None]) -> Finish:
    flat = torch.cat([share.gradient.reshape(-1) for share in bucket])
    parameters = [(share.parameter, share.gradient.shape) for share in bucket]
    work = dist.all_reduce(flat, group=groups[0], async_op=True) if groups else None

    def finish() -> None:
        if work is not None:
            work.wait()
        for group in groups[1:]:
            dist.all_reduce(flat, group=group)
        begin = 0
        for parameter, shape in parameters:
            give_gradient(parameter, flat[begin : begin + shape.numel()].view(shape))
            begin += shape.numel()

    return finish


def _reduce_scatter(
    bucket: list[GradientShare],
    data: dist.ProcessGroup | None,
    num_replicas: int,
    then: Sequence[dist.ProcessGroup | None],
) -> Finish:
    """Give each replica its rows of every gradient, as sharded by `fully_shard`."""
    shapes = []
    for share in bucket:
        rows = -(-share.gradient.shape[0] // num_replicas)
        check_row_shards(share.parameter, rows)
        shapes.append((rows, *share.gradient.shape[1:]))
    sizes = [torch.Size(shape).numel() for shape in shapes]
    width = sum(sizes)
    first = bucket[0].gradient
    sent = torch.zeros(num_replicas, width, dtype=first.dtype, device=first.device)
    begin = 0
    for share, shape, size in zip(bucket, shapes, sizes, strict=True):
        for replica, piece in enumerate(torch.split(share.gradient, shape[0])):
            sent[replica, begin : begin + piece.numel()] = piece.reshape(-1)
        begin += size
    got = torch.empty(width, dtype=first.dtype, device=first.device)
    parameters = [share.parameter for share in bucket]
    work = _reduce_scatter_call()(got, sent.view(-1), group=data, async_op=True)

    def finish() -> None:
        work.wait()
        for group in then:
            dist.all_reduce(got, group=group)
        begin = 0
        for parameter, shape, size in zip(parameters, shapes, sizes, strict=True):
            rows = local_part(parameter).shape[0]
            give_gradient(parameter, got[begin : begin + size].view(shape)[:rows])
            begin += size

    return finish


def _reduce_scatter_call() -> Any:
    """Return the function, which torch renamed in 2.13 with a warning for the old name."""
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _by_type(shares: Iterable[GradientShare]) -> list[list[GradientShare]]:
    groups: dict[torch.dtype, list[GradientShare]] = {}
    for share in shares:
        groups.setdefault(share.gradient.dtype, []).append(share)
    return list(groups.values())


def global_targets(num_targets: float, mesh: Mesh) -> float:
    """Return the number of targets of the global batch from this replica's: the normalizer of `Executor.run`."""
    total = torch.tensor(num_targets, dtype=torch.float64, device=mesh.device_mesh.device_type)
    dist.all_reduce(total, group=mesh.data)
    return float(total)


class Position(NamedTuple):
    """Position of a process in the pipeline, among the replicas, and among the tensor-parallel ranks."""

    pipeline: int
    data: int = 0
    tensor: int = 0


def counted_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    position: Position,
    held_before: Collection[str] = (),
) -> list[nn.Parameter]:
    """Return the parameters whose gradients count on this process in a global norm, so that every element counts once.

    Shards count everywhere. Parameters that tensor-parallel ranks or replicas hold alike count only on the first of
    them, and modules replicated over the pipeline on its first rank. ``named_parameters`` and ``held_before`` are those
    of `Executor`.
    """
    replicated = {module.name for module in layout.modules if module.on_ranks == "replicated"}
    unique = {
        id(parameter): parameter
        for name, parameter in named_parameters
        if name not in held_before and _counts_here(parameter, name.partition(".")[0] in replicated, position)
    }
    return list(unique.values())


def gradient_squares(parameters: Iterable[nn.Parameter], device: torch.device | str = "cpu") -> Tensor:
    """Return the sum of squares of this process's parts of some gradients, a scalar in double precision."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            # On accelerators, a norm in another precision than float32 would first copy the gradient.
            wide = local.device.type == "cpu" or local.dtype == torch.float64
            norm = torch.linalg.vector_norm(local, dtype=torch.float64 if wide else torch.float32)
            squares += norm.double().square()
    return squares


def limit_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose norm over all processes is ``norm`` to at most ``max_norm``."""
    scale = (max_norm / norm).clamp(max=1.0)
    for parameter in {id(p): p for p in parameters}.values():
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            local.mul_(scale)


def clip_gradients(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    mesh: Mesh,
    max_norm: float | None,
    held_before: Collection[str] = (),
) -> Tensor:
    """Scale all gradients such that their global norm is at most ``max_norm``. All processes call it together.

    The host does not wait for the device.

    Parameters
    ----------
    named_parameters : iterable of (str, parameter)
        As from `Executor.named_parameters`, beginning with the module's name.
    max_norm : float or None
        None only computes the norm.
    held_before : collection of str
        `Executor.held_before`, if parameters are tied over ranks.

    Returns
    -------
    torch.Tensor
        The norm before scaling, a scalar in double precision, the same on all processes.
    """
    named = list(named_parameters)
    position = Position(mesh.pipeline_rank, mesh.data_rank, mesh.tensor_rank)
    counted = counted_parameters(named, layout, position, held_before)
    squares = gradient_squares(counted, mesh.device_mesh.device_type)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if max_norm is not None:
        limit_gradients((parameter for _, parameter in named), norm, max_norm)
    return norm


def _counts_here(parameter: nn.Parameter, replicated: bool, position: Position) -> bool:
    sharded_over = {
        dimension
        for dimension, placement in zip(
            getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or (),
            getattr(parameter, "placements", ()),
            strict=True,
        )
        if not placement.is_replicate()
    }
    return (
        ("dp" in sharded_over or position.data == 0)
        and ("tp" in sharded_over or position.tensor == 0)
        and not (replicated and position.pipeline != 0)
    )
