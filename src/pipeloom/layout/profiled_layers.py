"""Layer tables of measured models, for the mean microbatch of some packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import msgspec

from pipeloom.cost import CostModel, StrategyCost, between_s
from pipeloom.cost.layers import BYTES_PER_PARAMETER, LayerCost, LayerTable, StrategyEntry
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.packing import Packing
from pipeloom.spec import TRAITS, Chunk, Layout, ModelSpec, ModuleLayout, Workload, word_strategies
from pipeloom.taskgraph.iteration import MemoryLimit, workspace_bytes
from pipeloom.units import size_text

_Parts = Sequence[Sequence[Workload]]
"""Workloads of a module in every microbatch."""


def profiled_layers(
    model: ModelSpec,
    costs: CostModel,
    packed: Sequence[Packing],
    num_ranks: int,
    *,
    num_replicas: int = 1,
    capacity_bytes: int | None = None,
    offloading: bool = True,
) -> LayerTable:
    """Convert a profile into a layer table for `arrange`, with mean seconds and maximum bytes over microbatches.

    Layers of several modules form one chain in model order. Layers without a backward (they and all layers before them
    are frozen) have a backward time of 0 and hold no activations.

    Parameters
    ----------
    costs : CostModel
        Its strategies are the candidates of every layer. Split backwards are written if the model has them.
    packed : sequence of Packing
        Some batches, packed as in training. The table has their mean number of microbatches.
    num_replicas : int
        Number of replicas that share each batch.
    capacity_bytes : int or None
        Memory of every rank. The table subtracts a reserve for the workspace of any one layer and its messages.
    offloading : bool
        Whether to include strategies that offload. Their staging memory is then part of the reserve.

    Raises
    ------
    InfeasibleError
        The computation of one layer does not fit.
    InputError
        The batches have no microbatch.
    """
    single = _layer_by_layer(model)
    count = sum(len(p.microbatches) for p in packed)
    if not count:
        raise InputError("batches", "have no microbatch", "give at least one batch as training will see them")
    layers: list[LayerCost] = []
    for column, module in enumerate(model.modules):
        parts = [[part.workload for part in each.parts[column]] for p in packed for each in p.microbatches]
        some = next((workload for each in parts for workload in each), None)
        known: dict[tuple[str, int], LayerCost] = {}
        for i, layer in enumerate(module.flat_layers):
            # Layers of one kind cost the same; the last's output may differ from the others'.
            key = (layer.kind, 0 if some is None else layer.output.num_bytes(some))
            if key not in known:
                chunk = Chunk(module.name, (i, i), 0)
                known[key] = _layer(
                    costs, chunk, parts, single.has_backward(module.name), layer.num_parameters, offloading
                )
            named = _name(layer.kind, i, len(module.flat_layers))
            name = named if len(model.modules) == 1 else f"{module.name}.{named}"
            layers.append(msgspec.structs.replace(known[key], name=name))
    reserve = 0
    if capacity_bytes is not None:
        needs = [workspace_bytes(single, p, costs, MemoryLimit().num_messages) for p in packed]
        reserve = int(max(need[int(offloading), 0] for need in needs))
        if reserve > capacity_bytes:
            needed, most = size_text(reserve), size_text(capacity_bytes)
            raise InfeasibleError(
                f"one layer of {model.name!r} with its messages needs {needed} of memory, but a rank has {most}; "
                "use smaller microbatches"
            )
    backbone = model.modules[-1]
    middle = Chunk(backbone.name, ((len(backbone.flat_layers) - 1) // 2,) * 2, 0)
    works = [part.workload for p in packed for each in p.microbatches for part in each.parts[-1]]
    boundary = round(sum(costs.boundary_bytes(middle, work) for work in works) / max(1, len(works)))
    return LayerTable(
        name=f"{model.name}, measured",
        num_ranks=num_ranks,
        num_microbatches=max(1, round(count / len(packed) / num_replicas)),
        boundary_s=mean(between_s(costs, boundary, rank, rank + 1) for rank in range(num_ranks - 1) or (0,)),
        boundary_bytes=boundary,
        layers=tuple(layers),
        memory_capacity_bytes=None if capacity_bytes is None else (capacity_bytes - reserve,) * num_ranks,
    )


def _layer_by_layer(model: ModelSpec) -> Layout:
    """Return a layout with one chunk for each layer."""
    return Layout(
        1,
        tuple(ModuleLayout.of(m) for m in model.modules),
        tuple(Chunk(m.name, (i, i), 0) for m in model.modules for i in range(len(m.flat_layers))),
    )


def _layer(
    costs: CostModel, chunk: Chunk, parts: _Parts, has_backward: bool, num_parameters: int, offloading: bool
) -> LayerCost:
    each = [[costs.chunk_costs(chunk, workload) for workload in works] for works in parts]
    names = next((tuple(option.strategy for option in options) for row in each for options in row), ("keep",))
    made = [
        _entry(name, [[options[i] for options in row] for row in each])
        for i, name in enumerate(names)
        if offloading or not any(TRAITS[one].offloads for one in word_strategies(name))
    ]
    base = made[0]
    if not has_backward:
        made, base = made[:1], StrategyEntry(base.strategy, base.forward_s, 0, backward_s=0.0)
    return LayerCost(
        name="",
        forward_s=base.forward_s,
        activation_bytes=base.activation_bytes,
        parameter_bytes=num_parameters * BYTES_PER_PARAMETER,
        backward_s=base.backward_s,
        backward_input_s=base.backward_input_s,
        backward_weight_s=base.backward_weight_s,
        static_bytes=costs.static_bytes(chunk),
        candidates=tuple(made) if len(made) > 1 or base.weight_gradient_bytes is not None else None,
    )


def _entry(strategy: str, costs: Sequence[Sequence[StrategyCost]]) -> StrategyEntry:
    """Return the mean seconds and maximum bytes per microbatch of a layer under one strategy."""

    def mean(name: str) -> float:
        return sum(getattr(cost, name) or 0.0 for row in costs for cost in row) / len(costs)

    def most(name: str) -> int:
        return max(sum(getattr(cost, name) or 0 for cost in row) for row in costs)

    split = all(cost.backward_input_s is not None for row in costs for cost in row) and any(costs)
    return StrategyEntry(
        strategy,
        mean("forward_s"),
        most("activation_bytes"),
        None if split else mean("backward_s"),
        mean("backward_input_s") if split else None,
        mean("backward_weight_s") if split else None,
        most("weight_gradient_bytes") if split else None,
    )


def _name(kind: str, number: int, count: int) -> str:
    """Name the embedding and the head as in layer tables, and other layers by kind and number."""
    plain = kind.partition("[")[0].lower()
    if number == 0 and "embed" in plain:
        return "embedding"
    return "head" if number == count - 1 and "head" in plain else f"{plain}.{number}"
