"""Build layouts: separated modules, replicated modules, or a given layout. `stages` builds chains of stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from pipeloom.bounds import Count
from pipeloom.cost import CostModel
from pipeloom.errors import InputError
from pipeloom.packing import Packing
from pipeloom.spec import Chunk, LayerSpec, Layout, ModelSpec, ModuleLayout, ModuleSpec
from pipeloom.spec.layout import OnTensorRanks

LayerLoad = Callable[[str, LayerSpec], float]
"""Load of one layer (module name, layer): seconds on typical data, or its number of parameters."""


class ModulePlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one module is cut."""

    segments: Count = 1
    """Number of passes over all ranks (DIP's K). The module is cut into this number of chunks per rank."""
    sub_microbatch: Count | None = None
    """Maximum number of instances per sub-microbatch (DIP's B). None: the whole microbatch."""
    on_tensor_ranks: OnTensorRanks = "divided"
    """Same as in `ModuleLayout`."""

    def of(self, module: ModuleSpec) -> ModuleLayout:
        """Return the module as part of a layout."""
        made = ModuleLayout.of(module, self.sub_microbatch)
        return msgspec.structs.replace(made, on_tensor_ranks=self.on_tensor_ranks)

    def __post_init__(self) -> None:
        """Raise `InputError` if there is no segment."""
        if self.segments < 1:
            raise InputError("segments", f"{self.segments} is below 1")


def separate(model: ModelSpec, num_ranks: int, placements: Mapping[str, ModulePlacement], load: LayerLoad) -> Layout:
    """Give each module separate pipeline segments (DIP section 3.1, separated partitioning).

    Every module is cut into ``num_ranks * segments`` chunks, chunk ``j`` on rank ``j % num_ranks``. If its
    layers do not divide evenly, chunks are balanced by load. A module before the last with fewer layers than ranks
    has one chunk for each layer.

    Parameters
    ----------
    model : ModelSpec
        Modules and layers to place.
    num_ranks : int
        Number of pipeline ranks.
    placements : mapping
        Segments and sub-microbatch size by module name. A missing module has one segment and no sub-microbatches.
    load : callable
        Return the load of a layer from a module name and the layer, e.g. `Profile.load`.

    Raises
    ------
    InputError
        When a module has fewer layers than chunks, or a placement names an unknown module.
    """
    for name in placements:
        model.module(name)
    modules, chunks = [], []
    for module in model.modules:
        placement = placements.get(module.name, ModulePlacement())
        layers = module.flat_layers
        num_chunks = num_ranks * placement.segments
        if placement.segments == 1 and module is not model.modules[-1]:
            num_chunks = min(num_chunks, len(layers))
        if len(layers) < num_chunks:
            raise InputError(
                f"module {module.name!r}",
                f"has {len(layers)} layers for {num_ranks} ranks x {placement.segments} segments",
                "use fewer segments or ranks",
            )
        runs = partition_chain([load(module.name, layer) for layer in layers], num_chunks)
        chunks += [Chunk(module.name, run, j % num_ranks) for j, run in enumerate(runs)]
        modules.append(placement.of(module))
    return Layout(num_ranks=num_ranks, modules=tuple(modules), chunks=tuple(chunks))


