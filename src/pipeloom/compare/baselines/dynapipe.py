"""DynaPipe as its users run it: microbatches of samples of like length, and a schedule that takes unlike ones.

Source: arXiv 2311.10418, and the public code of its authors. What is ours: packed documents attend to themselves
alone and nothing is padded here, so a sample's time does not depend on what it is put together with, and the gain over
padding that the paper is about is had by every system. A stage is a run of layers of encoders and language model,
cut by time, where the paper has as many layers on each. A sample's length is that of its sequence, images in it. Times
of samples are linear in tokens and squared lengths, and activations in tokens, read off the cost model. Clusters of
microbatches are equal parts of them by time, in place of k-means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import permutations

import numpy as np

from pipeloom.compare.baseline import System, in_turn, loads_by_time
from pipeloom.compare.baselines.dynapipe_batches import StageLoads, dynamic_microbatches, memory_aware_1f1b
from pipeloom.compare.baselines.nnscaler import stages_that_fit
from pipeloom.compare.gain import packs_anew
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, graph_of
from pipeloom.compare.result import BaselineResult
from pipeloom.cost import rank_static_bytes
from pipeloom.errors import InfeasibleError
from pipeloom.layout import chain_of_stages
from pipeloom.packing.loads import marginal_cost
from pipeloom.search import StoppingRule, uniform_settings
from pipeloom.spec import Chunk, ChunkStrategy, Layout, Sample, Workload
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, Timeline, lower_bound, simulate, within_limits

NAME = "DynaPipe"
RECOMPUTED = (ChunkStrategy("keep"), ChunkStrategy("selective"), ChunkStrategy("recompute", 1.0))
"""For which microbatches are made: the paper's none, selective and full."""
MANY, CLUSTERS = 20, (4, 3)
"""Clusters of microbatches that change places: of up to so many microbatches, and of more."""


def dynapipe(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """One chain of stages, and for every iteration the microbatches, order and recomputation that are fastest.

    Tried are microbatches made for each kind of recomputation, with as much memory for one as lets every rank hold as
    many as there are ranks, or with all of it, and those that were given. Where stages of equal time do not fit, they
    are cut partly by parameters, or as nnScaler does with one setting of recomputation for all.
    """
    chains = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in loads_by_time(case, batches)]
    layouts = dict.fromkeys([*chains, *stages_that_fit(case, batches)])
    return in_turn(NAME, [_system(case, layout) for layout in layouts], batches)


def _system(case: ModelOnCluster, layout: Layout) -> System:
    def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
        found: list[BaselineResult] = []
        for tried in _packings(case, layout, groups):
            with suppress(InfeasibleError):
                found.append(_scheduled(layout, graph_of(case, layout, tried, NAME, case.levels)))
        if not found:
            raise InfeasibleError(f"{NAME}: does not fit even with full recomputation")
        return min(found, key=lambda one: one.iteration_s)

    return System(NAME, layout, run)


def _packings(case: ModelOnCluster, layout: Layout, groups: Microbatches) -> Iterator[Microbatches]:
    """The microbatches given, and those that dynamic programming makes for each kind of recomputation."""
    yield groups
    if not packs_anew(case):
        return
    samples = sorted((s for group in groups for s in group), key=lambda s: -s.sequence_tokens)
    known = set()
    for strategy in RECOMPUTED:
        for together in (case.num_ranks, 1):
            with suppress(InfeasibleError):
                cuts = dynamic_microbatches(stage_loads(case, layout, samples, strategy, together))
                if cuts not in known:
                    known.add(cuts)
                    yield [samples[first:end] for first, end in cuts]


def stage_loads(
    case: ModelOnCluster, layout: Layout, samples: Sequence[Sample], strategy: ChunkStrategy, together: int
) -> StageLoads:
    """What samples take on every rank of a chain of stages, if so many microbatches have room together."""
    shape = layout.num_ranks, len(samples)
    seconds, held, fixed = np.zeros(shape), np.zeros(shape), np.zeros(layout.num_ranks)
    static = rank_static_bytes(case.levels, layout)
    level = case.levels.strategies.index(strategy)
    for chunk in layout.chunks:
        lengths = [case.model.module(chunk.module).instance_lengths(sample) for sample in samples]
        every = [n for each in lengths for n in each if n > 0]
        if not every:
            continue
        mean = round(sum(every) / len(every))
        marginal = marginal_cost(case.levels, (chunk,), mean)
        typical = Workload((mean,) * 8)
        costs = case.levels.chunk_costs(chunk, typical)
        base = costs[0].forward_s + costs[0].backward_s
        # Recomputation lengthens a stage by the same factor for all samples.
        factor = (costs[level].forward_s + costs[level].backward_s) / base
        fixed[chunk.rank] += factor * max(0.0, base - marginal.of(typical.lengths))
        seconds[chunk.rank] += factor * np.array([marginal.of(each) for each in lengths])
        held[chunk.rank] += costs[level].activation_bytes / typical.num_tokens * np.array([sum(n) for n in lengths])
    room = (case.capacity_bytes - static - _work_bytes(case, layout, samples)) / together
    return StageLoads(seconds, fixed, held, room)


def _work_bytes(case: ModelOnCluster, layout: Layout, samples: Sequence[Sample]) -> int:
    """What the longest sample's pass needs on any rank; larger microbatches need more, and may then not fit."""

    def need(chunk: Chunk) -> int:
        lengths = case.model.module(chunk.module).instance_lengths(samples[0])
        return case.levels.workspace_bytes(chunk, Workload(lengths)) if lengths else 0

    return max(need(chunk) for chunk in layout.chunks)


def _scheduled(layout: Layout, graph: TaskGraph) -> BaselineResult:
    """The fastest order and setting of recomputation for some microbatches.

    Raises
    ------
    InfeasibleError
        None fits.
    """
    best: tuple[Timeline, Schedule] | None = None
    for setting in uniform_settings(graph):
        choice = np.full(graph.num_pairs, setting)
        fixed = graph.with_candidates(choice)
        free = False
        for injection in _injections(graph):
            # First as if there were memory enough, then with forwards put off.
            for limit in (None, graph.room_bytes):
                try:
                    order = memory_aware_1f1b(fixed, injection, limit)
                except InfeasibleError:
                    break
                chosen = Schedule(order.order, choice, NAME)
                timeline = simulate(graph, chosen)
                fits = within_limits(graph, chosen, timeline)
                if fits and (best is None or timeline.makespan_ns < best[0].makespan_ns):
                    best = timeline, chosen
                free = free or (fits and limit is None)
                if fits:
                    break
        if free:
            # With less held nothing could be faster.
            break
    if best is None:
        raise InfeasibleError(f"{NAME}: does not fit even with full recomputation")
    return BaselineResult(NAME, layout, graph, best[1], best[0], lower_bound(graph))


def _injections(graph: TaskGraph) -> list[tuple[int, ...]]:
    """Orders of the microbatches: as they are, and clusters of like time in every order."""
    seconds = np.bincount(graph.microbatch, weights=graph.duration_ns)
    given = tuple(range(len(seconds)))
    ranked = np.argsort(seconds, kind="stable")
    clusters = [part.tolist() for part in np.array_split(ranked, CLUSTERS[len(given) > MANY]) if part.size]
    return list(dict.fromkeys([given, *(tuple(i for c in some for i in c) for some in permutations(clusters))]))
