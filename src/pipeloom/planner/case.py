"""Case: a model on a machine, and the iterations of it that systems are compared on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain as joined

import msgspec
import numpy as np

from pipeloom.arrange import ModulePlacement, single_rank
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.sweep import default_data, draw_microbatches, emulate
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.packing import Loads, Packing, deal, packing_from_counts
from pipeloom.spec import Batch, Chunk, Layout, ModelSpec, Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_architecture, load_machine
from pipeloom.spec.hardware import Degrees, MachineSpec
from pipeloom.taskgraph import Dealable, TaskGraph, build_dealable

Groups = Sequence[Sequence[Sample]]
"""One iteration of one pipeline replica: the samples of every microbatch."""

CANDIDATES = (
    "keep", "selective:0.34", "selective:0.67", "selective", "full:0.17+selective", "full:0.34+selective",
    "full:0.5+selective", "full:0.67+selective", "full:0.84+selective", "full",
)  # fmt: skip
"""Ten strategies of a chunk from the fastest to the leanest (`dip.txt` §5.3). Layers of a chunk are alike, so these
are the best in their ranges of bytes: first the results that are cheap to make again go, then whole layers."""

LEVELS = ("keep", "selective", *(f"full:{n / 8:g}" for n in range(1, 8)), "full")
"""What Megatron-LM offers a whole run: nothing, selective, or all of some layers of every chunk."""


@dataclass(frozen=True, eq=False)
class Case:
    """A model on a machine with degrees of parallelism.

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
    machine: MachineSpec
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


def make_case(
    model: str | Architecture, cluster: str | MachineSpec, degrees: Degrees, *, update: bool = True
) -> Case:
    """Prepare a model on a cluster.

    Parameters
    ----------
    model, cluster : zoo name, file, or the spec itself
    degrees : Degrees
    update : bool
        Whether iterations end with reducing gradients and updating weights.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    machine = load_machine(cluster) if isinstance(cluster, str) else cluster
    if degrees.num_devices > machine.num_devices:
        raise InputError(
            "degrees", f"need {degrees.num_devices} devices, {machine.name} has {machine.num_devices}",
            "lower them or take a larger cluster",
        )  # fmt: skip
    costs = EmulatedCosts(architecture, machine, degrees, CANDIDATES, split=False)
    levels = EmulatedCosts(architecture, machine, degrees, LEVELS, split=False)
    update_s = 0.0
    if update:
        # The update is the same whatever went through before it.
        end = emulate(architecture, machine, degrees, num_microbatches=1, strategy="full", sub_microbatch={})
        update_s = end.iteration_s - end.pipeline_s
    return Case(
        architecture, machine, degrees, costs, levels, costs.model_spec, machine.device.usable_bytes, update_s
    )


def draw_groups(case: Case, num_microbatches: int, seed: int, data: str | None = None) -> Groups:
    """One iteration's microbatches, drawn from a data set of the zoo."""
    return draw_microbatches(
        case.architecture, data or default_data(case.architecture), num_microbatches, seed
    )


