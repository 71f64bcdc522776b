"""Kernels over flat arrays: latencies, issue-order timing, max-plus transfer matrices.

The timing rule is the same everywhere. A device runs its operators one at a time in issue order. An operator starts
when its device is free and all its predecessors have ended. Under this rule every end time is a maximum of sums. So a
run of operators is a matrix in max-plus algebra, from the times at which its devices and inputs are ready to the times
at which they are free again. Therefore reuse is exact: a cached matrix gives the same integers as running the operators
again.

Nonnegative predecessors are operators; ``-1 - i`` is external input i. Times are integer picoseconds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pipeloom.compiled import allocating, kernel

NEVER = -(1 << 60)
"""Minus infinity of max-plus algebra. The sum of two of them fits into 64 bits."""

Array = Any


@kernel
def efficiency_at(seconds: float, points: Array, values: Array, count: int) -> float:
    """Return the efficiency by seconds at the peak: linear in their log2 between the points, constant outside."""
    if count == 1 or seconds <= 0.0:
        return float(values[0])
    x = np.log2(seconds)
    if x <= points[0]:
        return float(values[0])
    for k in range(1, count):
        if x <= points[k]:
            share = (x - points[k - 1]) / (points[k] - points[k - 1])
            return float(values[k - 1] + share * (values[k] - values[k - 1]))
    return float(values[count - 1])


@allocating
def latencies(
    amounts: Array, rule: Array, steps: Array, rates: Array, points: Array, values: Array, counts: Array, fixed: Array
) -> Array:
    """Return the picoseconds of every operator: the largest of its metrics over the device's rates, or its launch.

    They are integers stored as floats, because integers could overflow before their sum is checked.

    Parameters
    ----------
    amounts : float array, shape (num_operators, 3)
        Operations, memory bytes, network bytes.
    rule : int array, shape (num_operators,)
        Row of the rule tables for the operator's kind on its device.
    steps : float array, shape (num_operators,)
        Consecutive messages; each costs the rule's fixed latency.
    rates : float array, shape (num_rules, 3)
        Peak operations and bytes per second; 0 if the device has none.
    points, values : float array, shape (num_rules, 3, num_points)
        Efficiency curves over log2 of the seconds at the peak. ``counts`` has the number of used points.
    fixed : float array, shape (num_rules, 3)
        Seconds per step, the minimum of an operator that has anything to do, and whether its metrics overlap only in
        part: then it takes the root of the sum of their squares.
    """
    out = np.empty(len(rule))
    for i in range(len(rule)):
        r = rule[i]
        seconds = 0.0
        for m in range(3):
            amount = amounts[i, m]
            if amount > 0.0:
                at_peak = amount / rates[r, m]
                e = efficiency_at(at_peak, points[r, m], values[r, m], counts[r, m])
                seconds = math.hypot(seconds, at_peak / e) if fixed[r, 2] else max(seconds, at_peak / e)
        if seconds > 0.0:
            seconds = max(seconds, fixed[r, 1])
        out[i] = np.rint((seconds + fixed[r, 0] * steps[i]) * 1e12)
    return out


@allocating
def issue(
    device: Array, predecessor_start: Array, predecessor: Array, duration: Array, free: Array, ready: Array
) -> Array:
    """Return the end time of every operator. ``free`` (per device) is advanced in place."""
    end = np.empty(len(device), np.int64)
    for i in range(len(device)):
        d = device[i]
        t = free[d]
        for k in range(predecessor_start[i], predecessor_start[i + 1]):
            p = predecessor[k]
            t = max(t, ready[-1 - p] if p < 0 else end[p])
        end[i] = t + duration[i]
        free[d] = end[i]
    return end


@kernel
def transfer(
    device: Array,
    predecessor_start: Array,
    predecessor: Array,
    duration: Array,
    outputs: Array,
    matrix: Array,
    ends: Array,
) -> None:
    """Write the max-plus matrix of a run of operators, and the row of every operator's end.

    Parameters
    ----------
    matrix : int array, shape (num_devices + num_outputs, num_devices + num_inputs)
        Rows are the devices' free times, then the outputs' ready times, as functions of the same at entry.
    ends : int array, shape (num_operators, num_devices + num_inputs)
    """
    columns = matrix.shape[1]
    num_devices = matrix.shape[0] - len(outputs)
    for r in range(matrix.shape[0]):
        for c in range(columns):
            matrix[r, c] = 0 if r == c and r < num_devices else NEVER
    for i in range(len(device)):
        d = device[i]
        for c in range(columns):
            ends[i, c] = matrix[d, c]
        for k in range(predecessor_start[i], predecessor_start[i + 1]):
            p = predecessor[k]
            if p < 0:
                c = num_devices - 1 - p
                ends[i, c] = max(ends[i, c], 0)
            else:
                for c in range(columns):
                    ends[i, c] = max(ends[i, c], ends[p, c])
        for c in range(columns):
            if ends[i, c] > NEVER:
                ends[i, c] += duration[i]
            matrix[d, c] = ends[i, c]
    for o in range(len(outputs)):
        p = outputs[o]
        if p < 0:
            matrix[num_devices + o, num_devices - 1 - p] = 0
        else:
            for c in range(columns):
                matrix[num_devices + o, c] = ends[p, c]


@allocating
def compose(after: Array, before: Array) -> Array:
    """Return the max-plus product: first ``before``, then ``after``."""
    out = np.full((after.shape[0], before.shape[1]), NEVER, np.int64)
    for r in range(after.shape[0]):
        for k in range(after.shape[1]):
            a = after[r, k]
            if a > NEVER:
                for c in range(before.shape[1]):
                    b = before[k, c]
                    if b > NEVER and a + b > out[r, c]:
                        out[r, c] = a + b
    return out
