"""The pipeline x data x tensor mesh of processes: one `DeviceMesh` and the process groups of the runtime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import InputError
from pipeloom.runtime.launch import accelerator
from pipeloom.spec import Layout

DIMENSIONS = ("pp", "dp", "tp")


@dataclass(frozen=True, eq=False)
class Mesh:
    """Position of this process in the mesh, and its process groups.

    Attributes
    ----------
    device_mesh : DeviceMesh
        Mesh with dimensions ``pp``, ``dp`` and ``tp``. Pass ``device_mesh["tp"]`` to `parallelize_module`.
    pipeline : ProcessGroup
        The pipeline ranks of this replica, for messages of plans.
    reduction : ProcessGroup
        The same processes, for collectives. Separate, because NCCL runs messages and collectives of one group in
        one order.
    data : ProcessGroup
        The replicas of this pipeline rank.
    replica : ProcessGroup
        All processes of this replica, including tensor-parallel ones. They run one plan.
    """

    device_mesh: DeviceMesh
    pipeline: dist.ProcessGroup
    reduction: dist.ProcessGroup
    data: dist.ProcessGroup
    replica: dist.ProcessGroup

    @property
    def pipeline_rank(self) -> int:
        """Pipeline rank of this process."""
        return self.device_mesh.get_local_rank("pp")

    @property
    def data_rank(self) -> int:
        """Replica of this process."""
        return self.device_mesh.get_local_rank("dp")

    @property
    def tensor_rank(self) -> int:
        """Tensor-parallel rank of this process, which is its shard of every tensor-parallel layer."""
        return self.device_mesh.get_local_rank("tp")


def make_mesh(layout: Layout, device_type: str = "cpu", timeout: timedelta | None = None) -> Mesh:
    """Arrange all processes of the default group in a mesh. Each of them calls it once.

    Neighboring ranks share tensors, then come replicas, then the pipeline, because tensor parallelism communicates
    most.

    Parameters
    ----------
    layout : Layout
        Its ``num_ranks`` and ``parallelism`` determine the mesh.
    device_type : str
        ``"cpu"`` or ``"cuda"``.
    timeout : timedelta or None
        Timeout of all groups. None is torch's default.

    Raises
    ------
    InputError
        The number of processes does not match.
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
    # One group for each line of the mesh, and two more. The groups that `DeviceMesh` makes itself have a timeout of
    # half an hour.
    columns, rows, neighbors = (numbers.movedim(axis, -1).reshape(-1, shape[axis]) for axis in range(3))
    pipeline, reduction, data, tensor = (
        _group_of_this(lines.tolist(), timeout) for lines in (columns, columns, rows, neighbors)
    )
    teams = numbers.movedim(1, 0).reshape(shape[1], -1)
    replica = reduction if shape[2] == 1 else _group_of_this(teams.tolist(), timeout)
    device_mesh = DeviceMesh.from_group([pipeline, data, tensor], device_type, mesh=numbers, mesh_dim_names=DIMENSIONS)
    # NCCL makes a group's communicator on first use, and the host then waits for all members. In the middle of a plan
    # some members may wait for operations that this host has not posted yet. So use every group here, in one order.
    for group in (reduction, data, tensor):
        dist.all_reduce(torch.zeros(1, device=device_type), group=group)
    if shape[2] > 1 and accelerator.on_accelerator(device_type):
        _draw_alone(device_mesh["tp"])
    return Mesh(device_mesh, pipeline, reduction, data, replica)


def _draw_alone(tensor: DeviceMesh) -> None:
    """Let DTensors draw random numbers without other ranks.

    At the first random operation on a DTensor, PyTorch otherwise broadcasts the state of the generator over the default
    group. In a plan, other ranks do not take part in that.
    """
    from torch.distributed.tensor._random import manual_seed  # no public name; torchtitan uses it as well

    device = accelerator.with_index(torch.device(tensor.device_type))
    with torch.random.fork_rng([device.index], device_type=device.type):
        manual_seed(0, tensor)


def _group_of_this(members: Iterable[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Make all groups, and return the one that contains this process."""
    # Every process must take part in making every group.
    groups = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in members]
    own: list[dist.ProcessGroup] = [group for ranks, group in groups if dist.get_rank() in ranks]
    return own[0]
