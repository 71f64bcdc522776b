"""Chunks of a described model: their traced layers, and stages of them under memory strategies."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TypeVar

import msgspec

from pipeloom.emulator.build import Placement, module_templates, untied
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import Chunk, ChunkStrategy, Strategy, Workload
from pipeloom.spec.architecture import Architecture

CACHE_SIZE = 16384
"""Maximum number of entries of a cache."""
Key = TypeVar("Key")
Value = TypeVar("Value")
_KEEP = ChunkStrategy("keep")

ChunkShape = tuple[tuple[int, int], ...]
"""A chunk as runs of equal layers: the identity of their template, and their number."""


class ChunkStages:
    """Traced layers and stages of chunks. Chunks with equal layers under equal strategies share a stage."""

    def __init__(self, architecture: Architecture, placement: Placement) -> None:
        self._layers = {m.name: module_templates(architecture, m, placement) for m in architecture.modules}
        self._copies = {} if placement.degrees.pipeline == 1 else _copies(architecture, placement)
        self._stages: dict[tuple[str, tuple[int, int], tuple[Strategy, ...]], Stage] = {}
        self._shared: dict[tuple[tuple[int, str, int], ...], Stage] = {}
        self._shapes: dict[tuple[str, tuple[int, int]], ChunkShape] = {}
        self._in_blocks = placement.trainer.in_blocks
        self._workspaces: OrderedDict[tuple[ChunkShape, Workload, tuple[ChunkStrategy, ...]], int] = OrderedDict()

    def layers(self, chunk: Chunk) -> tuple[LayerTemplate, ...]:
        """Return the layers of a chunk. Raise `InputError` if it goes beyond the model's.

        If a chunk ends with a tied head and does not begin with the embedding, its rank has a copy of the table.
        """
        layers = self._layers.get(chunk.module)
        if layers is None:
            raise InputError(f"module {chunk.module!r}", "is unknown", f"the model has {', '.join(self._layers)}")
        if chunk.layers[1] >= len(layers):
            raise InputError(
                f"chunk of {chunk.module!r}.layers", f"{list(chunk.layers)} goes beyond layer {len(layers) - 1}"
            )
        first, last = chunk.layers
        if first and last == len(layers) - 1 and chunk.module in self._copies:
            return *layers[first:last], self._copies[chunk.module]
        return layers[first : last + 1]

    def stage(self, chunk: Chunk, strategy: ChunkStrategy | tuple[Strategy, ...] = _KEEP) -> Stage:
        """Return a chunk as a stage under a strategy, or under one for each layer."""
        if isinstance(strategy, ChunkStrategy):
            strategy = strategy.layers(chunk.layers[1] - chunk.layers[0] + 1)
        key = (chunk.module, chunk.layers, strategy)
        if key not in self._stages:
            runs = runs_of(self.layers(chunk), strategy)
            shape = tuple((id(r.layer), r.strategy, r.count) for r in runs)
            self._stages[key] = self._shared.setdefault(shape, Stage(runs))
        return self._stages[key]

    def shape(self, chunk: Chunk) -> ChunkShape:
        """Return the key of chunks with equal layers, at any position in the module."""
        where = (chunk.module, chunk.layers)
        if where not in self._shapes:
            runs = itertools.groupby(self.layers(chunk), key=id)
            self._shapes[where] = tuple((layer, len(list(run))) for layer, run in runs)
        return self._shapes[where]

    def workspace_bytes(self, chunk: Chunk, workload: Workload, strategies: tuple[ChunkStrategy, ...]) -> int:
        """Return the largest workspace of a chunk under any of the strategies that its layers have, cached."""
        key = (self.shape(chunk), workload, strategies)
        known = self._workspaces.get(key)
        if known is None:
            layers = self.layers(chunk)
            usable = [each for each in strategies if all(word in layers[0].passes for word in each.layers(len(layers)))]
            stages = [self.stage(chunk, each) for each in usable or strategies]
            # The larger bound is the one of the recorded evaluation.
            of = Stage.peak_bytes if self._in_blocks else Stage.workspace_bytes
            known = keep(self._workspaces, key, max(of(stage, workload) for stage in stages))
        return known


def _copies(architecture: Architecture, placement: Placement) -> dict[str, LayerTemplate]:
    """Return the templates of tied heads with their own weights, by module."""
    found = {}
    for module in architecture.modules:
        head = untied(module.layers[-1])
        if head != module.layers[-1]:
            own = msgspec.structs.replace(module, layers=(*module.layers[:-1], head))
            found[module.name] = module_templates(architecture, own, placement)[-1]
    return found


def keep(cache: OrderedDict[Key, Value], key: Key, value: Value) -> Value:
    """Add an entry to a cache and return its value. A full cache loses its first entry."""
    cache[key] = value
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)
    return value
