"""Position of a process in training: pipeline rank, replica and process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.packing import Loads, assign_to_replicas, token_loads
from pipeloom.runtime.launch.mesh import Mesh, make_mesh
from pipeloom.runtime.model.reduce import ReduceGradients, all_reduce_gradients, mesh_gradients
from pipeloom.spec import Batch, Layout, ModelSpec

BatchLoads = Callable[[Batch], Loads]
"""Computes the load of every sample of a batch."""


@dataclass(frozen=True, eq=False)
class Membership:
    """Position and process groups of one process."""

    stage: int
    """Pipeline rank."""
    replica: int
    """Data-parallel replica of the pipeline."""
    num_replicas: int
    messages: dist.ProcessGroup | None
    """The pipeline ranks of this replica, for messages of plans. None is the default group."""
    collectives: dist.ProcessGroup | None
    """The same ranks, for collective operations."""
    reduce_gradients: ReduceGradients | None
    """For the executor. None if every chunk is on one process only."""
    tensor_rank: int = 0
    """Tensor-parallel rank within the pipeline rank."""
    team: dist.ProcessGroup | None = None
    """All processes of this replica, which run one plan."""
    stages: tuple[int, ...] = ()
    """Pipeline rank of every process of the team."""
    mesh: Mesh | None = None
    """None if there is only a pipeline."""

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks of this pipeline rank. None if there is only a pipeline."""
        return None if self.mesh is None else self.mesh.device_mesh.get_group("tp")

    @property
    def is_planner_rank(self) -> bool:
        """Whether this process talks to the planner for its replica."""
        return self.stage == 0 and self.tensor_rank == 0

    def share(
        self, batch: Batch, model: ModelSpec, loads: BatchLoads | None = None, assignment: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the samples of a global batch that this replica runs. All replicas compute the same assignment.

        Replicas get about the same work, with different numbers of samples and microbatches. If a batch has fewer
        samples than there are replicas, some replicas run the same samples, and `counts` says whose results count.

        ``assignment`` has the replica of every sample, as chosen by the planner. If it does not cover this batch,
        samples are assigned by their ``loads``. None counts tokens.
        """
        if self.num_replicas == 1:
            return tuple(range(len(batch.samples)))
        if len(batch.samples) < self.num_replicas:
            return (self.replica % len(batch.samples),)
        if len(assignment) == len(batch.samples) and set(assignment) == set(range(self.num_replicas)):
            return tuple(i for i, replica in enumerate(assignment) if replica == self.replica)
        weighed = loads(batch) if loads is not None else token_loads(batch, model)
        return assign_to_replicas(weighed, self.num_replicas)[self.replica]

    def counts(self, batch: Batch) -> bool:
        """Whether this replica's run of a global batch counts. All replicas run something, because they communicate."""
        return self.replica < len(batch.samples)


def join_groups(
    layout: Layout, timeout_s: float | None = None, device_type: str = "cpu", mesh: Mesh | None = None
) -> Membership:
    """Make the process groups of all processes of the default group. Each of them calls it once.

    Neighboring processes share the tensors of a pipeline rank, then come its replicas. The groups of a ``mesh`` of the
    same degrees are used again. Otherwise a rank in a new group gives up after waiting ``timeout_s`` seconds for
    another one. None is torch's default. NCCL runs messages and collectives of one group in one order, so they get
    separate groups on ``"cuda"``.

    Raises `InputError` if the number of processes does not match.
    """
    num_replicas, num_tensor, size = layout.parallelism.data, layout.parallelism.tensor, dist.get_world_size()
    if num_replicas * num_tensor == 1 and device_type == "cpu":
        if size != layout.num_ranks:
            raise InputError("layout.num_ranks", f"{layout.num_ranks}, but {size} processes run", "start as many")
        replicated = any(module.on_ranks == "replicated" for module in layout.modules)
        reduce_gradients = all_reduce_gradients(layout) if replicated else None
        return Membership(dist.get_rank(), 0, 1, None, None, reduce_gradients, stages=tuple(range(size)))
    if mesh is not None and tuple(mesh.device_mesh.shape) != (layout.num_ranks, num_replicas, num_tensor):
        given = " x ".join(map(str, mesh.device_mesh.shape))
        raise InputError("mesh", f"has {given} processes, and the layout other degrees", "leave it out")
    if mesh is None:
        mesh = make_mesh(layout, device_type, None if timeout_s is None else timedelta(seconds=timeout_s))
    return Membership(
        mesh.pipeline_rank,
        mesh.data_rank,
        num_replicas,
        mesh.pipeline,
        mesh.reduction,
        mesh_gradients(layout, mesh),
        mesh.tensor_rank,
        mesh.replica,
        tuple(rank // (num_replicas * num_tensor) for rank in dist.get_process_group_ranks(mesh.replica)),
        mesh,
    )
