"""Lower bounds over all partitions, placements and schedules of a chain of layers.

Notation: ranks are numbered by their first layer. Rank k begins only when a microbatch has passed k layers and k
boundary transfers, so the first k layers' forwards are its head; their backwards are its tail, unless weight gradients
may fill it. Its work is all microbatches times its layers. Layers are indivisible, so who gets how many layers of each
cost is an integer program, small because equal layers count as one type.

The mean over ranks knows more: k + 1 ranks are busy at once only when k + 1 microbatches run at different layers, as a
layer lies on one rank and a microbatch is at one place. At least k + 1 - i of them have then passed the first i layers,
which takes one pass of these and k - i times the slowest of them. From the end the same holds of backwards, where no
weight gradients fill that time.

With a memory limit two idle times are added. Before the first backward of all can begin (a whole forward pass), a
rank runs only forwards, and no more of them than its memory holds. After the last forward of all (a whole backward
pass before the end), it runs only backwards of what it then holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeloom.layout.cooptimise.layer_chain import NO_LIMIT, LayerChain
from pipeloom.layout.cooptimise.params import BoundParams
from pipeloom.taskgraph import IntArray
from pipeloom.timeline import LowerBound

# HiGHS refuses a row with smaller or larger coefficients (small_matrix_value, large_matrix_value).
_LEAST_SHARE, _MOST_SHARE = 1e-8, 1e12


@dataclass(frozen=True, slots=True)
class _Ends:
    """Least idle time of rank k before and after its work, in ns."""

    head: tuple[int, ...]
    tail: tuple[int, ...]


def placement_bound(chain: LayerChain, params: BoundParams | None = None) -> LowerBound:
    """No placement of the chain, in no order, under no choice of strategies, is faster.

    Parameters
    ----------
    params : BoundParams, optional
        Limits of the integer program.
    """
    params = params or BoundParams()
    ends = _ends(chain)
    found = [_critical(chain), _mean(chain, ends), _residence(chain)]
    if not (1 < chain.num_ranks <= params.most_ranks and chain.num_layers <= params.most_layers):
        return max(found, key=lambda bound: bound.ns)
    found.append(_program(chain, ends, params, memory=False))
    known = max(found, key=lambda bound: bound.ns)
    # The two idle windows that memory makes do not overlap if an iteration surely is as long as both.
    lone = int((chain.forward_ns + chain.backward_ns).min(axis=1).sum())
    if chain.capacity_bytes is not None and known.ns >= lone:
        found.append(_program(chain, ends, params, memory=True))
    return max(found, key=lambda bound: bound.ns)


def _ends(chain: LayerChain) -> _Ends:
    forward, backward = chain.forward_ns.min(axis=1), chain.backward_ns.min(axis=1)
    fillable = bool(chain.weight_ns.any())
    head, tail = [], []
    for k in range(min(chain.num_ranks, chain.num_layers)):
        head.append(int(forward[:k].sum()) + k * chain.delay_ns)
        tail.append(0 if fillable else int(backward[:k].sum()) + k * chain.delay_ns)
    return _Ends(tuple(head), tuple(tail))


def _levels(chain: LayerChain, ends: _Ends) -> list[int]:
    """Least time, at the start and at the end together, in which at most k ranks are busy, for k = 0, 1, ..."""
    num = len(ends.head)
    forward = _full(chain.forward_ns.min(axis=1), num)
    if chain.weight_ns.any():
        # Weight gradients run beside the microbatch that they are of, but not before all forwards of one microbatch.
        lone = int(chain.forward_ns.min(axis=1).sum())
        return [max(head, min(time, lone)) for head, time in zip(ends.head, forward, strict=True)]
    both = zip(ends.head, forward, ends.tail, _full(chain.backward_ns.min(axis=1), num), strict=True)
    return [max(head, f) + max(tail, b) for head, f, tail, b in both][: chain.num_microbatches]


def _full(times: IntArray, num: int) -> list[int]:
    """Least times until k + 1 microbatches, each passing layers of these times in turn, are at different layers."""
    passed, slowest, behind = np.cumsum(times), np.maximum.accumulate(times), np.arange(num)
    return [0, *(int((passed[:k] + behind[:k][::-1] * slowest[:k]).max()) for k in range(1, num))]


def _critical(chain: LayerChain) -> LowerBound:
    """One microbatch through all layers and back; or all microbatches through one layer."""
    total = chain.total_ns.min(axis=1)
    # A lone microbatch passes every input gradient; only one weight gradient must follow the last of them.
    lone = int((chain.forward_ns + chain.backward_ns).min(axis=1).sum())
    return LowerBound(max(lone, int(total.max()) * chain.num_microbatches), "critical path")


def _mean(chain: LayerChain, ends: _Ends) -> LowerBound:
    work = int(chain.total_ns.min(axis=1).sum()) * chain.num_microbatches
    levels = _levels(chain, ends)
    # Ranks may stay empty when that is better than idle ends; then fewer share the work.
    best = None
    for used in range(1, len(levels) + 1):
        ns = -(-(work + sum(levels[:used])) // used)
        best = ns if best is None else min(best, ns)
    return LowerBound(best or 0, "mean work and ends")


def _residence(chain: LayerChain) -> LowerBound:
    """Bytes times the least time they are held, against what all ranks hold together."""
    if chain.capacity_bytes is None:
        return LowerBound(0, "memory")
    room = int(chain.room_bytes.sum()) - int(chain.static_bytes.sum())
    if room <= 0:
        return LowerBound(0, "memory")
    through = (chain.forward_ns + chain.backward_ns).min(axis=1)[::-1].cumsum()[::-1]
    held = chain.activation_bytes.min(axis=1).astype(float) * through
    held += (chain.gradient_bytes * chain.weight_ns).min(axis=1).astype(float)
    return LowerBound(int(held.sum() * chain.num_microbatches / room), "memory")


def _program(chain: LayerChain, ends: _Ends, params: BoundParams, *, memory: bool) -> LowerBound:
    """Distribute layer types over ranks so that the latest rank ends as early as can be."""
    import highspy

    work = chain.total_ns.min(axis=1)
    forward = chain.forward_ns.max(axis=1)
    backward = (chain.backward_ns + chain.weight_ns).max(axis=1)
    lean = chain.activation_bytes.min(axis=1)
    leaner = np.minimum(lean, chain.gradient_bytes.min(axis=1)) if chain.weight_ns.any() else lean
    columns = [work]
    if memory:
        columns += [forward, backward, lean, leaner, chain.static_bytes]
    kinds, kind, count = np.unique(np.stack(columns), axis=1, return_inverse=True, return_counts=True)
    kind = np.ravel(kind)
    m, p = chain.num_microbatches, len(ends.head)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", params.seconds)
    solver.setOptionValue("mip_max_nodes", params.nodes)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 1e-5)
    unit = 1e6  # milliseconds keep the coefficients small
    total = solver.addVariable(lb=0.0)
    given = [
        [solver.addIntegral(lb=1.0 if k == 0 and t == kind[0] else 0.0, ub=float(count[t])) for t in range(len(count))]
        for k in range(p)
    ]
    for t in range(len(count)):
        solver.addConstr(sum(given[k][t] for k in range(p)) == float(count[t]))
    one_pass = (int(chain.forward_ns.min(axis=1).sum()), int(chain.backward_ns.min(axis=1).sum()))
    for k in range(p):
        # Which physical rank comes k-th is open, so the memory of the largest stands for each.
        room = int(chain.room_bytes.max())
        load = sum(float(kinds[0, t] * m / unit) * given[k][t] for t in range(len(count)))
        idle = [ends.head[k] / unit, ends.tail[k] / unit]
        used = solver.addBinary() if k else None
        if used is not None:  # a rank without layers has no ends
            for t in range(len(count)):
                solver.addConstr(given[k][t] <= float(count[t]) * used)
        head_tail = idle[0] + idle[1]
        if not memory or room >= NO_LIMIT:
            ends_k = head_tail if used is None else head_tail * used
            solver.addConstr(total >= load + ends_k)
            continue
        sides = []
        for side, (duration, size) in enumerate(((1, 3), (2, 4))):
            wait = solver.addVariable(lb=0.0)
            mine = [solver.addVariable(lb=0.0) for _ in range(len(count))]
            for t in range(len(count)):
                solver.addConstr(mine[t] <= float(m) * given[k][t])
            bytes_unit = max(1.0, room / 1e3)
            held = [_share(kinds[size, t], bytes_unit) * mine[t] for t in range(len(count))]
            held += [_share(kinds[5, t], bytes_unit) * given[k][t] for t in range(len(count))]
            solver.addConstr(sum(held) <= room / bytes_unit)
            busy = sum(float(kinds[duration, t]) / unit * mine[t] for t in range(len(count)))
            least = idle[side]
            if used is None:
                solver.addConstr(wait >= least)
                solver.addConstr(wait + busy >= one_pass[side] / unit)
            else:
                solver.addConstr(wait >= least * used)
                solver.addConstr(wait + busy >= one_pass[side] / unit * used)
            sides.append(wait)
        solver.addConstr(total >= load + sides[0] + sides[1])
    solver.minimize(total)
    proven = solver.getInfo().mip_dual_bound
    if not np.isfinite(proven) or proven < 0:
        return LowerBound(0, "layers over ranks")
    # Solvers keep constraints to 1e-6 of a unit; what they prove is a little loose.
    ns = max(0, int((proven - 1e-5 - 1e-8 * abs(proven)) * unit))
    if not memory:
        # Every sum of loads and ends is a multiple of what divides all of them.
        step = math.gcd(*(int(w) * m for w in work), *ends.head, *ends.tail)
        ns = -(-ns // step) * step if step else ns
    return LowerBound(ns, "layers over ranks, memory" if memory else "layers over ranks")


def _share(size: int, bytes_unit: float) -> float:
    """Bytes as a coefficient for the solver: tiny ones are nothing and huge ones less, which loosens the bound."""
    share = float(size) / bytes_unit
    return min(share, _MOST_SHARE) if share >= _LEAST_SHARE else 0.0
