"""Processes as pipeline x data x tensor: one `DeviceMesh`, and the groups that the runtime talks over."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    """

    device_mesh: DeviceMesh
    pipeline: dist.ProcessGroup
    reduction: dist.ProcessGroup
    data: dist.ProcessGroup

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


def make_mesh(layout: Layout, device_type: str = "cpu") -> Mesh:
    """Arrange all processes of the default group; each of them calls it once.

    Neighbouring ranks share tensors, then come replicas, then the pipeline: tensor parallelism talks most.

    Parameters
    ----------
    layout : Layout
        Its ``num_ranks`` and ``parallelism``.
    device_type : str
        ``"cpu"`` or ``"cuda"``.

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
    device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
    reduction = device_mesh.get_group("pp")
    ranks = device_mesh.mesh.tolist()
    for replica in range(shape[1]):
        for shard in range(shape[2]):
            members = [stage[replica][shard] for stage in ranks]
            # Every process takes part in making every group.
            group = dist.new_group(members)
            if dist.get_rank() in members:
                reduction = group
    return Mesh(device_mesh, device_mesh.get_group("pp"), reduction, device_mesh.get_group("dp"))
