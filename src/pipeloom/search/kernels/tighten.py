"""Tighter capacities for the choice of memory strategies: memory that no sum of candidates can use is removed.

Candidates have discrete sizes. At a place where a few large pairs are held, the largest sum that fits may be well below
the capacity of the rank. Lowering the capacity to this sum excludes no choice. It raises the Lagrangian bound, which
fills every place with fractions of candidates.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.search.kernels.tables import BEGIN, END, GRADIENT, Options, Work

Array = npt.NDArray[Any]


@kernel
def tighten(options: Options, work: Work, most_steps: int) -> None:
    """Lower ``options.capacity`` at places with a price, the highest first, to the largest sum of candidates that fits.

    Parameters
    ----------
    work : Work
        ``allocated`` holds the bytes of a choice that fits, and ``multiplier`` the price of a byte. ``running`` and
        ``sums`` are scratch.
    most_steps : int
        Maximum number of merge steps, over all places.
    """
    activation, gradient, span, capacity = options.activation, options.gradient, options.span, options.capacity
    price, sums = work.running, work.sums
    num_pairs = len(span)
    num_places = options.host_begin
    for k in range(num_places):
        price[k] = work.multiplier[k]
    steps = 0
    while steps < most_steps:
        place = 0
        for k in range(num_places):
            if price[k] > price[place]:
                place = k
        if price[place] <= 0.0:
            return
        price[place] = 0.0
        rest = 0
        for i in range(num_pairs):
            if span[i, BEGIN] <= place and place <= span[i, END]:
                amounts = activation[i] if place <= span[i, GRADIENT] else gradient[i]
                rest += largest(amounts)
        size = 1
        sums[0, 0] = 0
        for i in range(num_pairs):
            if span[i, BEGIN] <= place and place <= span[i, END]:
                amounts = activation[i] if place <= span[i, GRADIENT] else gradient[i]
                rest -= largest(amounts)
                size, made = spread(sums, size, amounts, work.allocated[place] - rest, capacity[place])
                steps += made
                if size == 0:
                    break
        if size > 0:
            capacity[place] = sums[0, size - 1]


@callee
def largest(amounts: Array) -> Any:
    """Return the largest of several amounts."""
    most = amounts[0]
    for amount in amounts:
        most = max(most, amount)
    return most


@callee
def spread(sums: Array, size: int, amounts: Array, least: int, most: int) -> tuple[int, int]:
    """Add each amount to each sum; keep those from ``least`` to ``most`` in ``sums[0]``, in increasing order.

    Returns
    -------
    int
        Number of sums; 0 if the array is too small for them.
    int
        Number of steps.
    """
    made = 0
    steps = 0
    for j in range(len(amounts)):
        repeated = False
        for other in range(j):
            repeated |= amounts[other] == amounts[j]
        if repeated:
            continue
        # Merge the sums made so far, sums[1], with those of this amount into sums[2].
        a, b, count = 0, 0, 0
        while b < size and sums[0, b] + amounts[j] < least:
            b += 1
        while a < made or b < size:
            if b < size and (a == made or sums[0, b] + amounts[j] <= sums[1, a]):
                value = sums[0, b] + amounts[j]
                b += 1
                if value > most:
                    b = size
                    continue
            else:
                value = sums[1, a]
                a += 1
            if count > 0 and sums[2, count - 1] == value:
                continue
            if count == sums.shape[1]:
                return 0, steps + count
            sums[2, count] = value
            count += 1
        for a in range(count):
            sums[1, a] = sums[2, a]
        made = count
        steps += count
    for a in range(made):
        sums[0, a] = sums[1, a]
    return made, steps
