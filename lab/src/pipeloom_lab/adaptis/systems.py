"""What others run on a chain of layers: their partition, placement and order, on our costs, checker and memory.

Orders that are fixed tables come from `pipeloom.search` and `pipeloom.compare.baselines`. Zero-bubble V and waves are
found greedily in their papers too; here they are rules of the chain kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeloom.errors import InputError
from pipeloom.layout.cooptimize.cuts import balanced_cuts, settled_cuts, stage_cuts
from pipeloom.layout.cooptimize.evaluate import arrays_of, evaluate, schedule_of
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, graph_of
from pipeloom.layout.cooptimize.rules import PriorityRule
from pipeloom.layout.cooptimize.standard import one_f_one_b_peaks, round_robin, stages, wave
from pipeloom.layout.cooptimize.starts import natural_keys
from pipeloom.search import gpipe, interleaved_one_f_one_b, one_f_one_b
from pipeloom.search.zero_bubble import zero_bubble_h1
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, check, simulate
from pipeloom_lab.adaptis.dualpipev import dual_pipe_v


@dataclass(frozen=True, slots=True, eq=False)
class ChainResult:
    """One system's answer for a chain."""

    name: str
    placement: PartitionPlacement
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    fits: bool
    """Whether it stays within the chain's memory limit; fixed orders do not ask."""


