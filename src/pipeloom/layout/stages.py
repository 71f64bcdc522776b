"""Layouts of one chain of stages, as in other trainers. Stage ``j`` is on rank ``j % p``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from pipeloom.errors import InputError
from pipeloom.layout.layouts import LayerLoad, ModulePlacement, by_count, equal_layers, partition_chain
from pipeloom.spec import Chunk, Layout, ModelSpec, ModuleLayout, ModuleSpec

Spans = dict[str, tuple[int, int]]
"""First and last layer of each module in one stage."""


def chain_of_stages(model: ModelSpec, num_ranks: int, chunks_per_rank: int, load: LayerLoad) -> Layout:
    """Cut the chain of all modules into stages, as Megatron-LM does.

    Stage ``j`` is on rank ``j % num_ranks``. A stage that crosses a module boundary is two chunks on one rank.
    There are no sub-microbatches.
    """
    layers = [(module.name, i, layer) for module in model.modules for i, layer in enumerate(module.flat_layers)]
    stages: list[Spans] = []
    for first, last in partition_chain([load(m, x) for m, _, x in layers], num_ranks * chunks_per_rank):
        stages.append({})
        for name, i, _ in layers[first : last + 1]:
            begin, _ = stages[-1].get(name, (i, i))
            stages[-1][name] = begin, i
    return _layout(model, num_ranks, stages)


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
    if even_layers:
        cuts = equal_layers(len(model.modules[-1].flat_layers), num_ranks)
        spans: list[Spans] = [{model.modules[-1].name: (begin, end - 1)} for begin, end in pairwise(cuts)]
        layout = _layout(model, num_ranks, spans, encoders_in_first_stage=True)
    else:
        layout = encoders_in_first_stage(model, num_ranks, 1, load)
    modules = (placements.get(m.name, ModulePlacement()).of(m) for m in model.modules)
    return msgspec.structs.replace(layout, modules=tuple(modules))


def encoders_in_first_stage(
    model: ModelSpec, num_ranks: int, chunks_per_rank: int, load: LayerLoad = by_count, *, counted: bool = True
) -> Layout:
    """Put all encoders in the first stage and partition the last module across all stages, as other trainers do.

    Parameters
    ----------
    load : callable
        Load by which stages are balanced. The default counts blocks.
    counted : bool
        Whether the first stage's load includes the encoders. False: the default of other trainers.

    Raises
    ------
    InputError
        The last module has fewer layers than stages.
    """
    *encoders, backbone = model.modules
    num_stages = num_ranks * chunks_per_rank
    if len(backbone.flat_layers) < num_stages:
        raise InputError(
            "chunks", f"{num_stages} stages, {backbone.name} has {len(backbone.flat_layers)} layers", "use fewer"
        )
    loads = [load(backbone.name, layer) for layer in backbone.flat_layers]
    if counted:
        loads[0] += sum(load(module.name, layer) for module in encoders for layer in module.flat_layers)
    spans: list[Spans] = [{backbone.name: run} for run in partition_chain(loads, num_stages)]
    return _layout(model, num_ranks, spans, encoders_in_first_stage=True)


def layout_of_stages(model: ModelSpec, num_ranks: int, stages: Sequence[int | Mapping[str, int]]) -> Layout:
    """Cut a model into one chain of stages with given numbers of blocks.

    Parameters
    ----------
    stages : sequence of int or mapping
        Stages in model order. An integer is the number of blocks of the last module, with all encoders in the first
        stage. A mapping has a number for each module. Embeddings go to the first stage that names their module, heads
        to the last, and other layers follow the block before them. In a module without blocks, every layer counts as
        a block.

    Raises
    ------
    InputError
        A module is unknown, or the numbers do not match the model.
    """
    backbone = model.modules[-1]
    plain = [stage for stage in stages if isinstance(stage, int)]
    if plain and len(plain) < len(stages):
        raise InputError("layout", "mixes numbers and tables", "write all stages one way")
    tables = [{backbone.name: stage} if isinstance(stage, int) else stage for stage in stages]
    for name in {name for table in tables for name in table}:
        model.module(name)
    spans: list[Spans] = [{} for _ in stages]
    last_stage = 0
    for module in (backbone,) if plain else model.modules:
        counts = {j: table[module.name] for j, table in enumerate(tables) if module.name in table}
        _check(module, counts, last_stage)
        last_stage = max(last_stage, *counts)
        for j, span in _cut(module, counts).items():
            spans[j][module.name] = span
    return _layout(model, num_ranks, spans, encoders_in_first_stage=bool(plain))


def blocks_of_stages(layout: Layout, model: ModelSpec) -> list[dict[str, int]] | None:
    """Return the number of blocks of each module in every stage. None: the layout has no such form."""
    stages: list[dict[str, int]] = []
    ranks: list[int] = []
    for chunk in layout.chunks:
        if not ranks or ranks[-1] != chunk.rank:
            ranks.append(chunk.rank)
            stages.append({})
        count = sum(chunk.layers[0] <= block <= chunk.layers[1] for block in _blocks(model.module(chunk.module)))
        stages[-1][chunk.module] = stages[-1].get(chunk.module, 0) + count
    try:
        again = layout_of_stages(model, layout.num_ranks, stages)
    except InputError:
        return None
    return stages if again.chunks == layout.chunks else None


def _blocks(module: ModuleSpec) -> list[int]:
    """Return the positions of the blocks of a module, or of all layers if it has no blocks."""
    layers = module.flat_layers
    return [i for i, layer in enumerate(layers) if layer.kind.startswith("block")] or list(range(len(layers)))


def _check(module: ModuleSpec, counts: Mapping[int, int], last_stage: int) -> None:
    total, blocks = sum(counts.values()), len(_blocks(module))
    if not counts or total != blocks or min(counts.values()) < 0:
        raise InputError("layout", f"has {total} blocks of {module.name}, the model {blocks}", "give all of them")
    if module.after and min(counts) < last_stage:
        raise InputError(
            "layout",
            f"{module.name} begins in stage {min(counts)}, before stage {last_stage} ends {', '.join(module.after)}",
            "write stages in model order",
        )


def _cut(module: ModuleSpec, counts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the first and last layer of every non-empty stage."""
    blocks, last = _blocks(module), len(module.flat_layers) - 1
    # First layer of every block, and the layer after the last block.
    begins = [*blocks, blocks[-1] + 1]
    spans: dict[int, tuple[int, int]] = {}
    first, done = 0, 0
    for j, count in counts.items():
        done += count
        end = last if j == max(counts) else begins[done] - 1
        if first <= end:
            spans[j] = (first, end)
            first = end + 1
    return spans


def _layout(
    model: ModelSpec, num_ranks: int, stages: Sequence[Spans], *, encoders_in_first_stage: bool = False
) -> Layout:
    if encoders_in_first_stage:
        stages[0].update((module.name, (0, len(module.flat_layers) - 1)) for module in model.modules[:-1])
    chunks = [
        Chunk(module.name, stage[module.name], j % num_ranks)
        for j, stage in enumerate(stages)
        for module in model.modules
        if module.name in stage
    ]
    return Layout(num_ranks, tuple(ModuleLayout.of(m) for m in model.modules), tuple(chunks))