def pack_groups(case: Case, layout: Layout, groups: Groups) -> Packing:
    """Microbatches that are given already, cut into ``ceil(N / B)`` even sub-microbatches per module."""
    # The same document may be drawn twice; a batch wants names of its own.
    samples = [
        msgspec.structs.replace(sample, id=f"{m}.{i}")
        for m, group in enumerate(groups)
        for i, sample in enumerate(group)
    ]
    members, counts, first = [], [], 0
    for group in groups:
        members.append(tuple(range(first, first + len(group))))
        first += len(group)
        row = []
        for module in layout.modules:
            spec = case.model.module(module.name)
            total = sum(len(spec.instance_lengths(sample)) for sample in group)
            parts = (
                0
                if total == 0
                else 1
                if module.sub_microbatch is None
                else -(-total // module.sub_microbatch)
            )
            row.append(tuple(total // parts + (k < total % parts) for k in range(parts)))
        counts.append(tuple(row))
    return packing_from_counts(Batch(tuple(samples)), case.model, layout, tuple(members), tuple(counts))


def graph_of(
    case: Case,
    layout: Layout,
    groups: Groups,
    name: str,
    costs: EmulatedCosts | None = None,
    *,
    split_backward: bool = False,
) -> TaskGraph:
    """Task graph of `dealable_of`, with the parts of replicated modules dealt evenly."""
    return dealable_of(case, layout, groups, name, costs, split_backward=split_backward).graph


def dealable_of(
    case: Case,
    layout: Layout,
    groups: Groups,
    name: str,
    costs: EmulatedCosts | None = None,
    *,
    split_backward: bool = False,
) -> Dealable:
    """Task graph of an iteration under the device's memory, less what a pass of this layout needs to run.

    Split backwards want ``costs`` that know their parts.

    Raises
    ------
    InfeasibleError
        The weights alone do not fit.
    """
    costs = costs or case.costs
    packing = pack_groups(case, layout, groups)
    need = workspace_bytes(costs, layout, packing)
    made = build_dealable(
        layout, packing, costs, name=name, capacity_bytes=case.capacity_bytes - need, split_backward=split_backward
    )  # fmt: skip
    graph = made.graph
    assert graph.capacity_bytes is not None
    if (graph.static_bytes > graph.capacity_bytes).any():
        rank = int((graph.static_bytes - graph.capacity_bytes).argmax())
        raise InfeasibleError(
            f"rank {rank}: weights, gradients and optimiser state take {graph.static_bytes[rank]} bytes of "
            f"{graph.capacity_bytes[rank]}; use more tensor, pipeline or data parallelism"
        )
    return made


def workspace_bytes(costs: EmulatedCosts, layout: Layout, packing: Packing) -> int:
    """Most that any pass of the largest part of each module needs while it runs."""
    most = 0
    for column, module in enumerate(layout.modules):
        parts = [part.workload for microbatch in packing.microbatches for part in microbatch.parts[column]]
        if not parts:
            continue
        largest = max(parts, key=lambda w: w.num_tokens)
        ends = {layout.chunks[c].layers for c in layout.chunks_of(module.name)}
        most = max(most, *(costs.workspace_bytes(Chunk(module.name, layers, 0), largest) for layers in ends))
    return most


def typical_lengths(model: ModelSpec, groups: Groups) -> dict[str, tuple[int, ...]]:
    """Per module the instance lengths of its fullest microbatch, for measuring sizes.

    For the backbone of documents: of the microbatch with middling work.
    """
    out = {}
    for module in model.modules:
        each = [tuple(joined(*(module.instance_lengths(s) for s in group))) for group in groups]
        each = [lengths for lengths in each if lengths]
        if not each:
            raise InputError(f"module {module.name!r}", "has nothing to do in any sampled microbatch")
        if module.reads in ("sequence", "text"):
            out[module.name] = sorted(each, key=sum)[len(each) // 2]
        else:
            longest = max(each, key=len)
            middling = int(statistics.median(n for lengths in each for n in lengths))
            out[module.name] = (middling,) * len(longest)
    return out


def layer_seconds(
    case: Case, batches: Sequence[Groups], sizes: dict[str, ModulePlacement] | None = None
) -> dict[str, float]:
    """Seconds of one layer of each kind, forward and backward, on the mean of some iterations.

    Keys are ``module/kind``.
    """
    layout = single_rank(case.model, sizes or {})
    packed = [pack_groups(case, layout, groups) for groups in batches]
    seconds: dict[str, float] = {}
    for column, module in enumerate(case.model.modules):
        parts = [part for p in packed for microbatch in p.microbatches for part in microbatch.parts[column]]
        for i, layer in enumerate(module.flat_layers):
            key = f"{module.name}/{layer.kind}"
            if key not in seconds:
                each = (
                    case.costs.chunk_costs(Chunk(module.name, (i, i), 0), part.workload)[0] for part in parts
                )
                seconds[key] = sum(c.forward_s + c.backward_s for c in each) / len(batches)
    return seconds


def model_flops(case: Case, groups: Groups) -> float:
    """Operations of an iteration's products, the backward counted as two forwards."""
    packing = pack_groups(case, single_rank(case.model, {}), groups)
    total = 0.0
    for column, module in enumerate(case.model.modules):
        whole = Chunk(module.name, (0, len(module.flat_layers) - 1), 0)
        factor = 1 if module.frozen else 3
        for microbatch in packing.microbatches:
            total += sum(
                factor * case.costs.chunk_flops(whole, part.workload) for part in microbatch.parts[column]
            )
    return total


def deal_groups(case: Case, groups: Groups, num_replicas: int, seed: int = 0) -> list[Groups]:
    """Deal microbatches to data-parallel replicas so that all have equal work, since all wait for the slowest.

    Raises
    ------
    InputError
        Fewer microbatches than replicas.
    """
    layout = single_rank(case.model, {})
    packing = pack_groups(case, layout, groups)
    seconds = np.zeros((len(groups), len(case.model.modules)))
    for m, microbatch in enumerate(packing.microbatches):
        for column, module in enumerate(case.model.modules):
            whole = Chunk(module.name, (0, len(module.flat_layers) - 1), 0)
            for part in microbatch.parts[column]:
                base = case.costs.chunk_costs(whole, part.workload)[0]
                seconds[m, column] += base.forward_s + base.backward_s
    loads = Loads(np.ones(len(groups), np.int64), seconds[:, -1], seconds[:, :-1].sum(axis=1))
    return [[groups[i] for i in members] for members in deal(loads, num_replicas, seed)]