def run_system(name: str, chain: LayerChain) -> ChainResult:
    """Lay out and order a chain as a published system does.

    Parameters
    ----------
    name : str
        One of `SYSTEMS`. Those that split backwards do so where the chain is split.

    Raises
    ------
    InputError
        The name is unknown, or the system cannot take the chain (too few layers or microbatches).
    """
    if name not in SYSTEMS:
        raise InputError("system", f"{name!r} is unknown", f"use one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name](chain)


def _fixed(
    name: str, chain: LayerChain, placement: PartitionPlacement, order: Callable[[TaskGraph], Schedule]
) -> ChainResult:
    graph = graph_of(chain, placement)
    schedule = order(graph)
    return _result(name, placement, graph, schedule)


def _ruled(name: str, chain: LayerChain, placement: PartitionPlacement, rules: list[PriorityRule]) -> ChainResult:
    """Run the best of some rules within memory; memory that fits none is left to the checker to refuse."""
    best = min(rules, key=lambda rule: evaluate(chain, placement, rule))
    fits = evaluate(chain, placement, best) < NEVER
    within = chain if fits else chain.with_capacity(None)
    _, schedule = schedule_of(within, placement, best, method=name)
    return _result(name, placement, graph_of(chain, placement), schedule)


def _result(name: str, placement: PartitionPlacement, graph: TaskGraph, schedule: Schedule) -> ChainResult:
    timeline = simulate(graph, schedule)
    fits = not any(violation.kind == "memory" for violation in check(graph, schedule, timeline))
    return ChainResult(name, placement, graph, schedule, timeline, fits)


def _s_1f1b(chain: LayerChain) -> ChainResult:
    return _fixed("S-1F1B", chain, stages(chain), one_f_one_b)


def _gpipe(chain: LayerChain) -> ChainResult:
    return _fixed("GPipe", chain, stages(chain), gpipe)


def _i_1f1b(chain: LayerChain) -> ChainResult:
    """The number of chunks a rank, from two up to what there are layers for, that is fastest within memory."""
    # Too few layers for two chunks a rank are refused by the first.
    counts = range(2, max(2, chain.num_layers // chain.num_ranks) + 1)
    found = [_fixed("I-1F1B", chain, round_robin(chain, chunks), interleaved_one_f_one_b) for chunks in counts]
    return min(found, key=lambda result: (not result.fits, result.timeline.makespan_ns))


def _i_1f1b_balanced(chain: LayerChain) -> ChainResult:
    """The same with chunks, or ranks, of even time in place of even numbers of layers."""
    counts = range(2, max(2, chain.num_layers // chain.num_ranks) + 1)
    found = [
        _fixed("I-1F1B, balanced", chain, placement, interleaved_one_f_one_b)
        for chunks in counts
        for placement in _balanced(chain, round_robin(chain, chunks).ranks)
    ]
    return min(found, key=lambda result: (not result.fits, result.timeline.makespan_ns))


def _mist(chain: LayerChain) -> ChainResult:
    return _fixed("Mist", chain, mist_stages(chain), one_f_one_b)


def _dual(chain: LayerChain) -> ChainResult:
    return _fixed("DualPipeV", chain, wave(chain), dual_pipe_v)


def _zero_bubble(chain: LayerChain) -> ChainResult:
    """Zero-bubble H1 on 1F1B's stages in its memory: the published order, or a greedy one where that is faster."""
    return _zero_bubble_on("ZB-H1", chain, stages(chain))


def _zero_bubble_balanced(chain: LayerChain) -> ChainResult:
    """The same on stages of even time: those of `mist_stages`, or of `stage_cuts` where these are faster."""
    placements = (mist_stages(chain), PartitionPlacement(stage_cuts(chain), tuple(range(chain.num_ranks))))
    found = [_zero_bubble_on("ZB-H1, balanced", chain, placement) for placement in placements]
    return min(found, key=lambda result: (not result.fits, result.timeline.makespan_ns))


def _zero_bubble_on(name: str, chain: LayerChain, placement: PartitionPlacement) -> ChainResult:
    """Zero-bubble H1 on stages, in the memory of 1F1B on its fullest rank under the same stages."""
    within = _limit(chain, np.full(chain.num_ranks, one_f_one_b_peaks(chain, placement).max()))
    greedy = _ruled(name, within, placement, [_backward_first(chain, placement)])
    graph = graph_of(chain, placement)
    table = _result(name, placement, graph, zero_bubble_h1(graph))
    found = _result(name, placement, graph, greedy.schedule)
    return min(table, found, key=lambda result: (not result.fits, result.timeline.makespan_ns))


def _zero_bubble_v(chain: LayerChain) -> ChainResult:
    """Zero-bubble with V placement, in 1F1B's memory on its fullest rank."""
    return _zero_bubble_v_on("ZB-V", chain, wave(chain), stages(chain))


def _zero_bubble_v_balanced(chain: LayerChain) -> ChainResult:
    """The same with chunks, or ranks, of even time, in the memory of 1F1B on stages of even time."""
    placements = _balanced(chain, wave(chain).ranks)
    found = [_zero_bubble_v_on("ZB-V, balanced", chain, each, mist_stages(chain)) for each in placements]
    return min(found, key=lambda result: (not result.fits, result.timeline.makespan_ns))


def _zero_bubble_v_on(
    name: str, chain: LayerChain, placement: PartitionPlacement, of_1f1b: PartitionPlacement
) -> ChainResult:
    within = _limit(chain, np.full(chain.num_ranks, one_f_one_b_peaks(chain, of_1f1b).max()))
    found = _ruled(name, within, placement, _rules(chain, placement))
    return _result(name, placement, graph_of(chain, placement), found.schedule)


def _hanayo(chain: LayerChain) -> ChainResult:
    """Two waves (four chunks a rank) where there are layers for them, else one."""
    placement = wave(chain, 4 if chain.num_layers >= 4 * chain.num_ranks else 2)
    return _ruled("Hanayo", chain, placement, _rules(chain, placement))


SYSTEMS: dict[str, Callable[[LayerChain], ChainResult]] = {
    "GPipe": _gpipe,
    "S-1F1B": _s_1f1b,
    "I-1F1B": _i_1f1b,
    "ZB-H1": _zero_bubble,
    "ZB-V": _zero_bubble_v,
    "Hanayo": _hanayo,
    "DualPipeV": _dual,
    "Mist": _mist,
    "I-1F1B, balanced": _i_1f1b_balanced,
    "ZB-H1, balanced": _zero_bubble_balanced,
    "ZB-V, balanced": _zero_bubble_v_balanced,
}
"""By name, as the field writes them. Partitions have even numbers of layers, but for Mist's and the *balanced* ones,
which AdaPtis does not compare with."""


def _balanced(chain: LayerChain, ranks: tuple[int, ...]) -> list[PartitionPlacement]:
    """Chunks of even time, and chunks with which the ranks have even time."""
    loads = chain.total_ns[:, 0]
    by_chunk = balanced_cuts(loads, tuple(range(len(ranks))))
    by_rank = settled_cuts(loads, ranks, balanced_cuts(loads, ranks))
    return [PartitionPlacement(cuts, ranks) for cuts in dict.fromkeys((by_chunk, by_rank))]


def _limit(chain: LayerChain, bytes_: IntArray) -> LayerChain:
    return chain.with_capacity(np.minimum(bytes_, chain.headroom_bytes))


def _backward_first(chain: LayerChain, placement: PartitionPlacement) -> PriorityRule:
    far = 4.0 * chain.num_microbatches
    keys = natural_keys(chain, placement, arrays_of(chain).stride_ns, far)
    return PriorityRule(keys, np.zeros_like(keys))


def _rules(chain: LayerChain, placement: PartitionPlacement) -> list[PriorityRule]:
    """Oldest microbatch first, or backwards before forwards."""
    stride = arrays_of(chain).stride_ns
    keys = [natural_keys(chain, placement, stride, early) for early in (0.0, 1.0, 4.0 * chain.num_microbatches)]
    return [PriorityRule(key, np.zeros_like(key)) for key in keys]


def mist_stages(chain: LayerChain) -> PartitionPlacement:
    """One stage per rank with the least possible largest load that fits 1F1B's memory.

    Mist tunes much more (sharding, recomputation, offloading); AdaPtis compares with its partition, and so do we.
    Dynamic programming over the position of the last cut; where nothing fits, memory is left out.
    """
    p, n, m = chain.num_ranks, chain.num_layers, chain.num_microbatches
    if n < p:
        raise InputError("layers", f"{n} cannot fill {p} stages", "use fewer ranks")
    load = np.concatenate([[0], np.cumsum(chain.total_ns[:, 0])])
    held = np.concatenate([[0], np.cumsum(chain.activation_bytes[:, 0])])
    static = np.concatenate([[0], np.cumsum(chain.static_bytes)])
    for room in (chain.headroom_bytes, np.full(p, NEVER)):
        best = np.full((p + 1, n + 1), NEVER, np.int64)
        cut = np.zeros((p + 1, n + 1), np.int64)
        best[0, 0] = 0
        for rank in range(p):
            flying = min(p - rank, m)
            for end in range(rank + 1, n - (p - rank - 1) + 1):
                begin = np.arange(rank, end)
                need = (held[end] - held[begin]) * flying + static[end] - static[begin]
                worst = np.maximum(best[rank, begin], load[end] - load[begin])
                worst = np.where(need <= room[rank], worst, NEVER)
                best[rank + 1, end] = worst.min()
                cut[rank + 1, end] = begin[int(worst.argmin())]
        if best[p, n] < NEVER:
            break
    cuts = [n]
    for rank in range(p, 0, -1):
        cuts.append(int(cut[rank, cuts[-1]]))
    return PartitionPlacement(tuple(reversed(cuts)), tuple(range(p)))
