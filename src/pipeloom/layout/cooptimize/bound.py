"""Lower bounds over all partitions, placements and schedules of a chain of layers.

Notation: ranks are numbered by their first layer. Rank k begins when a microbatch has passed k layers and k boundary
transfers. Its warm-up is thus at least the forwards of the first k layers. Its cool-down is at least their backwards,
unless weight gradients can fill that time. Its work is the number of microbatches times the time of its layers. Layers
are indivisible, so the number of layers of each cost on each rank is an integer program. It is small because equal
layers form one type.

The mean over ranks gives a tighter bound. A layer is on one rank and a microbatch is at one layer, so k + 1 ranks are
busy at once only when k + 1 microbatches are at different layers. Then at least k + 1 - i of them have passed the first
i layers, which takes one pass through these layers and k - i times the slowest of them. The same holds for backwards
before the end, if no weight gradients fill that time.

A memory limit adds two idle times. Before the first backward (for a whole forward pass), a rank runs only as many
forwards as its memory holds. After the last forward (a whole backward pass before the end), it runs only backwards of
the activations that it holds.

The iteration ends when every rank has updated its layers. A rank does this after its last task and computes nothing
else then. So its idle time at the end is at least its cool-down and at least its own updates, and the larger one
counts. Both follow the last task of the rank, and thus a whole forward pass, so they overlap with no idle time at the
start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeloom.layout.cooptimize.layer_chain import NO_LIMIT, LayerChain
from pipeloom.layout.cooptimize.params import BoundParams
from pipeloom.taskgraph import IntArray
from pipeloom.timeline import LowerBound

# HiGHS rejects a row with smaller or larger coefficients (small_matrix_value, large_matrix_value).
_LEAST_SHARE, _MOST_SHARE = 1e-8, 1e12


@dataclass(frozen=True, slots=True)
class _Ends:
    """Minimum warm-up and cool-down time of rank k, in ns."""

    warm_up: tuple[int, ...]
    cool_down: tuple[int, ...]


def placement_bound(chain: LayerChain, params: BoundParams | None = None) -> LowerBound:
    """Return a lower bound over all placements, orders and strategies of a chain.

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
    # The two idle times due to memory do not overlap if the iteration is at least as long as both.
    lone = int((chain.forward_ns + chain.backward_ns).min(axis=1).sum())
    if chain.capacity_bytes is not None and known.ns >= lone:
        found.append(_program(chain, ends, params, memory=True))
    return max(found, key=lambda bound: bound.ns)


def _ends(chain: LayerChain) -> _Ends:
    forward, backward = chain.forward_ns.min(axis=1), chain.backward_ns.min(axis=1)
    fillable = bool(chain.weight_ns.any())
    warm_up, cool_down = [], []
    for k in range(min(chain.num_ranks, chain.num_layers)):
        warm_up.append(int(forward[:k].sum()) + k * chain.delay_ns)
        cool_down.append(0 if fillable else int(backward[:k].sum()) + k * chain.delay_ns)
    return _Ends(tuple(warm_up), tuple(cool_down))


def _levels(chain: LayerChain, ends: _Ends) -> list[int]:
    """Return the minimum time, at the start and end together, in which at most k ranks are busy, for k = 0, 1, ..."""
    num = len(ends.warm_up)
    forward = _full(chain.forward_ns.min(axis=1), num)
    if chain.weight_ns.any():
        # Weight gradients overlap with their microbatch, but not before all forwards of one microbatch.
        lone = int(chain.forward_ns.min(axis=1).sum())
        return [max(first, min(time, lone)) for first, time in zip(ends.warm_up, forward, strict=True)]
    both = zip(ends.warm_up, forward, ends.cool_down, _full(chain.backward_ns.min(axis=1), num), strict=True)
    return [max(first, f) + max(last, b) for first, f, last, b in both][: chain.num_microbatches]


def _full(times: IntArray, num: int) -> list[int]:
    """Return the minimum times until k + 1 microbatches that pass layers of these times are at different layers."""
    passed, slowest, behind = np.cumsum(times), np.maximum.accumulate(times), np.arange(num)
    return [0, *(int((passed[:k] + behind[:k][::-1] * slowest[:k]).max()) for k in range(1, num))]


def _critical(chain: LayerChain) -> LowerBound:
    """Return the time of one microbatch through all layers and back, or of all microbatches in one layer."""
    total = chain.total_ns.min(axis=1)
    # A single microbatch passes every input gradient. Only one weight gradient must follow the last one.
    # Until the backward of a layer, it passes all layers forward, and back down to this one. Then come the updates.
    forward, both = chain.forward_ns.min(axis=1), (chain.forward_ns + chain.backward_ns).min(axis=1)
    lone = forward.cumsum() - forward + both[::-1].cumsum()[::-1]
    return LowerBound(int((np.maximum(lone, total * chain.num_microbatches) + chain.end_ns).max()), "critical path")


