"""A model on a cluster, and the iterations of it that systems are compared on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from pipeloom.cost.dealt import DealtCosts
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import Ladder
from pipeloom.emulator.sweep import Draw, default_data, draw_microbatches, emulate
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, single_rank
from pipeloom.packing import Loads, Packing, deal, packing_from_counts
from pipeloom.spec import Batch, Chunk, ChunkStrategy, Layout, ModelSpec, Sample
from pipeloom.spec.architecture import Architecture, ExpertsMixer, ResidualLayer
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import Assignable, TaskGraph
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph, workspace_bytes

Microbatches = Sequence[Sequence[Sample]]
"""One iteration of one pipeline replica: the samples of every microbatch."""

LEVELS = (
    ChunkStrategy("keep"),
    ChunkStrategy("selective"),
    *(ChunkStrategy("recompute", eighths / 8) for eighths in range(1, 9)),
)
"""What Megatron-LM offers a whole run: nothing, selective, or all of some layers of every chunk."""


@dataclass(frozen=True, eq=False)
class ModelOnCluster:
    """A model on a cluster with degrees of parallelism.

    Attributes
    ----------
    costs, levels : EmulatedCosts
        With the strategies that a planner chooses from for every pair, and with those that others choose one of.
    capacity_bytes : int
        Of each device, for static bytes and activations; what a running pass needs besides is taken off per layout.
    update_s : float
        Reduction of gradients and optimiser step after the pipeline; the same for every system.
    """

    architecture: Architecture
    cluster: ClusterSpec
    degrees: Degrees
    costs: EmulatedCosts
    levels: EmulatedCosts
    model: ModelSpec
    capacity_bytes: int
    update_s: float

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.degrees.pipeline

    @property
    def memory(self) -> MemoryLimit:
        """Memory as the papers reckon it: no room for messages, the same for a computation on every rank."""
        return MemoryLimit(self.capacity_bytes, num_messages=0, even=True, host_bytes=self.cluster.offload_bytes)


def put_on_cluster(
    model: str | Architecture, cluster: str | ClusterSpec, degrees: Degrees, *, update: bool = True
) -> ModelOnCluster:
    """Prepare a model on a cluster.

    Parameters
    ----------
    model, cluster : zoo name, file, or the spec itself
    update : bool
        Whether iterations end with reducing gradients and updating weights.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if degrees.num_devices > hardware.num_devices:
        raise InputError(
            "degrees",
            f"need {degrees.num_devices} devices, {hardware.name} has {hardware.num_devices}",
            "lower them or take a larger cluster",
        )
    costs = EmulatedCosts(architecture, hardware, degrees, split=False, ladder=Ladder())
    levels = EmulatedCosts(architecture, hardware, degrees, LEVELS, split=False)
    update_s = 0.0
    if update:
        # The update is the same whatever went through before it.
        end = emulate(architecture, hardware, degrees, batch=Draw(1), strategy="recompute", sub_microbatch={})
        update_s = end.iteration_s - end.pipeline_s
    return ModelOnCluster(
        architecture, hardware, degrees, costs, levels, costs.model_spec, hardware.device.usable_bytes, update_s
    )


def num_experts(architecture: Architecture) -> int:
    """Return the least number of experts that any layer with experts has; 1: no layer has any."""
    counts = {
        mixer.experts
        for module in architecture.modules
        for layer in module.layers
        if isinstance(layer, ResidualLayer)
        for mixer in layer.mixers
        if isinstance(mixer, ExpertsMixer)
    }
    return min(counts, default=1)


def draw_iteration(case: ModelOnCluster, num_microbatches: int, seed: int, data: str | None = None) -> Microbatches:
    """One iteration's microbatches, drawn from a data set of the zoo."""
    return draw_microbatches(case.architecture, data or default_data(case.architecture), num_microbatches, seed)


def batch_of(groups: Microbatches) -> Batch:
    """All samples of an iteration; the same document may be drawn twice, and a batch wants names of its own."""
    return Batch(
        tuple(
            msgspec.structs.replace(sample, id=f"{m}.{i}")
            for m, group in enumerate(groups)
            for i, sample in enumerate(group)
        )
    )


