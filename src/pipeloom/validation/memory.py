"""Compare predicted with published memory: the same rank, and allocated with allocated, reserved with reserved."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from pipeloom.validation.predict import Prediction
from pipeloom.validation.runs import DATA, PublishedRun

Rank = Literal["fullest", "last", "mean"]
Kind = Literal["allocated", "reserved", "not stated"]
RESERVED = 1.05
"""What PyTorch's allocator reserves, relative to the tensors in it: the median of SimuMax's 13 configurations on B200,
which have 1.03 to 1.09 (``data/memory_by_rank.csv``)."""
BELOW = -0.02
"""Errors below this are counted: a run that was predicted to fit may run out of memory."""
_MIB = 1 << 20


class MemoryKind(NamedTuple):
    """What a published memory is: of which rank, and of which state of the allocator."""

    rank: Rank
    kind: Kind


class MemoryErrors(NamedTuple):
    """Errors of predicted memory, relative to the published one."""

    name: str
    num_runs: int
    median: float
    absolute: float
    ninth: float
    """Median error, median of the absolute error and its 90th percentile."""
    lowest: float
    highest: float
    """Extreme errors."""
    num_below: int
    """Runs whose prediction is more than 2 % below the published memory."""


class RankMemory(NamedTuple):
    """Published memory of one run: of every device, and what the fullest one reserved."""

    allocated_bytes: tuple[float, ...]
    reserved_bytes: float


def memory_kind(run: PublishedRun) -> MemoryKind:
    """Return what the memory of a run is, from the words of its column ``mem_kind``.

    Megatron-LM's tests log the memory of the last pipeline rank. Where no rank is named, it is that of the fullest one.
    """
    words = run.mem_kind
    rank: Rank = "last" if "rank that logs" in words else "mean" if "mean over ranks" in words else "fullest"
    kind: Kind = "reserved" if "reserved" in words else "allocated" if "allocated" in words else "not stated"
    return MemoryKind(rank, kind)


def comparable_bytes(prediction: Prediction) -> float | None:
    """Return the predicted bytes of the rank and kind that the run's memory is of; None if either is unknown.

    Without the recomputation, memory is unknown.
    """
    peaks = prediction.rank_bytes
    if not peaks or not prediction.run.mem_bytes or prediction.run.recompute == "unknown":
        return None
    rank, kind = memory_kind(prediction.run)
    value = float({"fullest": max(peaks), "last": peaks[-1], "mean": sum(peaks) / len(peaks)}[rank])
    return value * (RESERVED if kind == "reserved" else 1.0)


def memory_error(prediction: Prediction) -> float | None:
    """Return predicted over published memory, less 1; None if either is unknown."""
    predicted = comparable_bytes(prediction)
    return None if predicted is None else predicted / (prediction.run.mem_bytes or 1.0) - 1


def summarize_memory(predictions: Sequence[Prediction]) -> tuple[MemoryErrors, ...]:
    """Return the errors of predicted memory: of all runs, by kind of attention, and by source."""
    known = [(each, error) for each in predictions if (error := memory_error(each)) is not None]
    if not known:
        return ()
    groups: dict[str, list[float]] = {"all runs": [error for _, error in known]}
    for each, error in known:
        name = "unfused" if each.attention == "unfused" else "fused"
        groups.setdefault(f"attention: {name}", []).append(error)
    for each, error in sorted(known, key=lambda pair: (pair[0].run.source, pair[0].run.mem_kind)):
        name = f"source: {each.run.source or 'not stated'} ({each.run.mem_kind or 'not stated'})"
        groups.setdefault(name, []).append(error)
    ranks = [error for each in predictions for error in rank_errors(each)]
    if ranks:
        groups["every rank of SimuMax's runs"] = ranks
    return tuple(memory_errors_of(name, errors) for name, errors in groups.items())


def memory_errors_of(name: str, errors: Iterable[float]) -> MemoryErrors:
    """Return the summary of some errors."""
    error = np.array(list(errors), float)
    absolute = np.abs(error)
    return MemoryErrors(
        name,
        len(error),
        float(np.median(error)),
        float(np.median(absolute)),
        float(np.quantile(absolute, 0.9)),
        float(error.min()),
        float(error.max()),
        int((error < BELOW).sum()),
    )


@cache
def memory_by_rank() -> dict[str, RankMemory]:
    """Return the published memory of every device, by the run's ``id``."""
    text = (DATA / "memory_by_rank.csv").read_text()
    return {
        name: RankMemory(tuple(float(one) * _MIB for one in allocated.split()), float(reserved) * 1024 * _MIB)
        for name, reserved, allocated in list(csv.reader(text.splitlines()))[1:]
    }


def rank_errors(prediction: Prediction) -> list[float]:
    """Return the error of every device of a run whose memory is published by rank; empty for all other runs.

    The devices of one pipeline rank are neighbors.
    """
    known = memory_by_rank().get(prediction.run.id)
    if known is None or not prediction.rank_bytes or prediction.run.source != "simumax":
        return []
    each = len(known.allocated_bytes) // len(prediction.rank_bytes)
    return [prediction.rank_bytes[i // each] / b - 1 for i, b in enumerate(known.allocated_bytes)]
