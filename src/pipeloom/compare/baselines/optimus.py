"""Optimus, coarse- and fine-grained: encoders run before the language model, or in its bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from pipeloom.compare.baseline import System, by_parameters, by_time, distinct, fixed_system, in_turn
from pipeloom.compare.baselines.optimus_orders import optimus_coarse, optimus_fine
from pipeloom.compare.baselines.replicated_encoders import ReplicatedEncoderCosts
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, graph_of
from pipeloom.compare.recomputation import per_module_recomputation
from pipeloom.compare.result import BaselineResult, fastest
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.layout.layouts import chunk_counts
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import Budget, interleaved_one_f_one_b, uniform_settings
from pipeloom.spec import Chunk, Layout, ModelSpec

PIECES = 4
"""Number of pieces of an encoder's stage, to fill bubbles."""


def has_encoders(model: ModelSpec) -> bool:
    """Return whether a model has encoders before a language model, as Optimus requires."""
    return len(model.modules) > 1 and model.modules[-1].reads != "videos"


def optimus(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Make coarse-grained Optimus: encoders on all ranks before the backbone, their backwards after it."""
    name = "Optimus coarse"
    layouts = encoders_apart(setting, batches)
    options = [fixed_system(name, setting, layout, optimus_coarse, per_module_recomputation) for layout in layouts]
    return in_turn(name, options, batches, encoders_first(name, setting, layouts), seconds=setting.iteration_s)


def optimus_bubbles(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Make fine-grained Optimus: encoders run in the bubbles of the backbone's pipeline, in pieces of a few layers.

    An encoder is a pipeline over all ranks, or whole on each rank, whichever is faster on the sampled iterations:
    Optimus chooses the encoders' parallelism independently. The optimizer state of whole encoders is sharded over all
    ranks. Bubbles depend on recomputation, so there is one order per setting, and each order uses its fastest settings
    of backbone and encoders. The coarse order is also tried, since Optimus starts with it.
    """
    name = "Optimus fine"

    def system(layout: Layout, costs: EmulatedCosts) -> System:
        update_ns = replace(setting, costs=costs).update_ns(layout)

        def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
            graph = graph_of(setting, layout, microbatches, name, costs)
            orders = [optimus_coarse(graph)]
            for level in uniform_settings(graph):
                choice = np.full(graph.num_pairs, level)
                orders.append(optimus_fine(graph.with_candidates(choice)))
            found = []
            for order in orders:
                with suppress(InfeasibleError):
                    found.append(per_module_recomputation(name, layout, graph, order))
            return replace(fastest(name, found), update_ns=update_ns)

        return System(name, layout, run)

    apart = encoders_apart(setting, batches)
    options = [system(_in_pieces(layout, PIECES), setting.levels) for layout in apart]
    if setting.num_ranks > 1:
        whole = ReplicatedEncoderCosts(setting)
        options += [system(_on_every_rank(setting, batches, layout, PIECES), whole) for layout in apart]
    return in_turn(name, options, batches, encoders_first(name, setting, apart), seconds=setting.iteration_s)


def encoders_first(name: str, setting: ModelOnCluster, layouts: Sequence[Layout]) -> list[System]:
    """Make interleaved 1F1B, which encodes on demand, for iterations whose encodings do not all fit at once."""
    return [
        fixed_system(name, setting, layout, interleaved_one_f_one_b, per_module_recomputation) for layout in layouts
    ]


def encoders_apart(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> list[Layout]:
    """Return separated layouts with every possible number of backbone chunks per rank, by time and by parameters."""
    if len(setting.model.modules) < 2:
        raise InputError("model", "has one module", "Optimus needs encoders and a backbone")
    backbone = setting.model.modules[-1]
    counts = chunk_counts(setting.num_ranks, [backbone])
    layouts = [
        separate(setting.model, setting.num_ranks, {backbone.name: ModulePlacement(v)}, load)
        for load in (by_time(setting, batches), by_parameters(setting, batches))
        for v in counts
    ]
    return distinct(layouts)


def _in_pieces(layout: Layout, pieces: int) -> Layout:
    """Cut every chunk of an encoder into at most ``pieces`` chunks on the same rank."""
    chunks: list[Chunk] = []
    for chunk in layout.chunks:
        first, last = chunk.layers
        count = 1 if chunk.module == layout.modules[-1].name else min(pieces, last - first + 1)
        ends = [first + (last - first + 1) * k // count for k in range(count + 1)]
        chunks += [Chunk(chunk.module, (a, b - 1), chunk.rank) for a, b in pairwise(ends)]
    return msgspec.structs.replace(layout, chunks=tuple(chunks))


def _on_every_rank(setting: ModelOnCluster, batches: Sequence[Microbatches], layout: Layout, pieces: int) -> Layout:
    """Return the layout with whole encoders on each rank, and their microbatches in about ``pieces`` parts."""
    typical = typical_lengths(setting.model, [microbatch for microbatches in batches for microbatch in microbatches])
    encoders = [module.name for module in layout.modules[:-1]]
    modules = tuple(
        msgspec.structs.replace(module, sub_microbatch=max(1, -(-len(typical[module.name]) // pieces)))
        if module.name in encoders
        else module
        for module in layout.modules
    )
    return replicated(msgspec.structs.replace(layout, modules=modules), encoders)
