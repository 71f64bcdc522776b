"""Compiled Lagrangian method for one rank's memory strategies; apart from the other kernels, with which it
shares nothing.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
kernel = numba.njit(cache=True, nogil=True)


@kernel
def fill_levels(
    choice: Array, first: Array, last: Array, end: Array, activation: Array, gradient: Array, level: Array
) -> None:
    """Bytes held while the task at each place runs, under a choice."""
    level[:] = 0
    for i in range(len(choice)):
        level[first[i]] += activation[i, choice[i]]
        level[last[i] + 1] -= activation[i, choice[i]]
        level[last[i] + 1] += gradient[i, choice[i]]
        level[end[i] + 1] -= gradient[i, choice[i]]
    for k in range(1, len(level)):
        level[k] += level[k - 1]


@kernel
def fits_with(
    i: int, j: int, now: int, first: Array, last: Array, end: Array, activation: Array, gradient: Array, level: Array,
    room: Array,
) -> bool:  # fmt: skip
    """Whether pair i may go from candidate ``now`` to j."""
    more = activation[i, j] - activation[i, now]
    if more > 0:
        for k in range(first[i], last[i] + 1):
            if level[k] + more > room[k]:
                return False
    more = gradient[i, j] - gradient[i, now]
    if more > 0:
        for k in range(last[i] + 1, end[i] + 1):
            if level[k] + more > room[k]:
                return False
    return True


@kernel
def change(
    i: int, j: int, choice: Array, first: Array, last: Array, end: Array, activation: Array, gradient: Array,
    level: Array,
) -> None:  # fmt: skip
    """Give pair i candidate j."""
    more = activation[i, j] - activation[i, choice[i]]
    for k in range(first[i], last[i] + 1):
        level[k] += more
    more = gradient[i, j] - gradient[i, choice[i]]
    for k in range(last[i] + 1, end[i] + 1):
        level[k] += more
    choice[i] = j


@kernel
def repair(
    choice: Array, lean: Array, price: Array, time: Array, activation: Array, gradient: Array, first: Array,
    last: Array, end: Array, room: Array, level: Array, most: int,
) -> None:  # fmt: skip
    """Make a choice fit, then use what room is left.

    Place by place, pairs that are held where too much is held step down, the cheapest per byte first, at
    worst to their leanest candidate; then, the best first as the prices have it, whatever fits steps up.
    """
    num_pairs, num_options = time.shape
    fill_levels(choice, first, last, end, activation, gradient, level)
    for k in range(len(room)):
        while level[k] > room[k]:
            best, best_i, best_j = np.inf, -1, -1
            for i in range(num_pairs):
                if first[i] <= k <= last[i]:
                    for j in range(num_options):
                        less = activation[i, choice[i]] - activation[i, j]
                        if less > 0 and gradient[i, j] <= gradient[i, choice[i]]:
                            cost = (time[i, j] - time[i, choice[i]]) / less
                            if cost < best:
                                best, best_i, best_j = cost, i, j
                elif last[i] < k <= end[i] and gradient[i, lean[i]] < gradient[i, choice[i]]:
                    best, best_i, best_j = -1.0, i, lean[i]
            if best_i < 0:
                choice[:] = lean
                fill_levels(choice, first, last, end, activation, gradient, level)
                break
            change(best_i, best_j, choice, first, last, end, activation, gradient, level)
    for _ in range(most):
        gain, gain_i, gain_j = 0.0, -1, -1
        for i in range(num_pairs):
            now = choice[i]
            for j in range(num_options):
                saved = time[i, now] - time[i, j]
                if saved > 0:
                    worth = saved / (1.0 + price[i] * max(0, activation[i, j] - activation[i, now]))
                    if worth > gain and fits_with(
                        i, j, now, first, last, end, activation, gradient, level, room
                    ):  # fmt: skip
                        gain, gain_i, gain_j = worth, i, j
        if gain_i < 0:
            return
        change(gain_i, gain_j, choice, first, last, end, activation, gradient, level)


@kernel
def lagrangian(
    time: Array, activation: Array, gradient: Array, first: Array, last: Array, end: Array, room: Array, lean: Array,
    rounds: int, best: Array, trial: Array, level: Array, multiplier: Array, running: Array, price: Array,
) -> float:  # fmt: skip
    """Write the best choice into ``best``, return a lower bound of the total time of any choice that fits.

    ``level``, ``multiplier`` and ``running`` have one entry more than there are places.
    """
    num_pairs, num_options = time.shape
    num_places = len(room)
    scale = 0.0
    for i in range(num_pairs):
        low, high = time[i, 0], time[i, 0]
        for j in range(num_options):
            low = min(low, time[i, j])
            high = max(high, time[i, j])
        scale += high - low
    best[:] = lean
    price[:] = 0.0
    repair(best, lean, price, time, activation, gradient, first, last, end, room, level, 4 * num_pairs)
    upper = 0
    for i in range(num_pairs):
        upper += time[i, best[i]]
    lower = -1e300
    multiplier[:] = 0.0
    step = 1.0
    stale = 0
    for turn in range(rounds):
        running[0] = 0.0
        for k in range(num_places):
            running[k + 1] = running[k] + multiplier[k]
        value = 0.0
        for i in range(num_pairs):
            held = running[last[i] + 1] - running[first[i]]
            after = running[end[i] + 1] - running[last[i] + 1]
            price[i] = held
            least = np.inf
            for j in range(num_options):
                cost = time[i, j] + held * activation[i, j] + after * gradient[i, j]
                if cost < least:
                    least = cost
                    trial[i] = j
            value += least
        for k in range(num_places):
            value -= multiplier[k] * room[k]
        if value > lower:
            lower = value
            stale = 0
        else:
            stale += 1
            if stale >= 5:
                step *= 0.6
                stale = 0
        fill_levels(trial, first, last, end, activation, gradient, level)
        norm = 0.0
        for k in range(num_places):
            excess = float(level[k] - room[k])
            if excess > 0 or multiplier[k] > 0:
                norm += excess * excess
        if norm == 0.0:
            total = 0
            for i in range(num_pairs):
                total += time[i, trial[i]]
            if total < upper:
                upper = total
                best[:] = trial
            return lower
        size = step * max(upper - value, 1e-4 * scale) / norm
        for k in range(num_places):
            multiplier[k] = max(0.0, multiplier[k] + size * float(level[k] - room[k]))
        if turn % 10 == 9 or turn == rounds - 1:
            repair(
                trial, lean, price, time, activation, gradient, first, last, end, room, level, 4 * num_pairs
            )
            total = 0
            for i in range(num_pairs):
                total += time[i, trial[i]]
            if total < upper:
                upper = total
                best[:] = trial
        if upper <= np.ceil(lower - 1e-6):
            return lower
    return lower
