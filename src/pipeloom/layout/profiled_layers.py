"""Costs of single layers as training will meet them: a model's chain on the mean microbatch of some packed batches."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.cost import CostModel
from pipeloom.cost.layers import BYTES_PER_PARAMETER, LayerCost, LayerTable
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.packing import Packing
from pipeloom.spec import Chunk, Layout, ModelSpec, ModuleLayout, Workload
from pipeloom.taskgraph.iteration import MemoryLimit, workspace_bytes


def profiled_layers(
    model: ModelSpec,
    costs: CostModel,
    packed: Sequence[Packing],
    num_ranks: int,
    *,
    num_replicas: int = 1,
    capacity_bytes: int | None = None,
) -> LayerTable:
    """Write a profile as the layer table that `arrange` takes: seconds are means over microbatches, bytes the largest.

    Parameters
    ----------
    model : ModelSpec
        Of one module.
    costs : CostModel
    packed : sequence of Packing
        Some batches as training will pack them; their mean number of microbatches is the table's.
    num_ranks : int
    num_replicas : int
        Among which the batches are divided.
    capacity_bytes : int or None
        Memory of every rank. The table's is less by what any one layer's computation and its messages need.

    Raises
    ------
    InfeasibleError
        One layer's computation does not fit.
    InputError
        The model has several modules, or the batches no microbatch.
    """
    if len(model.modules) != 1:
        names = ", ".join(module.name for module in model.modules)
        raise InputError("model", f"has modules {names}", "arrange takes a chain: one language module")
    module = model.modules[0]
    works = [part.workload for p in packed for batch in p.microbatches for part in batch.parts[0]]
    if not works:
        raise InputError("batches", "have no microbatch", "give at least one batch as training will see them")
    flat = module.flat_layers
    known: dict[tuple[str, int], LayerCost] = {}
    layers = []
    for i, layer in enumerate(flat):
        # Layers of one kind cost the same; the last's output may differ from the others'.
        key = (layer.kind, layer.output.num_bytes(works[0]))
        if key not in known:
            known[key] = _layer(costs, Chunk(module.name, (i, i), 0), works, layer.num_parameters)
        named = _name(layer.kind, i, len(flat))
        layers.append(_renamed(known[key], named))
    aside = 0
    if capacity_bytes is not None:
        single = Layout(1, (ModuleLayout(module.name),), tuple(Chunk(module.name, (i, i), 0) for i in range(len(flat))))
        aside = max(int(workspace_bytes(single, p, costs, MemoryLimit().num_messages)[0]) for p in packed)
        if aside > capacity_bytes:
            raise InfeasibleError(
                f"a computation of one layer of {module.name!r}, with its messages, needs {aside} bytes of the "
                f"{capacity_bytes} of a rank; use smaller microbatches"
            )
    middle = Chunk(module.name, ((len(flat) - 1) // 2,) * 2, 0)
    boundary = round(sum(costs.boundary_bytes(middle, work) for work in works) / len(works))
    return LayerTable(
        name=f"{model.name}, measured",
        num_ranks=num_ranks,
        num_microbatches=max(1, round(len(works) / len(packed) / num_replicas)),
        boundary_s=costs.transfer_s(boundary),
        boundary_bytes=boundary,
        layers=tuple(layers),
        memory_capacity_bytes=None if capacity_bytes is None else (capacity_bytes - aside,) * num_ranks,
    )


def _layer(costs: CostModel, chunk: Chunk, works: Sequence[Workload], num_parameters: int) -> LayerCost:
    each = [costs.chunk_costs(chunk, work)[0] for work in works]
    return LayerCost(
        name="",
        forward_s=sum(cost.forward_s for cost in each) / len(each),
        backward_s=sum(cost.backward_s for cost in each) / len(each),
        activation_bytes=max(cost.activation_bytes for cost in each),
        parameter_bytes=num_parameters * BYTES_PER_PARAMETER,
        static_bytes=costs.static_bytes(chunk),
    )


def _renamed(layer: LayerCost, name: str) -> LayerCost:
    fields = {field: getattr(layer, field) for field in layer.__struct_fields__}
    return LayerCost(**fields | {"name": name})


def _name(kind: str, number: int, count: int) -> str:
    """Embedding and head by the names that layer tables have for them, others by kind and number."""
    plain = kind.partition("[")[0].lower()
    if number == 0 and "embed" in plain:
        return "embedding"
    return "head" if number == count - 1 and "head" in plain else f"{plain}.{number}"
