"""Tighter capacities for the choice of memory strategies: what no sum of candidates can fill is of no use.

Candidates come in steps, so at a place where a few large pairs are held, the most that they can hold together may
be well below the rank's capacity. Whoever lowers the capacity to that loses no choice, but the Lagrangian bound,
which fills every place with fractions of candidates, rises.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.search.kernels.tables import BEGIN, END, GRADIENT, Options, Work

Array = npt.NDArray[Any]


@kernel
def tighten(o: Options, w: Work, most_steps: int) -> None:
    """Lower ``o.capacity`` where it has a price, the dearest first, to what candidates can fill.

    Parameters
    ----------
    o : Options
    w : Work
        ``allocated`` is what a choice that fits holds, ``multiplier`` the price of a byte; ``running`` and ``sums``
        are scratch.
    most_steps : int
        Steps of merging, over all places.
    """
    activation, gradient, span, capacity = o.activation, o.gradient, o.span, o.capacity
    price, sums = w.running, w.sums
    num_pairs = len(span)
    num_places = o.host_begin
    for k in range(num_places):
        price[k] = w.multiplier[k]
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
                size, made = spread(sums, size, amounts, w.allocated[place] - rest, capacity[place])
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
    """Add each of the amounts to each of the sums; keep in ``sums[0]``, rising, those from ``least`` to ``most``.

    Returns
    -------
    int
        How many there are; 0 if they are too many.
    int
        Steps taken.
    """
    made = 0
    steps = 0
    for j in range(len(amounts)):
        repeated = False
        for other in range(j):
            repeated |= amounts[other] == amounts[j]
        if repeated:
            continue
        # Merge what has been made, sums[1], with the sums by this amount, into sums[2].
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
