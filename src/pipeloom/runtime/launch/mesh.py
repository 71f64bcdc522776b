"""Processes as pipeline x data x tensor: one `DeviceMesh`, and the groups that the runtime talks over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import InputError
from pipeloom.spec import Layout

DIMENSIONS = ("pp", "dp", "tp")


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where this process stands, and whom it works with.

    Attributes
    ----------
    device_mesh : DeviceMesh
        Of dimensions ``pp``, ``dp`` and ``tp``; give ``device_mesh["tp"]`` to `parallelize_module`.
    pipeline : ProcessGroup
        The pipeline ranks of this replica: messages of plans.
    reduction : ProcessGroup
        The same processes, for collectives; apart, because NCCL serves messages and collectives of one group in
        one order.
    data : ProcessGroup
        The replicas of this pipeline rank.
    replica : ProcessGroup
        All processes of this replica, tensor-parallel ones too: they run one plan.
    """

    device_mesh: DeviceMesh
    pipeline: dist.ProcessGroup
    reduction: dist.ProcessGroup
    data: dist.ProcessGroup
    replica: dist.ProcessGroup

    @property
    def pipeline_rank(self) -> int:
        """Which part of the pipeline this process is."""
        return self.device_mesh.get_local_rank("pp")

    @property
    def data_rank(self) -> int:
        """Which replica it belongs to."""
        return self.device_mesh.get_local_rank("dp")

    @property
    def tensor_rank(self) -> int:
        """Which shard of every tensor-parallel layer it holds."""
        return self.device_mesh.get_local_rank("tp")


def make_mesh(layout: Layout, device_type: str = "cpu", timeout: timedelta | None = None) -> Mesh:
    """Arrange all processes of the default group; each of them calls it once.

    Neighbouring ranks share tensors, then come replicas, then the pipeline: tensor parallelism talks most.

    Parameters
    ----------
    layout : Layout
        Its ``num_ranks`` and ``parallelism``.
    device_type : str
        ``"cpu"`` or ``"cuda"``.
    timeout : timedelta or None
        Of all groups; None: torch's own.

    Raises
    ------
    InputError
        When another number of processes runs.
    """
    shape = (layout.num_ranks, layout.parallelism.data, layout.parallelism.tensor)
    wanted, size = shape[0] * shape[1] * shape[2], dist.get_world_size()
    if size != wanted:
        raise InputError(
            "layout",
            f"is for {shape[0]} pipeline x {shape[1]} data x {shape[2]} tensor = {wanted} processes, {size} run",
            f"start {wanted}, or change num_ranks or parallelism",
        )
    numbers = torch.arange(size).reshape(shape)
    # A group for every line of the mesh, and two more: a mesh of torch's own making would wait for half an hour.
    columns, rows, neighbours = (numbers.movedim(axis, -1).reshape(-1, shape[axis]) for axis in range(3))
    pipeline, reduction, data, tensor = (
        _group_of_this(lines.tolist(), timeout) for lines in (columns, columns, rows, neighbours)
    )
    teams = numbers.movedim(1, 0).reshape(shape[1], -1)
    replica = reduction if shape[2] == 1 else _group_of_this(teams.tolist(), timeout)
    device_mesh = DeviceMesh.from_group([pipeline, data, tensor], device_type, mesh=numbers, mesh_dim_names=DIMENSIONS)
    mesh = Mesh(device_mesh, pipeline, reduction, data, replica)
    _connect(mesh)
    return mesh


def _connect(mesh: Mesh) -> None:
    """Use every group once, in one order.

    NCCL makes a group's communicator when it is first used, and the host waits there for all members. In the middle of
    a plan some of them may wait for what this host has not posted yet.
    """
    groups = [mesh.reduction, mesh.data, mesh.device_mesh.get_group("tp")]
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=mesh.device_mesh.device_type), group=group)


def _group_of_this(members: Iterable[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Make all these groups; the one that this process is in."""
    # Every process takes part in making every group.
    groups = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in members]
    mine: list[dist.ProcessGroup] = [group for ranks, group in groups if dist.get_rank() in ranks]
    return mine[0]
