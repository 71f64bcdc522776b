"""A model on a cluster, and its iterations for comparisons."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pipeloom.compare.result import BaselineResult
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import ParetoSteps
from pipeloom.cost.encoder_dp import EncoderDpCosts
from pipeloom.errors import InputError
from pipeloom.iteration import Microbatches as Microbatches
from pipeloom.iteration import TimedIteration, draw_microbatches
from pipeloom.iteration import pack_microbatches as pack_groups
from pipeloom.iteration.emulation import model_flops as flops_of
from pipeloom.iteration.microbatches import default_data
from pipeloom.layout import single_rank
from pipeloom.packing import Loads, Packing, assign_to_replicas
from pipeloom.spec import Chunk, ChunkStrategy, Layout, ModelSpec
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.architecture import num_experts as layer_experts
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import FUSED, TrainerSpec
from pipeloom.taskgraph import Assignable, IntArray, TaskGraph, to_ns
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph, workspace_bytes

LEVELS = (
    ChunkStrategy("keep"),
    ChunkStrategy("selective"),
    *(ChunkStrategy("recompute", eighths / 8) for eighths in range(1, 9)),
)
"""Recomputation in Megatron-LM, fixed for a run: none, selective, or full for a share of each chunk's layers."""


@dataclass(frozen=True, eq=False)
class ModelOnCluster:
    """A model on a cluster with degrees of parallelism.

    Attributes
    ----------
    costs, levels : EmulatedCosts
        Costs with the strategies that a planner chooses for every pair, and with those that other systems choose once.
    capacity_bytes : int
        Memory of each device for static bytes and activations. Workspace is subtracted per layout.
    update : bool
        Whether iterations end with gradient reduction and weight update.
    """

    architecture: Architecture
    cluster: ClusterSpec
    degrees: Degrees
    costs: EmulatedCosts
    levels: EmulatedCosts
    model: ModelSpec
    capacity_bytes: int
    update: bool

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.degrees.pipeline

    def update_ns(self, layout: Layout) -> IntArray:
        """Return the time that each rank of a layout needs to reduce gradients and update weights."""
        ranks = [[chunk for chunk in layout.chunks if chunk.rank == rank] for rank in range(layout.num_ranks)]
        seconds = [self.costs.update_s(chunks) if self.update else 0.0 for chunks in ranks]
        return np.array([to_ns(each, "update_s") for each in seconds], np.int64)

    def iteration_s(self, result: BaselineResult) -> float:
        """Return the seconds of an iteration with the updates of all ranks."""
        update = self.update_ns(result.layout) if result.update_ns is None else result.update_ns
        none = np.zeros_like(update)
        whole = TimedIteration(result.graph, result.schedule, result.timeline, update, none, self.capacity_bytes)
        return whole.iteration_s + result.after_s

    @property
    def trainer(self) -> TrainerSpec:
        """The framework that runs every system."""
        return self.costs.placement.trainer

    @property
    def memory(self) -> MemoryLimit:
        """Memory limit as in the papers: the same reserve on every rank, and for messages that of the trainer."""
        messages = self.trainer.held_messages
        return MemoryLimit(self.capacity_bytes, num_messages=messages, even=True, host_bytes=self.cluster.offload_bytes)


def put_on_cluster(
    model: str | Architecture,
    cluster: str | ClusterSpec,
    degrees: Degrees,
    *,
    update: bool = True,
    trainer: TrainerSpec = FUSED,
) -> ModelOnCluster:
    """Prepare a model on a cluster, each given as a name in the zoo, a path or the spec itself.

    ``update`` tells whether iterations end with gradient reduction and weight update. ``trainer`` runs every system.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if degrees.num_devices > hardware.num_devices:
        raise InputError(
            "degrees",
            f"need {degrees.num_devices} devices, {hardware.name} has {hardware.num_devices}",
            "lower them or use a larger cluster",
        )
    costs = EmulatedCosts(architecture, hardware, degrees, split=False, pareto_steps=ParetoSteps(), trainer=trainer)
    levels = EmulatedCosts(architecture, hardware, degrees, LEVELS, split=False, trainer=trainer)
    return ModelOnCluster(
        architecture, hardware, degrees, costs, levels, costs.model_spec, costs.capacity_bytes, update
    )


def num_experts(architecture: Architecture) -> int:
    """Return the least number of experts of any layer with experts; 1 without experts."""
    counts = {each for module in architecture.modules for layer in module.layers if (each := layer_experts(layer))}
    return min(counts, default=1)


def draw_iteration(setting: ModelOnCluster, num_microbatches: int, seed: int, data: str | None = None) -> Microbatches:
    """Draw the microbatches of one iteration from a data set of the zoo."""
    return draw_microbatches(setting.architecture, data or default_data(setting.architecture), num_microbatches, seed)


def pack_microbatches(setting: ModelOnCluster, layout: Layout, microbatches: Microbatches) -> Packing:
    """Pack given microbatches for a layout of the setting's model."""
    return pack_groups(setting.model, layout, microbatches)


