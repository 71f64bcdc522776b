"""The layout of a training run, chosen by planning the batches that were profiled (`dip.txt` section 4, and beyond)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.cost import ProfileCosts
from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InputError
from pipeloom.layout import layout_for, profiled_layers, single_rank
from pipeloom.layout.choose import LayoutEvaluation, Sampled, ring_seconds, search_layouts
from pipeloom.layout.cooptimise import CooptimisedPipeline, chain_of_layers, cooptimise, layout_of
from pipeloom.layout.modality import typical_lengths
from pipeloom.packing import Packing, PackingSpec, packed_batch
from pipeloom.search import Evaluations, StoppingRule
from pipeloom.spec import DTYPE_BYTES, Batch, Layout, ModelSpec
from pipeloom.taskgraph import Assignable
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph

TRIAL = Evaluations(300)
"""Schedules tried for each layout and batch: a count, so that a resumed run comes to the layout that it had."""
PLACEMENTS = Evaluations(4000)
"""Placements tried for a chain, a count for the same reason."""


def choose_training_layout(
    costs: ProfileCosts,
    packing: PackingSpec,
    batches: Sequence[Batch],
    num_ranks: int,
    *,
    capacity_bytes: int | None = None,
    trial: StoppingRule = TRIAL,
    seed: int = 0,
) -> tuple[LayoutEvaluation, ...]:
    """Plan some batches of a training run under many layouts.

    Parameters
    ----------
    costs : ProfileCosts
        Of the layers measured on the machine that trains.
    packing : PackingSpec
    batches : sequence of Batch
        A few as training will see them.
    num_ranks : int
    capacity_bytes : int or None
        Memory of every rank.
    trial : StoppingRule
        Search for each layout and batch.
    seed : int

    Returns
    -------
    tuple of LayoutEvaluation
        Fastest first; the first is the one to take.

    Raises
    ------
    InputError
        No batches; a module that has nothing to do in any, or fewer layers than ranks.
    InfeasibleError
        Nothing that was tried fits.
    """
    model = costs.model
    groups = [
        [packed.batch.samples[i] for i in microbatch.samples]
        for packed in _packed(costs, packing, batches)
        for microbatch in packed.microbatches
    ]
    gradient_bytes = _gradient_bytes(model)
    memory = MemoryLimit(capacity_bytes)

    def graphs(layout: Layout) -> list[Assignable]:
        return [
            iteration_graph(layout, packed_batch(batch, model, layout, costs, packing), costs, model.name, memory)
            for batch in batches
        ]

    sampled = Sampled(
        model,
        num_ranks,
        costs,
        costs.profile.load,
        typical_lengths(model, groups),
        graphs,
        lambda layout: ring_seconds(layout, gradient_bytes, costs),
    )
    return search_layouts(sampled, trial=trial, seed=seed)


def training_layers(
    costs: ProfileCosts,
    packing: PackingSpec,
    batches: Sequence[Batch],
    num_ranks: int,
    *,
    num_replicas: int = 1,
    capacity_bytes: int | None = None,
) -> LayerTable:
    """Write a measured profile as a layer table, on microbatches as training will have them.

    Parameters
    ----------
    costs : ProfileCosts
        Of a model of one module.
    packing : PackingSpec
    batches : sequence of Batch
        A few as training will see them.
    num_ranks, num_replicas : int
    capacity_bytes : int or None
        Memory of every rank.

    Raises
    ------
    InputError
        No batches, or a model of several modules.
    """
    return profiled_layers(
        costs.model,
        costs,
        _packed(costs, packing, batches),
        num_ranks,
        num_replicas=num_replicas,
        capacity_bytes=capacity_bytes,
    )


def cooptimise_training_layout(
    table: LayerTable, model: ModelSpec, *, budget: StoppingRule = PLACEMENTS, seed: int = 0
) -> tuple[Layout, CooptimisedPipeline]:
    """Choose partition and placement of a model's one module together, with an order that a table's microbatches suit.

    Orders of single batches are searched while training runs, and begin with the rule that was found
    (`CooptimisedPipeline.order_rule`).

    Returns
    -------
    tuple of Layout and CooptimisedPipeline

    Raises
    ------
    InputError
        The table's layers are not the model's.
    InfeasibleError
        Nothing that was tried fits into memory.
    """
    found = cooptimise(chain_of_layers(table), budget=budget, seed=seed)
    return layout_for(layout_of(table.num_ranks, found.placement), model), found


def _packed(costs: ProfileCosts, packing: PackingSpec, batches: Sequence[Batch]) -> list[Packing]:
    """Pack batches for one rank, whatever the layout will be."""
    if not batches:
        raise InputError("batches", "is empty", "give at least one batch as training will see them")
    whole = single_rank(costs.model, {})
    return [packed_batch(batch, costs.model, whole, costs, packing) for batch in batches]


def _gradient_bytes(model: ModelSpec) -> dict[str, int]:
    return {
        module.name: sum(layer.num_parameters * DTYPE_BYTES[layer.output.dtype] for layer in module.flat_layers)
        for module in model.modules
    }
