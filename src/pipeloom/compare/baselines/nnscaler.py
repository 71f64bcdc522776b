"""nnScaler*: the best static stages for 1F1B on one representative microbatch (DIP §7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compare.baseline import System, by_parameters, fixed_systems, in_turn
from pipeloom.compare.model_on_cluster import (
    Microbatches,
    ModelOnCluster,
    graph_of,
    most_workspace_bytes,
    pack_microbatches,
)
from pipeloom.compare.recomputation import level_tables, per_rank_recomputation
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import chain_of_stages
from pipeloom.search import Budget, one_f_one_b
from pipeloom.spec import Chunk, Layout, ModuleLayout
from pipeloom.units import size_text

FloatArray = npt.NDArray[np.float64]


class StaticStages(NamedTuple):
    """Stages of a chain of layers: ``cuts`` has one more entry than stages, ``levels`` one strategy per stage."""

    cuts: tuple[int, ...]
    levels: tuple[int, ...]
    slowest_s: float


def best_stages(
    seconds: FloatArray, activation_bytes: FloatArray, static_bytes: FloatArray, num_stages: int, capacity_bytes: float
) -> StaticStages:
    """Cut a chain of layers for 1F1B so that the slowest stage is as fast as possible and every stage fits.

    Stage s of p holds p - s microbatches. The search is dynamic programming over (stages so far, layers so far), with
    the fastest strategy that fits for each stage. It is exact for this model of time and memory.

    ``seconds`` (forward and backward) and ``activation_bytes``, both on the representative microbatch, have the shape
    (num_levels, num_layers), and ``static_bytes`` (num_layers,). ``capacity_bytes`` is the memory of a rank; infinite:
    no limit. Raise `InputError` if there are fewer layers than stages, or shapes do not match, and `InfeasibleError` if
    no cut fits.
    """
    num_layers = seconds.shape[1]
    if activation_bytes.shape != seconds.shape or static_bytes.shape != (num_layers,):
        raise InputError("layers", "times and bytes have not the same number of layers")
    if not 1 <= num_stages <= num_layers:
        raise InputError("num_stages", f"{num_stages} is not in 1..{num_layers}", "use fewer ranks")
    time = np.pad(np.cumsum(seconds, axis=1), ((0, 0), (1, 0)))
    held = np.pad(np.cumsum(activation_bytes, axis=1), ((0, 0), (1, 0)))
    fixed = np.pad(np.cumsum(static_bytes), (1, 0))
    ends = np.arange(num_layers + 1)
    # Of layers from a begin (second axis) to an end (third): times under every strategy, static and held bytes.
    alone = np.where(ends[:, None] < ends, time[:, None, :] - time[:, :, None], np.inf)
    weights, activations = fixed - fixed[:, None], held[:, None, :] - held[:, :, None]
    slowest = np.full((num_stages + 1, num_layers + 1), np.inf)
    slowest[0, 0] = -np.inf
    cut = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    picked = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    for stage in range(1, num_stages + 1):
        in_flight = num_stages - stage + 1
        here = np.where(activations * in_flight + weights <= capacity_bytes, alone, np.inf)
        level = here.argmin(axis=0)
        worst = np.maximum(slowest[stage - 1, :, None], here.min(axis=0))
        cut[stage] = worst.argmin(axis=0)
        slowest[stage], picked[stage] = worst[cut[stage], ends], level[cut[stage], ends]
    if not np.isfinite(slowest[num_stages, num_layers]):
        raise InfeasibleError(
            f"no cut of {num_layers} layers into {num_stages} stages fits {size_text(int(capacity_bytes))}"
        )
    cuts, levels = [num_layers], []
    for stage in range(num_stages, 0, -1):
        levels.append(int(picked[stage, cuts[-1]]))
        cuts.append(int(cut[stage, cuts[-1]]))
    return StaticStages(tuple(reversed(cuts)), tuple(reversed(levels)), float(slowest[num_stages, num_layers]))


def nnscaler(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Make nnScaler*: the best static stages and recomputation for the mean microbatch, run by 1F1B.

    Stages made for the mean may leave too little memory for large microbatches. So stages for less memory are used if
    the first do not fit, and finally stages of equal parameters.
    """

    def system(layout: Layout, levels: tuple[int, ...]) -> System:
        def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
            graph = graph_of(setting, layout, microbatches, "nnScaler*", setting.levels)
            return per_rank_recomputation("nnScaler*", layout, graph, one_f_one_b(graph), np.array(levels))

        return System("nnScaler*", layout, run)

    chain = mean_chain(setting, batches)
    planned = [static_stages(setting, chain)]
    for share in MEMORY_SHARES:
        with suppress(InfeasibleError):
            planned.append(static_stages(setting, chain, memory_share=share))
    even = chain_of_stages(setting.model, setting.num_ranks, 1, by_parameters(setting, batches))
    last = fixed_systems("nnScaler*", setting, [even], one_f_one_b)
    options = [system(*one) for one in dict.fromkeys(planned)]
    return in_turn("nnScaler*", options, batches, last, seconds=setting.iteration_s)


