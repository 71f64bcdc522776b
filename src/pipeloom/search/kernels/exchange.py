"""Exchanges of memory between two pairs: one takes a smaller candidate so that the other can take a larger one."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.search.kernels.tables import BEGIN, END, GRADIENT, Options, Work

Array = npt.NDArray[Any]
NO_LIMIT = 1 << 62


@kernel
def exchange(options: Options, work: Work) -> None:
    """Choose for any two pairs the candidates with the least total time, until no two can be improved.

    Updates the choice in ``work.best``, which must fit, and ``work.allocated``.
    """
    choice, allocated, headroom = work.best, work.allocated, work.headroom
    activation, gradient, span = options.activation, options.gradient, options.span
    turn = work.move  # remaining rounds in which to try a pair
    num_pairs = len(choice)
    for i in range(num_pairs):
        turn[i] = 1
    moved = True
    while moved:
        moved = False
        for i in range(num_pairs):
            for j in range(i + 1, num_pairs):
                if turn[i] + turn[j] == 0 or span[i, BEGIN] > span[j, END] or span[j, BEGIN] > span[i, END]:
                    continue
                for x in range(9):
                    headroom[x] = NO_LIMIT
                first, last = min(span[i, BEGIN], span[j, BEGIN]), max(span[i, END], span[j, END])
                for k in range(first, last + 1):
                    x, held = phase(k, span[i], activation[i, choice[i]], gradient[i, choice[i]])
                    y, other = phase(k, span[j], activation[j, choice[j]], gradient[j, choice[j]])
                    headroom[3 * x + y] = min(headroom[3 * x + y], options.capacity[k] - allocated[k] + held + other)
                a, b = best_two(options, i, j, headroom, choice)
                if a == choice[i] and b == choice[j]:
                    continue
                moved = True
                for k in range(first, last + 1):
                    allocated[k] -= phase(k, span[i], activation[i, choice[i]], gradient[i, choice[i]])[1]
                    allocated[k] -= phase(k, span[j], activation[j, choice[j]], gradient[j, choice[j]])[1]
                    allocated[k] += phase(k, span[i], activation[i, a], gradient[i, a])[1]
                    allocated[k] += phase(k, span[j], activation[j, b], gradient[j, b])[1]
                choice[i], choice[j] = a, b
                for q in range(num_pairs):
                    if span[q, BEGIN] <= last and first <= span[q, END]:
                        turn[q] = 2
        for i in range(num_pairs):
            turn[i] = max(0, turn[i] - 1)


@callee
def phase(place: int, span: Array, activation: int, gradient: int) -> tuple[int, int]:
    """Return the phase of a pair at a place and the bytes it holds there.

    The phase is 1 up to its input gradient, 2 after it, and 0 outside of the span of the pair.
    """
    if place < span[BEGIN] or place > span[END]:
        return 0, 0
    if place <= span[GRADIENT]:
        return 1, activation
    return 2, gradient


@callee
def best_two(options: Options, i: int, j: int, headroom: Array, choice: Array) -> tuple[int, int]:
    """Return the candidates of pairs i and j that fit and take the least total time.

    ``headroom`` holds the smallest number of free bytes for the two, by three times the phase of i plus the phase of j.
    Neither candidate takes more host memory than the current one.
    """
    one, two, activation, gradient = options.time[i], options.time[j], options.activation, options.gradient
    best_a, best_b = choice[i], choice[j]
    best = one[best_a] + two[best_b]
    for a in range(len(one)):
        held, kept = activation[i, a], gradient[i, a]
        if options.host[i, a] > options.host[i, choice[i]]:
            continue
        if one[a] >= best or held > headroom[3] or kept > headroom[6]:
            continue
        most = min(headroom[1], min(headroom[4] - held, headroom[7] - kept))
        most_after = min(headroom[2], min(headroom[5] - held, headroom[8] - kept))
        for b in range(len(two)):
            if options.host[j, b] > options.host[j, choice[j]]:
                continue
            if one[a] + two[b] < best and activation[j, b] <= most and gradient[j, b] <= most_after:
                best, best_a, best_b = one[a] + two[b], a, b
    return best_a, best_b
