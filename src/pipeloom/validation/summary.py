"""Summarize predictions of published runs: errors, rank correlation, regret and coverage of the intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from pipeloom.validation.memory import MemoryErrors, summarize_memory
from pipeloom.validation.predict import Prediction
from pipeloom.validation.runs import PublishedRun


class Errors(NamedTuple):
    """Errors of some runs."""

    name: str
    num_runs: int
    """Number of runs with a published and a predicted time."""
    median: float
    absolute: float
    ninth: float
    """Median error, median of the absolute error and its 90th percentile."""
    covered: float
    """Share of published times inside the 80 % interval."""
    half_width: float
    """Median of half the interval's width, relative to the prediction."""


class Regret(NamedTuple):
    """Published time of the configuration that is predicted fastest, over the fastest, less 1."""

    groups: int
    median: float
    ninth: float


class Summary(NamedTuple):
    """Summary of the predictions of a table of runs."""

    num_runs: int
    num_expressed: int
    errors: tuple[Errors, ...]
    tau: float | None
    """Kendall's tau over pairs of one source, model and device that differ in configuration. None: no pairs."""
    regret: Regret | None
    reasons: dict[str, int]
    """Number of runs that cannot be expressed, by reason."""
    memory: tuple[MemoryErrors, ...] = ()
    """Errors of predicted memory; empty if no run has a published one."""


def summarize(predictions: Sequence[Prediction]) -> Summary:
    """Summarize predictions."""
    known = [each for each in predictions if each.error is not None]
    errors = [errors_of("all runs", known)] if known else []
    for label, key in GROUPINGS:
        names = sorted({key(each.run) for each in known})
        errors += [errors_of(f"{label}: {n}", [each for each in known if key(each.run) == n]) for n in names]
    reasons = Counter(each.reason_kind for each in predictions if each.reason)
    return Summary(
        len(predictions),
        sum(not each.reason for each in predictions),
        tuple(errors),
        kendall_tau(known),
        regret(known),
        dict(reasons.most_common()),
        summarize_memory(predictions),
    )


GROUPINGS: tuple[tuple[str, Callable[[PublishedRun], str]], ...] = (
    ("device and kind", lambda run: f"{run.device}, {run.kind}"),
    ("kind", lambda run: run.kind),
    ("source", lambda run: run.source or "not stated"),
)


def errors_of(name: str, predictions: Sequence[Prediction]) -> Errors:
    """Return the errors of predictions whose published time is known."""
    error = np.array([each.error for each in predictions], float)
    absolute = np.abs(error)
    inside = [each.low_s <= (each.run.measured_s or 0.0) <= each.high_s for each in predictions]
    width = [(each.high_s - each.low_s) / 2 / each.seconds for each in predictions]
    return Errors(
        name,
        len(error),
        float(np.median(error)),
        float(np.median(absolute)),
        float(np.quantile(absolute, 0.9)),
        float(np.mean(inside)),
        float(np.median(width)),
    )


def kendall_tau(predictions: Iterable[Prediction]) -> float | None:
    """Return Kendall's tau of published and predicted seconds a token and device; None without pairs."""
    return kendall_tau_of([(each.run, each.seconds) for each in predictions])


def kendall_tau_of(predicted: Iterable[tuple[PublishedRun, float]], *, per_token: bool = True) -> float | None:
    """Return Kendall's tau of runs with a published time, and their predicted seconds.

    Order configurations by seconds a token and device, or else by the seconds of an iteration, in which batches of
    different sizes are easy to order.
    """
    agree = differ = 0
    groups: dict[Hashable, list[tuple[float, float]]] = {}
    for run, seconds in predicted:
        costs = run.measured_s or 0.0, seconds
        if per_token:
            costs = run.per_token(costs[0]), run.per_token(costs[1])
        groups.setdefault((run.source, run.model, run.device), []).append(costs)
    for group in groups.values():
        for (published, cost), (other_published, other_cost) in combinations(group, 2):
            sign = (published - other_published) * (cost - other_cost)
            agree, differ = agree + (sign > 0), differ + (sign < 0)
    return (agree - differ) / (agree + differ) if agree + differ else None


def regret(predictions: Iterable[Prediction]) -> Regret | None:
    """Return the regret over groups of configurations of one model, device, number of devices, batch and precision."""

    def same(run: PublishedRun) -> Hashable:
        return run.source, run.model, run.device, run.gpus, run.gbs, run.seq_len, run.precision, run.task

    found = []
    for group in _groups(predictions, same):
        if len(group) > 1:
            best = min(each.run.measured_s or 0.0 for each in group)
            chosen = min(group, key=lambda each: each.seconds).run.measured_s or 0.0
            found.append(chosen / best - 1)
    if not found:
        return None
    return Regret(len(found), float(np.median(found)), float(np.quantile(found, 0.9)))


def _groups(predictions: Iterable[Prediction], key: Callable[[PublishedRun], Hashable]) -> Iterable[list[Prediction]]:
    groups: dict[Hashable, list[Prediction]] = {}
    for each in predictions:
        groups.setdefault(key(each.run), []).append(each)
    return groups.values()