MEMORY_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of memory for which static stages are also planned, so that microbatches above the mean fit."""


class MeanChain(NamedTuple):
    """All layers of a model in a row, on the mean microbatch.

    Attributes
    ----------
    layers : tuple of (module, number of the layer in it)
    seconds, activation_bytes : array, shape (num_levels, num_layers)
        Under every memory strategy, as for `best_stages`.
    static_bytes : array, shape (num_layers,)
    workspace_bytes : int
        Largest workspace of stages of equal parameters, and with ZeRO-3 the two largest layers.
    """

    layers: tuple[tuple[str, int], ...]
    seconds: FloatArray
    activation_bytes: FloatArray
    static_bytes: FloatArray
    workspace_bytes: int


def mean_chain(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> MeanChain:
    """Return times and bytes of all layers on the mean microbatch."""
    layers = tuple((m.name, i) for m in setting.model.modules for i in range(len(m.flat_layers)))
    seconds, held = level_tables(setting, batches)
    together = setting.levels.static_bytes_together
    # With ZeRO-3, the layers of a stage share the two that are whole.
    single = [Chunk(module, (i, i), 0) for module, i in layers]
    kept = np.array([together([chunk, chunk]) - together([chunk]) for chunk in single], float)
    whole = max(0, round(together(single) - kept.sum()))
    plain = chain_of_stages(setting.model, setting.num_ranks, 1, by_parameters(setting, batches))
    need = most_workspace_bytes(setting.levels, plain, pack_microbatches(setting, plain, batches[0]))
    return MeanChain(layers, seconds, held, kept, need + whole)


def static_stages(
    setting: ModelOnCluster, chain: MeanChain, *, alike: bool = False, memory_share: float = 1.0
) -> tuple[Layout, tuple[int, ...]]:
    """Return the best stages for 1F1B that fit on the mean microbatch, and the recomputation setting of each.

    ``alike``: use one setting for all stages. ``memory_share`` is the share of the devices' memory to plan with. Raise
    `InfeasibleError` if no cut fits.
    """
    layers, seconds, held, kept, need = chain
    capacity = int(memory_share * setting.capacity_bytes) - need
    found: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    for rows in [[level] for level in range(len(seconds))] if alike else [list(range(len(seconds)))]:
        with suppress(InfeasibleError):
            stages = best_stages(seconds[rows], held[rows], kept, setting.num_ranks, capacity)
            found.append((stages.slowest_s, stages.cuts, tuple(rows[level] for level in stages.levels)))
    if not found:
        raise InfeasibleError(
            f"no cut into {setting.num_ranks} stages fits {size_text(capacity)} on the mean microbatch"
        )
    _, cuts, levels = min(found)
    chunks: list[Chunk] = []
    for rank in range(setting.num_ranks):
        here = layers[cuts[rank] : cuts[rank + 1]]
        for name in dict.fromkeys(module for module, _ in here):
            numbers = [i for module, i in here if module == name]
            chunks.append(Chunk(name, (numbers[0], numbers[-1]), rank))
    modules = tuple(ModuleLayout.of(m) for m in setting.model.modules)
    return Layout(setting.num_ranks, modules, tuple(chunks)), levels


def stages_that_fit(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> list[Layout]:
    """Return the best stages with one recomputation setting, for each of `MEMORY_SHARES` with a solution."""
    if not batches:
        return []
    chain, found = mean_chain(setting, batches), []
    for share in (1.0, *MEMORY_SHARES):
        with suppress(InfeasibleError):
            found.append(static_stages(setting, chain, alike=True, memory_share=share)[0])
    return found