def resized(microbatches: Microbatches, together: int) -> Microbatches:
    """Merge ``together`` consecutive microbatches into one; 0: halve those with several samples."""
    if together:
        return [
            [sample for microbatch in microbatches[i : i + together] for sample in microbatch]
            for i in range(0, len(microbatches), together)
        ]
    halves = [
        half
        for microbatch in microbatches
        for half in (microbatch[: len(microbatch) // 2], microbatch[len(microbatch) // 2 :])
    ]
    return [half for half in halves if half]


def graph_of(
    setting: ModelOnCluster, layout: Layout, microbatches: Microbatches, name: str, costs: EmulatedCosts | None = None
) -> TaskGraph:
    """Make the task graph of `assignable_of`, with parts of replicated modules assigned evenly."""
    return assignable_of(setting, layout, microbatches, name, costs).graph


def assignable_of(
    setting: ModelOnCluster, layout: Layout, microbatches: Microbatches, name: str, costs: EmulatedCosts | None = None
) -> Assignable:
    """Make the task graph of an iteration under the device's memory, less the workspace of this layout.

    Backwards are split if the costs have separate times. Raise `InfeasibleError` if the weights alone do not fit.
    """
    return packed_assignable(setting, layout, pack_microbatches(setting, layout, microbatches), name, costs)


def packed_assignable(
    setting: ModelOnCluster, layout: Layout, packing: Packing, name: str, costs: EmulatedCosts | None = None
) -> Assignable:
    """Make the graph of `assignable_of` for a packing."""
    return iteration_graph(layout, packing, costs or setting.costs, name, setting.memory, or_whole=False)


def most_workspace_bytes(costs: EmulatedCosts, layout: Layout, packing: Packing) -> int:
    """Return the largest workspace of any pass."""
    return int(workspace_bytes(layout, packing, costs, costs.held_messages(layout))[0].max())


def layer_seconds(
    setting: ModelOnCluster, batches: Sequence[Microbatches], encoder_dp: Collection[str] = ()
) -> dict[str, float]:
    """Return the seconds of one layer of each kind, forward and backward, averaged over iterations.

    Keys are ``module/kind``. For ``encoder_dp`` modules (encoder data parallelism), it is the time of the most loaded
    tensor-parallel rank.
    """
    costs = EncoderDpCosts(setting.costs, frozenset(encoder_dp), setting.degrees.tensor)
    layout = single_rank(setting.model, {})
    packed = [pack_microbatches(setting, layout, microbatches) for microbatches in batches]
    seconds: dict[str, float] = {}
    for column, module in enumerate(setting.model.modules):
        parts = [part for p in packed for microbatch in p.microbatches for part in microbatch.parts[column]]
        for i, layer in enumerate(module.flat_layers):
            key = f"{module.name}/{layer.kind}"
            if key not in seconds:
                each = (costs.computed(Chunk(module.name, (i, i), 0), part.workload)[0] for part in parts)
                seconds[key] = sum(c.forward_s + c.backward_s for c in each) / len(batches)
    return seconds


def model_flops(setting: ModelOnCluster, microbatches: Microbatches) -> float:
    """Return the FLOPs of an iteration's matrix products."""
    layout = single_rank(setting.model, {})
    return flops_of(setting.costs, layout, pack_microbatches(setting, layout, microbatches))


def assign_microbatches(setting: ModelOnCluster, microbatches: Microbatches, num_replicas: int) -> list[Microbatches]:
    """Assign microbatches to data-parallel replicas with even work, since all wait for the slowest.

    Raise `InputError` if there are fewer microbatches than replicas.
    """
    layout = single_rank(setting.model, {})
    packing = pack_microbatches(setting, layout, microbatches)
    seconds = np.zeros((len(microbatches), len(setting.model.modules)))
    for m, microbatch in enumerate(packing.microbatches):
        for column, module in enumerate(setting.model.modules):
            whole = Chunk(module.name, (0, len(module.flat_layers) - 1), 0)
            for part in microbatch.parts[column]:
                base = setting.costs.chunk_costs(whole, part.workload)[0]
                seconds[m, column] += base.forward_s + base.backward_s
    loads = Loads(np.ones(len(microbatches), np.int64), seconds[:, -1], seconds[:, :-1].sum(axis=1))
    return [[microbatches[i] for i in members] for members in assign_to_replicas(loads, num_replicas)]
