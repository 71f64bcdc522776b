"""`PipelineModel`: the layers of a model on pipeline ranks, and the workloads of samples."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeloom.emulator.build import Placement, module_templates, stream_template
from pipeloom.emulator.stage import Run, Stage, runs_of
from pipeloom.emulator.static import static_bytes
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import ChunkStrategy, Sample, Strategy, Workload, chunk_strategy
from pipeloom.spec.architecture import Architecture, ResidualLayer

Work = Mapping[str, Sequence[Workload]]
"""One microbatch: sub-microbatches of each module. Empty: the module has nothing to do."""


def work_of(
    architecture: Architecture, samples: Sequence[Sample], sub_microbatch: Mapping[str, int] | None = None
) -> dict[str, tuple[Workload, ...]]:
    """Return a microbatch's workloads per module, split evenly into sub-microbatches of limited size."""
    out = {}
    for module in architecture.modules:
        lengths = [n for sample in samples for n in module.lengths(sample) if n > 0]
        size = (sub_microbatch or {}).get(module.name)
        parts = 1 if size is None else -(-len(lengths) // size)
        bounds = [round(len(lengths) * k / parts) for k in range(parts + 1)] if parts else []
        out[module.name] = tuple(Workload(tuple(lengths[a:b])) for a, b in itertools.pairwise(bounds) if b > a)
    return out


class Stream(NamedTuple):
    """A stream from a chunk of one module to a chunk of another."""

    source: tuple[str, int]
    target: tuple[str, int]
    template: LayerTemplate
    """Template whose output on the source's workload is the stream."""


class PipelineModel:
    """A model's layers on the ranks of a pipeline. Each module is divided over all ranks (DIP §4).

    Parameters
    ----------
    typical : Work
        Workload by which each module's layers are divided evenly.
    segments : mapping from module name to int
        Chunks per rank; default 1.
    """

    def __init__(
        self, architecture: Architecture, placement: Placement, typical: Work, segments: Mapping[str, int] | None = None
    ) -> None:
        self.architecture, self.placement = architecture, placement
        self.num_ranks = placement.degrees.pipeline
        self.layers: dict[str, tuple[LayerTemplate, ...]] = {}
        self.cuts: dict[str, tuple[int, ...]] = {}
        for module in architecture.modules:
            layers = module_templates(architecture, module, placement)
            parts = self.num_ranks * (segments or {}).get(module.name, 1)
            if len(layers) < parts:
                raise InputError(
                    f"module {module.name!r}",
                    f"has {len(layers)} layers for {parts} chunks",
                    "lower pipeline parallelism or segments",
                )
            if len(layers) * parts > _MOST_CUTS:
                problem = f"{len(layers)} layers times {parts} chunks are more than {_MOST_CUTS}"
                raise InputError(f"module {module.name!r}", problem, "lower pipeline parallelism or segments")
            work = list(typical.get(module.name, ()))
            self.layers[module.name] = layers
            self.cuts[module.name] = split_evenly(_weights(layers, work), parts)
        self.static_bytes = tuple(
            static_bytes([t for name in self.layers for t in self.layers_of(name, rank)], placement.degrees)
            for rank in range(self.num_ranks)
        )

        self.streams = self._streams()

    def _streams(self) -> tuple[Stream, ...]:
        modules = self.architecture.modules
        takers = {end.stream: (module.name, end.layer) for module in modules for end in module.takes}
        found = []
        for module in modules:
            for end in module.emits:
                layer, (taker, taking) = module.flat_layers[end.layer], takers[end.stream]
                assert isinstance(layer, ResidualLayer)
                source, target = self._chunk_of(module.name, end.layer), self._chunk_of(taker, taking)
                if source != target:
                    found.append(Stream(source, target, stream_template(layer, self.placement)))
        return tuple(found)

    def _chunk_of(self, module: str, layer: int) -> tuple[str, int]:
        return module, bisect.bisect_right(self.cuts[module], layer) - 1

    def chunks(self, module: str) -> range:
        """Return the chunk numbers of a module. Chunk i is on rank i modulo the number of ranks."""
        return range(len(self.cuts[module]) - 1)

    def chunk_layers(self, module: str, chunk: int) -> tuple[LayerTemplate, ...]:
        """Return the layers of one chunk."""
        cuts = self.cuts[module]
        return self.layers[module][cuts[chunk] : cuts[chunk + 1]]

    def layers_of(self, module: str, rank: int) -> tuple[LayerTemplate, ...]:
        """Return the layers of a module on one rank."""
        own = [c for c in self.chunks(module) if c % self.num_ranks == rank]
        return tuple(t for c in own for t in self.chunk_layers(module, c))

    def layers_on(self, rank: int) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return first and last layer of each of a rank's chunks, by module."""
        return {
            name: tuple((cuts[c], cuts[c + 1] - 1) for c in self.chunks(name) if c % self.num_ranks == rank)
            for name, cuts in self.cuts.items()
        }

    def stages(self, strategy: ChunkStrategy | str) -> dict[str, list[Stage]]:
        """Return the stages of every module under one strategy."""
        chosen = chunk_strategy(strategy)
        known: dict[tuple[tuple[int, Strategy, int], ...], Stage] = {}

        def stage(runs: tuple[Run, ...]) -> Stage:
            return known.setdefault(tuple((id(r.layer), r.strategy, r.count) for r in runs), Stage(runs))

        return {
            name: [stage(runs_of(layers, chosen.layers(len(layers)))) for layers in self._chunked(name)]
            for name in self.layers
        }

    def _chunked(self, name: str) -> list[tuple[LayerTemplate, ...]]:
        return [self.chunk_layers(name, chunk) for chunk in self.chunks(name)]


_MOST_CUTS = 500_000
"""Largest number of layers times chunks of a module, so that cutting takes seconds at most."""


def _weights(layers: Sequence[LayerTemplate], work: Sequence[Workload]) -> list[int]:
    if not work:
        return [1] * len(layers)
    known: dict[int, int] = {}
    for layer in layers:
        if id(layer) not in known:
            stage = Stage(runs_of([layer]))
            known[id(layer)] = sum(sum(stage.cost(w, ("F", "B")).duration_ps.values()) for w in work)
    return [known[id(layer)] for layer in layers]


def split_evenly(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Cut a chain into consecutive non-empty parts so that the heaviest part is as light as possible.

    Returns
    -------
    tuple of int
        ``parts + 1`` cuts: the first is 0, the last is the number of weights.
    """
    total = np.concatenate([[0], np.cumsum(weights)])
    n = len(weights)
    best = np.full((parts + 1, n + 1), np.iinfo(np.int64).max)
    cut = np.zeros((parts + 1, n + 1), np.int64)
    best[0, 0] = 0
    for p in range(1, parts + 1):
        for end in range(p, n + 1):
            begins = np.arange(p - 1, end)
            heaviest = np.maximum(best[p - 1, begins], total[end] - total[begins])
            # Among equal choices, take the latest begin, so that the first parts get enough layers.
            k = len(begins) - 1 - int(np.argmin(heaviest[::-1]))
            best[p, end], cut[p, end] = heaviest[k], begins[k]
    cuts = [n]
    for p in range(parts, 0, -1):
        cuts.append(int(cut[p, cuts[-1]]))
    return tuple(reversed(cuts))
