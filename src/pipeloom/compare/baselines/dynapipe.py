"""DynaPipe: microbatches of samples of similar length, and a schedule for microbatches of different lengths.

Source: arXiv 2311.10418 and its authors' public code. Differences from the paper:

- Packed documents attend only to themselves, and DynaPipe's samples have no padding, even if the current run pads. So
  a sample's time does not depend on its microbatch.
- Stages consist of encoder and language model layers, balanced by time; the paper has equal numbers of layers.
- A sample's length is that of its sequence, images included.
- Times are linear in tokens and squared lengths, and activations in tokens, both taken from the cost model.
- Clusters of microbatches are equal parts by time, instead of k-means.
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
from pipeloom.compare.result import BaselineResult, fastest, timed
from pipeloom.cost import rank_static_bytes
from pipeloom.errors import InfeasibleError
from pipeloom.layout import chain_of_stages
from pipeloom.packing.loads import marginal_cost
from pipeloom.search import Budget, uniform_settings
from pipeloom.search.stage_chain import chain_of
from pipeloom.spec import Chunk, ChunkStrategy, Layout, Sample, Workload
from pipeloom.taskgraph import TaskGraph

NAME = "DynaPipe"
RECOMPUTED = (ChunkStrategy("keep"), ChunkStrategy("selective"), ChunkStrategy("recompute", 1.0))
"""Recomputation for which microbatches are made: none, selective and full, as in the paper."""
MANY, CLUSTERS = 20, (4, 3)
"""Number of clusters that are permuted, for up to `MANY` microbatches and for more."""


def dynapipe(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Make DynaPipe: one chain of stages, and the fastest microbatches, order and recomputation for every iteration.

    Tried are the given microbatches, and microbatches made for each kind of recomputation, where each may use all
    memory or an equal share for as many microbatches as ranks. If stages of equal time do not fit, they are balanced
    partly by parameters, or by nnScaler's algorithm with one recomputation setting.
    """
    chains = [chain_of_stages(setting.model, setting.num_ranks, 1, load) for load in loads_by_time(setting, batches)]
    layouts = dict.fromkeys([*chains, *stages_that_fit(setting, batches)])
    return in_turn(NAME, [_system(setting, layout) for layout in layouts], batches, seconds=setting.iteration_s)


def _system(setting: ModelOnCluster, layout: Layout) -> System:
    def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
        found: list[BaselineResult] = []
        for tried in _packings(setting, layout, microbatches):
            with suppress(InfeasibleError):
                found.append(_scheduled(layout, graph_of(setting, layout, tried, NAME, setting.levels)))
        return fastest(NAME, found)

    return System(NAME, layout, run)


def _packings(setting: ModelOnCluster, layout: Layout, microbatches: Microbatches) -> Iterator[Microbatches]:
    """Yield the given microbatches, and those of dynamic programming for each kind of recomputation."""
    yield microbatches
    if not packs_anew(setting):
        return
    samples = sorted((s for microbatch in microbatches for s in microbatch), key=lambda s: -s.sequence_tokens)
    known = set()
    for strategy in RECOMPUTED:
        for together in (setting.num_ranks, 1):
            with suppress(InfeasibleError):
                cuts = dynamic_microbatches(stage_loads(setting, layout, samples, strategy, together))
                if cuts not in known:
                    known.add(cuts)
                    yield [samples[first:end] for first, end in cuts]


def stage_loads(
    setting: ModelOnCluster, layout: Layout, samples: Sequence[Sample], strategy: ChunkStrategy, together: int
) -> StageLoads:
    """Return the loads of samples on every rank of a chain of stages, if ``together`` microbatches share memory."""
    shape = layout.num_ranks, len(samples)
    seconds, held, fixed = np.zeros(shape), np.zeros(shape), np.zeros(layout.num_ranks)
    static = rank_static_bytes(setting.levels, layout)
    level = setting.levels.strategies.index(strategy)
    for chunk in layout.chunks:
        lengths = [setting.model.module(chunk.module).instance_lengths(sample) for sample in samples]
        every = [n for each in lengths for n in each if n > 0]
        if not every:
            continue
        mean = round(sum(every) / len(every))
        marginal = marginal_cost(setting.levels, (chunk,), mean)
        typical = Workload((mean,) * 8)
        costs = setting.levels.chunk_costs(chunk, typical)
        base = costs[0].forward_s + costs[0].backward_s
        # Recomputation increases the time of a stage by the same factor for all samples.
        factor = (costs[level].forward_s + costs[level].backward_s) / base
        fixed[chunk.rank] += factor * max(0.0, base - marginal.of(typical.lengths))
        seconds[chunk.rank] += factor * np.array([marginal.of(each) for each in lengths])
        held[chunk.rank] += costs[level].activation_bytes / typical.num_tokens * np.array([sum(n) for n in lengths])
    free_bytes = (setting.capacity_bytes - static - _work_bytes(setting, layout, samples)) / together
    return StageLoads(seconds, fixed, held, free_bytes)


def _work_bytes(setting: ModelOnCluster, layout: Layout, samples: Sequence[Sample]) -> int:
    """Return the largest workspace of the longest sample; larger microbatches need more and may not fit."""

    def need(chunk: Chunk) -> int:
        lengths = setting.model.module(chunk.module).instance_lengths(samples[0])
        return setting.levels.workspace_bytes(chunk, Workload(lengths)) if lengths else 0

    return max(need(chunk) for chunk in layout.chunks)


def _scheduled(layout: Layout, graph: TaskGraph) -> BaselineResult:
    """Return the fastest order and setting for given microbatches; raise `InfeasibleError` if none fits."""
    fitting: list[BaselineResult] = []
    chain, injections = chain_of(graph), _injections(graph)
    for setting in uniform_settings(graph):
        choice = np.full(graph.num_pairs, setting)
        fixed = graph.with_candidates(choice)
        free = False
        for injection in injections:
            # Try without a memory limit first, then with delayed forwards.
            for limit in (None, graph.headroom_bytes):
                try:
                    order = memory_aware_1f1b(fixed, injection, limit, chain=chain)
                except InfeasibleError:
                    break
                found = timed(NAME, layout, graph, order, choice)
                if found.fits:
                    fitting.append(found)
                    free = free or limit is None
                    break
        if free:
            # Settings that hold less cannot be faster.
            break
    return fastest(NAME, fitting)


def _injections(graph: TaskGraph) -> list[tuple[int, ...]]:
    """Return orders of the microbatches: the given one, and all permutations of clusters of similar time."""
    seconds = np.bincount(graph.microbatch, weights=graph.duration_ns)
    original = tuple(range(len(seconds)))
    ranked = np.argsort(seconds, kind="stable")
    clusters = [part.tolist() for part in np.array_split(ranked, CLUSTERS[len(original) > MANY]) if part.size]
    return list(dict.fromkeys([original, *(tuple(i for c in some for i in c) for some in permutations(clusters))]))
