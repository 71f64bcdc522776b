"""Stages: layers on one rank as reusable subgraphs, with their durations and bytes.

A stage is a chain of layers, so its matrix is the product of theirs. A run of equal layers is a power.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeloom.emulator.kernels import NEVER, compose
from pipeloom.emulator.program import Part
from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.subgraph import SIZE
from pipeloom.emulator.template import EvaluatedLayer, LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import Strategy, Workload
from pipeloom.totals import check_total


@dataclass(frozen=True)
class Run:
    """``count`` equal layers in a row under one strategy."""

    layer: LayerTemplate
    strategy: Strategy
    count: int


def runs_of(layers: Sequence[LayerTemplate], strategies: Sequence[Strategy] | Strategy = "keep") -> tuple[Run, ...]:
    """Group equal neighbors of a chain of layers, with one strategy for all, or one each."""
    each = [strategies] * len(layers) if isinstance(strategies, str) else list(strategies)
    pairs = itertools.groupby(zip(layers, each, strict=True), key=lambda pair: (id(pair[0]), pair[1]))
    return tuple(Run(items[0][0], items[0][1], len(items)) for items in (list(group) for _, group in pairs))


@dataclass(frozen=True)
class StageCost:
    """Costs of a stage on one workload: picoseconds of each part when it runs alone, and bytes held between them."""

    duration_ps: dict[Part, int]
    activation_bytes: int
    weight_gradient_bytes: int
    host_bytes: int


class Stage:
    """A chain of layers under strategies."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        for run in self.runs:
            if run.strategy not in run.layer.passes:
                raise InputError(
                    f"strategy {run.strategy!r}",
                    "needs a link to the host, the device has none",
                    "give pcie_bytes_per_s or choose another strategy",
                )

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Passes of the stage: only F if no gradient flows back."""
        backs = any("B" in run.layer.passes[run.strategy].programs for run in self.runs)
        return ("F", "B", "I", "W") if backs else ("F",)

    @functools.cached_property
    def _ordered(self) -> dict[Part, tuple[int, ...]]:
        """Numbers of the runs that have a part, in the order of execution."""
        out: dict[Part, tuple[int, ...]] = {}
        for part in self.parts:
            numbers = [i for i, r in enumerate(self.runs) if part in r.layer.passes[r.strategy].programs]
            out[part] = tuple(numbers if part == "F" else reversed(numbers))
        return out

    @functools.cached_property
    def _distinct(self) -> tuple[tuple[LayerTemplate, Strategy], ...]:
        """Layers and strategies of the runs, each once."""
        return tuple({(id(run.layer), run.strategy): (run.layer, run.strategy) for run in self.runs}.values())

    def _evaluated(self, workload: Workload) -> list[EvaluatedLayer]:
        """Return the evaluated layer of every run."""
        known = {id(layer): layer.on(workload) for layer, _ in self._distinct}
        return [known[id(run.layer)] for run in self.runs]

    def matrix(self, workload: Workload, part: Part) -> IntArray:
        """Return the max-plus matrix of one pass, shape (`SIZE`, `SIZE`)."""
        return self._matrix(self._evaluated(workload), part)

    def _matrix(self, layers: Sequence[EvaluatedLayer], part: Part) -> IntArray:
        out: IntArray | None = None
        ordered = self._ordered.get(part, ())
        total = sum(layers[i].leaves[self.runs[i].strategy, part].total_ps * self.runs[i].count for i in ordered)
        check_total("layers of a stage", total, "ps")
        for i in ordered:
            run = self.runs[i]
            power = layers[i].leaves[run.strategy, part].repeated(run.count)
            out = power if out is None else compose(power, out)
        if out is None:
            out = np.full((SIZE, SIZE), NEVER, np.int64)
            np.fill_diagonal(out, 0)
        return out

    def cost(self, workload: Workload, parts: Sequence[Part] | None = None) -> StageCost:
        """Return durations of the requested parts, and bytes, on one workload."""
        evaluated = self._evaluated(workload)
        layers = list(zip(self.runs, evaluated, strict=True))
        chosen = self.parts if parts is None else [p for p in parts if p in self.parts]
        return StageCost(
            {part: max(0, int(self._matrix(evaluated, part).max())) for part in chosen},
            sum(layer.activation_bytes[run.strategy] * run.count for run, layer in layers)
            + self._entering_bytes(layers),
            sum(layer.weight_gradient_bytes[run.strategy] * run.count for run, layer in layers),
            sum(layer.host_bytes[run.strategy] * run.count for run, layer in layers),
        )

    def _entering_bytes(self, layers: Sequence[tuple[Run, EvaluatedLayer]]) -> int:
        """Return the bytes of the inputs of blocks that are held for them: neighbors under one strategy are a block."""
        begins = [True, *(a.strategy != b.strategy for a, b in itertools.pairwise(self.runs))]
        return sum(
            layer.entering_bytes[run.strategy] for begin, (run, layer) in zip(begins, layers, strict=True) if begin
        )

    def model_flops(self, workload: Workload) -> float:
        """Return the operations of the forward's matrix products on one device."""
        return sum(run.layer.on(workload).model_flops * run.count for run in self.runs)

    def workspace_bytes(self, workload: Workload) -> int:
        """Return the peak bytes of any pass of any layer beyond its inputs, kept tensors and outputs."""
        most = 0
        for layer, strategy in self._distinct:
            for part in ("F", "B"):
                if part in layer.passes[strategy].programs:
                    memory = layer.memory(workload, strategy, part)
                    most = max(most, memory.peak - (memory.exit if part == "F" else memory.entry))
        return most

    def peak_bytes(self, workload: Workload) -> int:
        """Return the peak bytes of the stage in forward and backward beyond what it holds between them.

        Layers that have not run yet in the forward, or have already run in the backward, hold nothing.
        """
        most = idle = 0
        for run, layer in zip(reversed(self.runs), reversed(self._evaluated(workload)), strict=True):
            held = layer.activation_bytes[run.strategy]
            for part in ("F", "B"):
                if part in run.layer.passes[run.strategy].programs:
                    peak = run.layer.memory(workload, run.strategy, part).peak
                    most = max(most, peak - held - idle)
            idle += held * run.count
        return most