def _mean(chain: LayerChain, ends: _Ends) -> LowerBound:
    work = int(chain.total_ns.min(axis=1).sum()) * chain.num_microbatches
    levels = _levels(chain, ends)
    # Fewer ranks may share the work, when an empty rank is better than its warm-up and cool-down.
    best = None
    for used in range(1, len(levels) + 1):
        ns = -(-(work + sum(levels[:used])) // used)
        best = ns if best is None else min(best, ns)
    return LowerBound(best or 0, "mean work and ends")


def _residence(chain: LayerChain) -> LowerBound:
    """Return the bound by the bytes held over time and the memory of all ranks together."""
    if chain.capacity_bytes is None:
        return LowerBound(0, "memory")
    free = int(chain.headroom_bytes.sum()) - int(chain.static_bytes.sum())
    if free <= 0:
        return LowerBound(0, "memory")
    through = (chain.forward_ns + chain.backward_ns).min(axis=1)[::-1].cumsum()[::-1]
    held = chain.activation_bytes.min(axis=1).astype(float) * through
    held += (chain.gradient_bytes * chain.weight_ns).min(axis=1).astype(float)
    return LowerBound(int(held.sum() * chain.num_microbatches / free), "memory")


def _program(chain: LayerChain, ends: _Ends, params: BoundParams, *, memory: bool) -> LowerBound:
    """Bound the end of the last rank by an integer program that assigns layer types to ranks."""
    import highspy

    work = chain.total_ns.min(axis=1)
    forward = chain.forward_ns.max(axis=1)
    backward = (chain.backward_ns + chain.weight_ns).max(axis=1)
    forward_bytes = chain.activation_bytes.min(axis=1)
    backward_bytes = forward_bytes
    if chain.weight_ns.any():
        backward_bytes = np.minimum(forward_bytes, chain.gradient_bytes.min(axis=1))
    columns = [work]
    if memory:
        columns += [forward, backward, forward_bytes, backward_bytes, chain.static_bytes]
    columns.append(chain.end_ns)
    kinds, kind, count = np.unique(np.stack(columns), axis=1, return_inverse=True, return_counts=True)
    kind = np.ravel(kind)
    m, p = chain.num_microbatches, len(ends.warm_up)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", params.seconds)
    solver.setOptionValue("mip_max_nodes", params.nodes)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 1e-5)
    unit = 1e6  # milliseconds, to keep the coefficients small
    total = solver.addVariable(lb=0.0)
    given = [
        [solver.addIntegral(lb=1.0 if k == 0 and t == kind[0] else 0.0, ub=float(count[t])) for t in range(len(count))]
        for k in range(p)
    ]
    for t in range(len(count)):
        solver.addConstr(sum(given[k][t] for k in range(p)) == float(count[t]))
    one_pass = (int(chain.forward_ns.min(axis=1).sum()), int(chain.backward_ns.min(axis=1).sum()))
    for k in range(p):
        # The physical rank at place k is unknown, so each rank gets the largest memory.
        capacity = int(chain.headroom_bytes.max())
        load = sum(float(kinds[0, t] * m / unit) * given[k][t] for t in range(len(count)))
        # The cool-down ends with a backward of the first layer, whose update follows.
        cool_down = ends.cool_down[k] + (int(chain.end_ns[0]) if ends.cool_down[k] else 0)
        idle = [ends.warm_up[k] / unit, cool_down / unit]
        used = solver.addBinary() if k else 1.0
        if k:  # a rank without layers has no warm-up or cool-down
            for t in range(len(count)):
                solver.addConstr(given[k][t] <= float(count[t]) * used)
        updates = sum(float(kinds[-1, t] / unit) * given[k][t] for t in range(len(count)))
        if not memory or capacity >= NO_LIMIT:
            solver.addConstr(total >= load + (idle[0] + idle[1]) * used)
            if chain.end_ns.any():
                solver.addConstr(total >= load + idle[0] * used + updates)
            continue
        sides = []
        for side, (duration, size) in enumerate(((1, 3), (2, 4))):
            wait = solver.addVariable(lb=0.0)
            mine = [solver.addVariable(lb=0.0) for _ in range(len(count))]
            for t in range(len(count)):
                solver.addConstr(mine[t] <= float(m) * given[k][t])
            bytes_unit = max(1.0, capacity / 1e3)
            held = [_share(kinds[size, t], bytes_unit) * mine[t] for t in range(len(count))]
            held += [_share(kinds[5, t], bytes_unit) * given[k][t] for t in range(len(count))]
            solver.addConstr(sum(held) <= capacity / bytes_unit)
            busy = sum(float(kinds[duration, t]) / unit * mine[t] for t in range(len(count)))
            solver.addConstr(wait >= idle[side] * used)
            solver.addConstr(wait + busy >= one_pass[side] / unit * used)
            sides.append(wait)
        if chain.end_ns.any():
            solver.addConstr(sides[1] >= updates)
        solver.addConstr(total >= load + sides[0] + sides[1])
    solver.minimize(total)
    proven = solver.getInfo().mip_dual_bound
    if not np.isfinite(proven) or proven < 0:
        return LowerBound(0, "layers over ranks")
    # Subtract a margin, since the solver satisfies constraints only to 1e-6 of a unit.
    ns = max(0, int((proven - 1e-5 - 1e-8 * abs(proven)) * unit))
    if not memory:
        # Every sum of loads and idle times is a multiple of their greatest common divisor.
        step = math.gcd(*(int(w) * m for w in work), *ends.warm_up, *ends.cool_down, *chain.end_ns.tolist())
        ns = -(-ns // step) * step if step else ns
    return LowerBound(ns, "layers over ranks, memory" if memory else "layers over ranks")


def _share(size: int, bytes_unit: float) -> float:
    """Return bytes as a coefficient for the solver. Clipping tiny and huge values only loosens the bound."""
    share = float(size) / bytes_unit
    return min(share, _MOST_SHARE) if share >= _LEAST_SHARE else 0.0
