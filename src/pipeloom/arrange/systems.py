"""What others run on a chain of layers: their partition, placement and order, on our costs, checker and memory.

Orders that are fixed tables come from `pipeloom.baselines`. Zero-bubble V and waves are found greedily in their
papers too; here they are rules of the chain kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from pipeloom.arrange.evaluate import NEVER, arrays_of, evaluate, schedule_of
from pipeloom.arrange.layer_chain import Arrangement, LayerChain, graph_of
from pipeloom.arrange.rules import Rule
from pipeloom.arrange.standard import dealt, one_f_one_b_peaks, stages, wave
from pipeloom.arrange.starts import natural_keys
from pipeloom.baselines import dual_pipe_v, gpipe, interleaved_one_f_one_b, one_f_one_b, zero_bubble_h1
from pipeloom.errors import InputError
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, check, simulate

_MOST_INTERLEAVED = 4


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """One system's answer for a chain.

    Attributes
    ----------
    fits : bool
        Whether it stays within the chain's memory limit; fixed orders do not ask.
    """

    name: str
    arrangement: Arrangement
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    fits: bool


def run_system(name: str, chain: LayerChain) -> Standing:
    """Lay out and order a chain as a published system does.

    Parameters
    ----------
    name : str
        One of `SYSTEMS`. Those that split backwards do so where the chain is split.
    chain : LayerChain

    Raises
    ------
    InputError
        The name is unknown, or the system cannot take the chain (too few layers or microbatches).
    """
    if name not in SYSTEMS:
        raise InputError("system", f"{name!r} is unknown", f"use one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name](chain)


def _fixed(
    name: str, chain: LayerChain, arrangement: Arrangement, order: Callable[[TaskGraph], Schedule]
) -> Standing:
    graph = graph_of(chain, arrangement)
    schedule = order(graph)
    return _standing(name, arrangement, graph, schedule)


def _ruled(name: str, chain: LayerChain, arrangement: Arrangement, rules: list[Rule]) -> Standing:
    """Run the best of some rules within memory; memory that fits none is left to the checker to refuse."""
    best = min(rules, key=lambda rule: evaluate(chain, arrangement, rule))
    fits = evaluate(chain, arrangement, best) < NEVER
    within = chain if fits else chain.with_capacity(None)
    _, schedule = schedule_of(within, arrangement, best, method=name)
    return _standing(name, arrangement, graph_of(chain, arrangement), schedule)


def _standing(name: str, arrangement: Arrangement, graph: TaskGraph, schedule: Schedule) -> Standing:
    timeline = simulate(graph, schedule)
    fits = not any(violation.kind == "memory" for violation in check(graph, schedule, timeline))
    return Standing(name, arrangement, graph, schedule, timeline, fits)


def _s_1f1b(chain: LayerChain) -> Standing:
    return _fixed("S-1F1B", chain, stages(chain), one_f_one_b)


def _gpipe(chain: LayerChain) -> Standing:
    return _fixed("GPipe", chain, stages(chain), gpipe)


def _i_1f1b(chain: LayerChain) -> Standing:
    """Two to four chunks a rank, whichever is fastest within memory, as Megatron-LM's users try them."""
    found = [_fixed("I-1F1B", chain, dealt(chain, 2), interleaved_one_f_one_b)]
    for chunks in range(3, _MOST_INTERLEAVED + 1):
        with suppress(InputError):  # there are too few layers
            found.append(_fixed("I-1F1B", chain, dealt(chain, chunks), interleaved_one_f_one_b))
    return min(found, key=lambda standing: (not standing.fits, standing.timeline.makespan_ns))


def _mist(chain: LayerChain) -> Standing:
    return _fixed("Mist", chain, mist_stages(chain), one_f_one_b)


def _dual(chain: LayerChain) -> Standing:
    return _fixed("DualPipeV", chain, wave(chain), dual_pipe_v)


def _zero_bubble(chain: LayerChain) -> Standing:
    """Zero-bubble H1 on 1F1B's stages in its memory: the published order, or a greedy one where that is faster."""
    arrangement = stages(chain)
    within = _limit(chain, np.full(chain.num_ranks, one_f_one_b_peaks(chain).max()))
    greedy = _ruled("ZB-H1", within, arrangement, [_backward_first(chain, arrangement)])
    graph = graph_of(chain, arrangement)
    table = _standing("ZB-H1", arrangement, graph, zero_bubble_h1(graph))
    found = _standing("ZB-H1", arrangement, graph, greedy.schedule)
    return min(table, found, key=lambda standing: (not standing.fits, standing.timeline.makespan_ns))


def _zero_bubble_v(chain: LayerChain) -> Standing:
    """Zero-bubble with V placement, in 1F1B's memory on its fullest rank."""
    arrangement = wave(chain)
    within = _limit(chain, np.full(chain.num_ranks, one_f_one_b_peaks(chain).max()))
    found = _ruled("ZB-V", within, arrangement, _rules(chain, arrangement))
    return _standing("ZB-V", arrangement, graph_of(chain, arrangement), found.schedule)


def _hanayo(chain: LayerChain) -> Standing:
    """Two waves (four chunks a rank) where there are layers for them, else one."""
    arrangement = wave(chain, 4 if chain.num_layers >= 4 * chain.num_ranks else 2)
    return _ruled("Hanayo", chain, arrangement, _rules(chain, arrangement))


SYSTEMS: dict[str, Callable[[LayerChain], Standing]] = {
    "GPipe": _gpipe,
    "S-1F1B": _s_1f1b,
    "I-1F1B": _i_1f1b,
    "ZB-H1": _zero_bubble,
    "ZB-V": _zero_bubble_v,
    "Hanayo": _hanayo,
    "DualPipeV": _dual,
    "Mist": _mist,
}
"""By name, as the field writes them."""


def _limit(chain: LayerChain, bytes_: IntArray) -> LayerChain:
    return chain.with_capacity(np.minimum(bytes_, chain.room_bytes))


def _backward_first(chain: LayerChain, arrangement: Arrangement) -> Rule:
    far = 4.0 * chain.num_microbatches
    keys = natural_keys(chain, arrangement, arrays_of(chain).stride, far)
    return Rule(keys, np.zeros_like(keys))


def _rules(chain: LayerChain, arrangement: Arrangement) -> list[Rule]:
    """Oldest microbatch first, or backwards before forwards."""
    stride = arrays_of(chain).stride
    keys = [
        natural_keys(chain, arrangement, stride, early) for early in (0.0, 1.0, 4.0 * chain.num_microbatches)
    ]
    return [Rule(key, np.zeros_like(key)) for key in keys]


def mist_stages(chain: LayerChain) -> Arrangement:
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
    for room in (chain.room_bytes, np.full(p, NEVER)):
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
    return Arrangement(tuple(reversed(cuts)), tuple(range(p)))
