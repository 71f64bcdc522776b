"""FSDP2 with ZeRO-3: no pipeline; replicas compute the whole model in step with each other (`dip.txt` Table 4)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import InputError

Pass = tuple[float, float]
"""Seconds of a module's forward and backward on one microbatch, gathers and reductions overlapped."""


def fsdp_seconds(replicas: Sequence[Sequence[Sequence[Pass]]]) -> float:
    """Time of an iteration of sharded data parallelism.

    Weights are gathered by all replicas together, so no replica begins a module before the slowest has come to
    it: a step takes, module by module, what its slowest replica takes.

    Parameters
    ----------
    replicas : per replica, per microbatch, per module in order
        All replicas have the same number of microbatches (an empty one is a row of zeros) and of modules.

    Raises
    ------
    InputError
        No replica, or unequal numbers of microbatches.
    """
    if not replicas:
        raise InputError("replicas", "is empty", "give at least one")
    if len({len(steps) for steps in replicas}) != 1:
        raise InputError("replicas", "have unequal numbers of microbatches", "pad with empty ones")
    total = 0.0
    for together in zip(*replicas, strict=True):
        for column in zip(*together, strict=True):
            total += max(forward for forward, _ in column) + max(backward for _, backward in column)
    return total