def pack_microbatches(case: ModelOnCluster, layout: Layout, groups: Microbatches) -> Packing:
    """Microbatches that are given already, cut into ``ceil(N / B)`` even sub-microbatches per module."""
    members, counts, first = [], [], 0
    for group in groups:
        members.append(tuple(range(first, first + len(group))))
        first += len(group)
        row = []
        for module in layout.modules:
            spec = case.model.module(module.name)
            total = sum(len(spec.instance_lengths(sample)) for sample in group)
            parts = 0 if total == 0 else 1 if module.sub_microbatch is None else -(-total // module.sub_microbatch)
            row.append(tuple(total // parts + (k < total % parts) for k in range(parts)))
        counts.append(tuple(row))
    return packing_from_counts(batch_of(groups), case.model, layout, tuple(members), tuple(counts))


def resized(groups: Microbatches, together: int) -> Microbatches:
    """Put so many microbatches in a row into one; 0: halve each that has several samples, between samples."""
    if together:
        return [
            [sample for group in groups[i : i + together] for sample in group] for i in range(0, len(groups), together)
        ]
    halves = [half for group in groups for half in (group[: len(group) // 2], group[len(group) // 2 :])]
    return [half for half in halves if half]


def graph_of(
    case: ModelOnCluster, layout: Layout, groups: Microbatches, name: str, costs: EmulatedCosts | None = None
) -> TaskGraph:
    """Task graph of `assignable_of`, with the parts of replicated modules dealt evenly."""
    return assignable_of(case, layout, groups, name, costs).graph


def assignable_of(
    case: ModelOnCluster, layout: Layout, groups: Microbatches, name: str, costs: EmulatedCosts | None = None
) -> Assignable:
    """Task graph of an iteration under the device's memory, less what a pass of this layout needs to run.

    Costs that know the halves of backwards have all of them split.

    Raises
    ------
    InfeasibleError
        The weights alone do not fit.
    """
    return packed_assignable(case, layout, pack_microbatches(case, layout, groups), name, costs)


def packed_assignable(
    case: ModelOnCluster, layout: Layout, packing: Packing, name: str, costs: EmulatedCosts | None = None
) -> Assignable:
    """As `assignable_of`, of microbatches that are cut already."""
    return iteration_graph(layout, packing, costs or case.costs, name, case.memory, or_whole=False)


def most_workspace_bytes(costs: EmulatedCosts, layout: Layout, packing: Packing) -> int:
    """Most that any pass of the largest part of each module needs while it runs."""
    return int(workspace_bytes(layout, packing, costs, num_messages=0)[0].max())


def layer_seconds(
    case: ModelOnCluster,
    batches: Sequence[Microbatches],
    sizes: dict[str, ModulePlacement] | None = None,
    dealt: Collection[str] = (),
) -> dict[str, float]:
    """Seconds of one layer of each kind, forward and backward, on the mean of some iterations.

    Keys are ``module/kind``. Of ``dealt`` modules, on the tensor-parallel rank with most to do.
    """
    costs = DealtCosts(case.costs, frozenset(dealt), case.degrees.tensor)
    layout = single_rank(case.model, sizes or {})
    packed = [pack_microbatches(case, layout, groups) for groups in batches]
    seconds: dict[str, float] = {}
    for column, module in enumerate(case.model.modules):
        parts = [part for p in packed for microbatch in p.microbatches for part in microbatch.parts[column]]
        for i, layer in enumerate(module.flat_layers):
            key = f"{module.name}/{layer.kind}"
            if key not in seconds:
                each = (costs.computed(Chunk(module.name, (i, i), 0), part.workload)[0] for part in parts)
                seconds[key] = sum(c.forward_s + c.backward_s for c in each) / len(batches)
    return seconds


def model_flops(case: ModelOnCluster, groups: Microbatches) -> float:
    """Operations of an iteration's products, the backward counted as two forwards."""
    packing = pack_microbatches(case, single_rank(case.model, {}), groups)
    total = 0.0
    for column, module in enumerate(case.model.modules):
        whole = Chunk(module.name, (0, len(module.flat_layers) - 1), 0)
        factor = 1 if module.frozen else 3
        for microbatch in packing.microbatches:
            total += sum(factor * case.costs.chunk_flops(whole, part.workload) for part in microbatch.parts[column])
    return total


def deal_microbatches(
    case: ModelOnCluster, groups: Microbatches, num_replicas: int, seed: int = 0
) -> list[Microbatches]:
    """Deal microbatches to data-parallel replicas so that all have equal work, since all wait for the slowest.

    Raises
    ------
    InputError
        Fewer microbatches than replicas.
    """
    layout = single_rank(case.model, {})
    packing = pack_microbatches(case, layout, groups)
    seconds = np.zeros((len(groups), len(case.model.modules)))
    for m, microbatch in enumerate(packing.microbatches):
        for column, module in enumerate(case.model.modules):
            whole = Chunk(module.name, (0, len(module.flat_layers) - 1), 0)
            for part in microbatch.parts[column]:
                base = case.costs.chunk_costs(whole, part.workload)[0]
                seconds[m, column] += base.forward_s + base.backward_s
    loads = Loads(np.ones(len(groups), np.int64), seconds[:, -1], seconds[:, :-1].sum(axis=1))
    return [[groups[i] for i in members] for members in deal(loads, num_replicas, seed)]
