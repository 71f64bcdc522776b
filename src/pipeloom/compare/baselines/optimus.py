"""Optimus as its users run it, coarse- and fine-grained: encoders before the language model, or in its bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from pipeloom.compare.baseline import System, by_parameters, by_time, fixed_system, in_turn, replica_seconds
from pipeloom.compare.baselines.optimus_orders import optimus_coarse, optimus_fine
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, graph_of
from pipeloom.compare.recomputation import per_module_recomputation
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.layout.layouts import chunk_counts
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import StoppingRule, interleaved_one_f_one_b, uniform_settings
from pipeloom.spec import Chunk, Layout, ModelSpec

PIECES = 4
"""Of an encoder's stage, to fill bubbles with."""


def has_encoders(model: ModelSpec) -> bool:
    """Whether a model has encoders before a language model, which is what Optimus is made for."""
    return len(model.modules) > 1 and model.modules[-1].reads != "videos"


def optimus(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Optimus, coarse-grained: encoders over all ranks before the backbone, their gradients after it."""
    name = "Optimus coarse"
    layouts = encoders_apart(case, batches)
    options = [fixed_system(name, case, layout, optimus_coarse, per_module_recomputation) for layout in layouts]
    return in_turn(name, options, batches, encoders_first(name, case, layouts))


def optimus_bubbles(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Optimus, fine-grained: encoders in the bubbles of the backbone's pipeline, in pieces of some layers.

    An encoder is a pipeline over all ranks, or one of its own on each rank, whichever is best on the sampled
    iterations: Optimus chooses the encoders' parallelism apart from the backbone's. Bubbles depend on what is
    recomputed, so an order is made for each setting, and each runs with the settings of backbone and encoders that are
    fastest with it. Optimus begins with the coarse order, so it is one of them.
    """
    name = "Optimus fine"

    def system(layout: Layout) -> System:
        def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
            graph = graph_of(case, layout, groups, name, case.levels)
            orders = [optimus_coarse(graph)]
            for level in uniform_settings(graph):
                choice = np.full(graph.num_pairs, level)
                orders.append(optimus_fine(graph.with_candidates(choice)))
            found = []
            for order in orders:
                with suppress(InfeasibleError):
                    found.append(per_module_recomputation(name, layout, graph, order))
            if not found:
                raise InfeasibleError(f"{name}: does not fit even with full recomputation")
            best = min(found, key=lambda each: each.timeline.makespan_ns)
            return replace(best, after_s=replica_seconds(case, layout))

        return System(name, layout, run)

    apart = encoders_apart(case, batches)
    layouts = [_in_pieces(layout, PIECES) for layout in apart]
    if case.num_ranks > 1:
        layouts += [_on_every_rank(case, batches, layout, PIECES) for layout in apart]
    return in_turn(name, [system(layout) for layout in layouts], batches, encoders_first(name, case, apart))


def encoders_first(name: str, case: ModelOnCluster, layouts: Sequence[Layout]) -> list[System]:
    """For an iteration whose encodings cannot be held all at once: interleaved 1F1B, each made when it is wanted."""
    return [fixed_system(name, case, layout, interleaved_one_f_one_b, per_module_recomputation) for layout in layouts]


def encoders_apart(case: ModelOnCluster, batches: Sequence[Microbatches]) -> list[Layout]:
    """Encoders and backbone over all ranks, the backbone with every number of chunks a rank that it has layers for.

    Modules are cut by time, and by parameters.
    """
    if len(case.model.modules) < 2:
        raise InputError("model", "has one module", "Optimus wants encoders and a backbone")
    backbone = case.model.modules[-1]
    counts = chunk_counts(case.num_ranks, [backbone])
    made = [
        separate(case.model, case.num_ranks, {backbone.name: ModulePlacement(v)}, load)
        for load in (by_time(case, batches), by_parameters(case, batches))
        for v in counts
    ]
    return list({layout.chunks: layout for layout in made}.values())


def _in_pieces(layout: Layout, pieces: int) -> Layout:
    """Cut every encoder's chunks into so many of the same rank, or as many as they have layers."""
    chunks: list[Chunk] = []
    for chunk in layout.chunks:
        first, last = chunk.layers
        count = 1 if chunk.module == layout.modules[-1].name else min(pieces, last - first + 1)
        ends = [first + (last - first + 1) * k // count for k in range(count + 1)]
        chunks += [Chunk(chunk.module, (a, b - 1), chunk.rank) for a, b in pairwise(ends)]
    return msgspec.structs.replace(layout, chunks=tuple(chunks))


def _on_every_rank(case: ModelOnCluster, batches: Sequence[Microbatches], layout: Layout, pieces: int) -> Layout:
    """Encoders whole on each rank, their microbatches in so many parts."""
    typical = typical_lengths(case.model, [group for groups in batches for group in groups])
    encoders = [module.name for module in layout.modules[:-1]]
    modules = tuple(
        msgspec.structs.replace(module, sub_microbatch=max(1, -(-len(typical[module.name]) // pieces)))
        if module.name in encoders
        else module
        for module in layout.modules
    )
    return replicated(msgspec.structs.replace(layout, modules=modules), encoders)