def chunk_counts(num_ranks: int, modules: Sequence[ModuleSpec]) -> range:
    """Return the numbers of chunks per rank for which a chain of the modules has enough layers."""
    return range(1, sum(len(module.flat_layers) for module in modules) // num_ranks + 1)


def single_rank(model: ModelSpec, placements: Mapping[str, ModulePlacement]) -> Layout:
    """Put the whole model on one rank with one chunk per module, for packing without a layout."""
    limits = {name: placement.sub_microbatch for name, placement in placements.items()}
    return Layout(
        num_ranks=1,
        modules=tuple(ModuleLayout.of(m, limits.get(m.name)) for m in model.modules),
        chunks=tuple(Chunk(m.name, (0, len(m.flat_layers) - 1), 0) for m in model.modules),
    )


def typical_seconds(model: ModelSpec, costs: CostModel, packed: Sequence[Packing]) -> dict[str, float]:
    """Return the mean seconds per batch, forward and backward, of one layer of each kind.

    Batches are packed and split as in training, so that constant costs of a layer are counted for each
    sub-microbatch. Keys are ``module/kind``, as in a profile.
    """
    seconds: dict[str, float] = {}
    for column, module in enumerate(model.modules):
        parts = [part for p in packed for microbatch in p.microbatches for part in microbatch.parts[column]]
        for i, layer in enumerate(module.flat_layers):
            key = f"{module.name}/{layer.kind}"
            if key not in seconds:
                each = (costs.chunk_costs(Chunk(module.name, (i, i), 0), part.workload)[0] for part in parts)
                seconds[key] = sum(cost.forward_s + cost.backward_s for cost in each) / len(packed)
    return seconds


def replicated(layout: Layout, names: Sequence[str]) -> Layout:
    """Return the layout with some modules replicated on every rank."""
    chunks: list[Chunk] = []
    for module in layout.modules:
        mine = [layout.chunks[c] for c in layout.chunks_of(module.name)]
        if module.name in names:
            last = mine[-1].layers[1]
            mine = [Chunk(module.name, (0, last), rank) for rank in range(layout.num_ranks)]
        chunks += mine
    modules = tuple(msgspec.structs.replace(m, on_ranks="replicated") if m.name in names else m for m in layout.modules)
    return msgspec.structs.replace(layout, modules=modules, chunks=tuple(chunks))


def with_modules(layout: Layout, names: Collection[str], **changes: Any) -> Layout:
    """Return the layout with changed fields of some modules."""
    modules = tuple(msgspec.structs.replace(m, **changes) if m.name in names else m for m in layout.modules)
    return msgspec.structs.replace(layout, modules=modules)


def with_encoder_dp(layout: Layout, names: Collection[str]) -> Layout:
    """Return the layout with encoder data parallelism over tensor ranks for some modules."""
    return with_modules(layout, names, on_tensor_ranks="dealt")


def by_count(_module: str, layer: LayerSpec) -> float:
    """Return the load of a layer to balance the number of blocks (``L / (P K)`` in the papers).

    Embeddings, adapters and heads have a small load.
    """
    return 1.0 if layer.kind.startswith("block") else 0.01


def partition_chain(
    loads: Sequence[float], num_parts: int, slowness: Sequence[float] | None = None
) -> tuple[tuple[int, int], ...]:
    """Cut a chain into ``num_parts`` non-empty runs and minimize the largest load.

    Dynamic programming over the position of the last cut. Ties are broken by the smallest sum of squared loads.

    Parameters
    ----------
    loads : sequence of float
        Load of every layer.
    slowness : sequence of float or None
        Factor of the load in each part. None: 1 in all parts.

    Returns
    -------
    tuple of (first, last)
        Inclusive positions of each run, in order.

    Raises
    ------
    InputError
        When there are fewer layers than parts.
    """
    n, times = len(loads), (1.0,) * num_parts if slowness is None else slowness
    if not 1 <= num_parts <= n:
        raise InputError("num_parts", f"{num_parts} is not in 1..{n}", "use fewer chunks than there are layers")
    total = np.array([0.0, *accumulate(loads)])
    spans = np.where(np.tri(n + 1, k=-1), total[:, None] - total, np.inf)  # load of the layers from a cut to an end
    # For the first i layers in the parts so far: the largest load, the sum of squared loads and the cuts.
    largest, squares = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
    largest[0] = squares[0] = 0.0
    cuts_to: list[tuple[int, ...]] = [()] * (n + 1)
    for each in times:
        loads_of = spans * each
        most = np.maximum(largest, loads_of)
        sums = np.where(most == most.min(axis=1, keepdims=True), squares + loads_of * loads_of, np.inf)
        least = sums.min(axis=1)
        best = sums == least[:, None]
        first = best.argmax(axis=1)
        for end in np.flatnonzero(best.sum(axis=1) > 1):
            if least[end] < np.inf:  # a tie: choose the earliest cuts
                first[end] = min(np.flatnonzero(best[end]), key=lambda cut: (*cuts_to[cut], cut))
        cuts_to = [(*cuts_to[cut], int(cut)) for cut in first]
        largest, squares = most[np.arange(n + 1), first], least
    cuts = (*cuts_to[n], n)
    return tuple((first, end - 1) for first, end in pairwise(cuts))


def equal_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Return the cuts of a chain into chunks with equal numbers of layers: the first layers, and the number of layers.

    If they do not divide evenly, the first chunks have one layer more.
    """
    if not 1 <= num_chunks <= num_layers:
        raise InputError(
            "layers", f"{num_layers} cannot fill {num_chunks} chunks", "use fewer ranks or chunks per rank"
        )
    each, more = divmod(num_layers, num_chunks)
    return tuple(c * each + min(c, more) for c in range(num_chunks + 1))


def layout_for(layout: Layout, model: ModelSpec) -> Layout:
    """Check that a layout has exactly the layers of a model, and return it for this model.

    The model determines the edges between modules and which modules are frozen. A layout of a single module, as written
    by `pipeloom arrange`, fits any model with a single module of the same length, whatever their names.

    Raises
    ------
    InputError
        The layout has other modules, or another number of layers.
    """
    given = [module.name for module in layout.modules]
    names = [module.name for module in model.modules]
    if len(given) == len(names) == 1:
        chunks = tuple(msgspec.structs.replace(chunk, module=names[0]) for chunk in layout.chunks)
        module = msgspec.structs.replace(layout.modules[0], name=names[0], after=(), frozen=False)
        layout = msgspec.structs.replace(layout, modules=(module,), chunks=chunks)
    elif given != names:
        raise InputError("modules", f"are {', '.join(given)}, the model has {', '.join(names)}")
    modules = []
    for theirs, ours in zip(layout.modules, model.modules, strict=True):
        last = max(layout.chunks[i].layers[1] for i in layout.chunks_of(theirs.name))
        if last + 1 != len(ours.flat_layers):
            raise InputError(
                f"module {ours.name!r}",
                f"has {last + 1} layers, in the model it has {len(ours.flat_layers)}",
                "lay out the model that is trained",
            )
        of_model = ModuleLayout.of(ours, theirs.sub_microbatch)
        modules.append(
            msgspec.structs.replace(of_model, on_ranks=theirs.on_ranks, on_tensor_ranks=theirs.on_tensor_ranks)
        )
    return msgspec.structs.replace(layout, modules=tuple(modules))
