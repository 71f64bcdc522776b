"""Build layouts: separated modules, one chain of stages, encoders on the first rank, or a given layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise

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


def chain_of_stages(model: ModelSpec, num_ranks: int, chunks_per_rank: int, load: LayerLoad) -> Layout:
    """Cut the chain of all modules into stages, as Megatron-LM does.

    Stage ``j`` is on rank ``j % num_ranks``. A stage that crosses a module boundary is two chunks on one rank.
    There are no sub-microbatches.
    """
    layers = [(module.name, i, layer) for module in model.modules for i, layer in enumerate(module.flat_layers)]
    num_stages = num_ranks * chunks_per_rank
    chunks: list[Chunk] = []
    for stage, (first, last) in enumerate(partition_chain([load(m, x) for m, _, x in layers], num_stages)):
        here = layers[first : last + 1]
        for name in dict.fromkeys(module for module, _, _ in here):
            indices = [i for module, i, _ in here if module == name]
            chunks.append(Chunk(name, (indices[0], indices[-1]), stage % num_ranks))
    return Layout(num_ranks=num_ranks, modules=tuple(ModuleLayout.of(m) for m in model.modules), chunks=tuple(chunks))


def encoder_first(
    model: ModelSpec,
    num_ranks: int,
    load: LayerLoad,
    *,
    even_layers: bool = False,
    placements: Mapping[str, ModulePlacement] | None = None,
) -> Layout:
    """Put all modules except the last on rank 0, and partition the last one across all ranks.

    This layout is common for small encoders (PipeTune section 2.2).

    Parameters
    ----------
    load : callable
        Load by which the last module is balanced, including the encoders on rank 0.
    even_layers : bool
        Use equal numbers of layers instead, ignoring the encoders, with one more layer on the first ranks if they do
        not divide evenly. torchtitan does this, with embedding and head counted as one layer each.
    placements : mapping or None
        Sub-microbatches of the encoders. Every module has one segment.

    Raises
    ------
    InputError
        When the last module has fewer layers than ranks, or a placement has several segments.
    """
    placements = placements or {}
    for name, placement in placements.items():
        model.module(name)
        if placement.segments != 1:
            raise InputError(
                f"module {name!r}.segments",
                f"{placement.segments}, encoders on the first rank leave 1",
                "leave it out, or lay out 'separate'",
            )
    *encoders, backbone = model.modules
    layers = backbone.flat_layers
    if even_layers:
        runs = _even_runs(len(layers), num_ranks)
    else:
        loads = [load(backbone.name, layer) for layer in layers]
        loads[0] += sum(load(module.name, layer) for module in encoders for layer in module.flat_layers)
        runs = partition_chain(loads, num_ranks)
    return Layout(
        num_ranks=num_ranks,
        modules=tuple(placements.get(m.name, ModulePlacement()).of(m) for m in model.modules),
        chunks=(
            *(Chunk(module.name, (0, len(module.flat_layers) - 1), 0) for module in encoders),
            *(Chunk(backbone.name, run, rank) for rank, run in enumerate(runs)),
        ),
    )


def _even_runs(num_layers: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the first and last layer of every rank, with one more layer on the first ranks if needed."""
    if num_layers < num_ranks:
        raise InputError("num_ranks", f"{num_ranks} is more than {num_layers} layers", "use fewer ranks")
    each, more = divmod(num_layers, num_ranks)
    ends = list(accumulate(each + (rank < more) for rank in range(num_ranks)))
    return tuple((end - each - (rank < more), end - 1) for rank, end in enumerate(ends))


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


def with_encoder_dp(layout: Layout, names: Collection[str]) -> Layout:
    """Return the layout with encoder data parallelism over tensor ranks for some modules."""
    modules = tuple(
        msgspec.structs.replace(m, on_tensor_ranks="dealt") if m.name in names else m for m in layout.modules
    )
    return msgspec.structs.replace(layout, modules=modules)


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
