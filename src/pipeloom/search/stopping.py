"""Stopping rules. Below the planner, only this module reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple, Protocol

from pipeloom.errors import InputError


class StoppingRule(Protocol):
    """A stopping rule of `pipeloom.search.solve`, such as `Deadline`, `Evaluations` or `Both`."""

    def start(self) -> Watch:
        """Start counting."""
        ...


@dataclass(frozen=True, slots=True)
class Watch:
    """A running stopping rule.

    Attributes
    ----------
    now : callable
        Return the seconds of the clock of the rule.
    task_s : float
        Seconds to reserve for each task of the graph, for the steps after the search; see `Before`.
    """

    now: Callable[[], float]
    began_s: float
    seconds: float | None
    evaluations: int | None
    task_s: float = 0.0

    def before(self, num_tasks: int) -> Watch:
        """Reserve time for the steps after the search of ``num_tasks`` tasks. Further calls reserve nothing more."""
        if self.seconds is None or self.task_s == 0:
            return self
        return replace(self, seconds=max(0.0, self.seconds - num_tasks * self.task_s), task_s=0.0)

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return self.now() - self.began_s

    def left(self, used: int, wanted: int) -> int:
        """Return how many of the ``wanted`` evaluations are allowed after ``used``. 0: stop."""
        if self.seconds is not None and self.elapsed_s() >= self.seconds:
            return 0
        return wanted if self.evaluations is None else max(0, min(wanted, self.evaluations - used))

    def share(self, used: int) -> float:
        """Return the spent fraction of the budget, from 0 to 1."""
        parts = [0.0]
        if self.seconds is not None:
            parts.append(self.elapsed_s() / self.seconds if self.seconds > 0 else 1.0)
        if self.evaluations is not None:
            parts.append(used / self.evaluations if self.evaluations > 0 else 1.0)
        return min(1.0, max(parts))

    def expected(self, made: int, took_s: float, part: float) -> float:
        """Return the expected number of evaluations in a part of the budget, at ``made`` evaluations in ``took_s``
        seconds.

        A negative part ends before it begins, so it allows none.
        """
        counts, part = [], max(0.0, part)
        if self.seconds is not None:
            counts.append(part * self.seconds * made / took_s if took_s > 0 else 0.0)
        if self.evaluations is not None:
            counts.append(part * self.evaluations)
        return min(counts, default=0.0)


def _clock(name: str) -> Callable[[], float]:
    return time.process_time if name == "cpu" else time.monotonic


@dataclass(frozen=True, slots=True)
class Deadline:
    """Stop after some seconds of wall time, or of this process's CPU time."""

    seconds: float
    clock: Literal["wall", "cpu"] = "wall"

    def __post_init__(self) -> None:
        """Raise `InputError` for negative times."""
        if not self.seconds >= 0:
            raise InputError("budget", f"{self.seconds} s is negative")

    def start(self) -> Watch:
        """Start counting."""
        now = _clock(self.clock)
        return Watch(now, now(), self.seconds, None)


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Stop after a number of evaluated schedules. On one thread, the result is the same on every machine."""

    count: int

    def __post_init__(self) -> None:
        """Raise `InputError` for negative counts."""
        if self.count < 0:
            raise InputError("budget", f"{self.count} evaluations is negative")

    def start(self) -> Watch:
        """Start counting."""
        return Watch(time.monotonic, time.monotonic(), None, self.count)


@dataclass(frozen=True, slots=True)
class Both:
    """Stop at the deadline or after the evaluations, whichever comes first."""

    deadline: Deadline
    evaluations: Evaluations

    def start(self) -> Watch:
        """Start counting."""
        now = _clock(self.deadline.clock)
        return Watch(now, now(), self.deadline.seconds, self.evaluations.count)


@dataclass(frozen=True, slots=True)
class Share:
    """Stop after a fraction of the budget of another rule, to share one budget between two searches."""

    rule: StoppingRule
    part: float

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid parts."""
        if not 0 < self.part <= 1:
            raise InputError("budget", f"a part of {self.part:g} is not above 0 and at most 1")

    def start(self) -> Watch:
        """Start counting."""
        watch = self.rule.start()
        return replace(
            watch,
            seconds=None if watch.seconds is None else watch.seconds * self.part,
            evaluations=None if watch.evaluations is None else max(1, int(watch.evaluations * self.part)),
        )


@dataclass(frozen=True, slots=True)
class Until:
    """Stop when a running watch has spent a part of its budget, for consecutive searches.

    Attributes
    ----------
    used : int
        Number of evaluations so far.
    part : float
        Fraction of the whole budget, including what is already spent.
    """

    watch: Watch
    used: int
    part: float

    def start(self) -> Watch:
        """Start counting the remainder."""
        watch = self.watch
        seconds, evaluations = watch.seconds, watch.evaluations
        return replace(
            watch,
            began_s=watch.now(),
            seconds=None if seconds is None else max(0.0, self.part * seconds - watch.elapsed_s()),
            evaluations=None if evaluations is None else max(0, int(self.part * evaluations) - self.used),
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """A rule that started before the search, so that earlier steps count too. Use it for only one search.

    Attributes
    ----------
    watch : Watch
        Running rule, for example ``Deadline(1.0, "cpu").start()``.
    """

    watch: Watch

    def start(self) -> Watch:
        """Continue counting."""
        return self.watch


@dataclass(frozen=True, slots=True)
class Before:
    """Stop early enough that the steps after the search end within the seconds of another rule.

    The search reserves time for each task of its graph (`Watch.before`). A limit on evaluations does not change.

    Attributes
    ----------
    task_s : float
        Seconds per task for the steps after the search.
    """

    rule: StoppingRule
    task_s: float

    def start(self) -> Watch:
        """Start counting."""
        return replace(self.rule.start(), task_s=self.task_s)


class Stretch(NamedTuple):
    """An interval of a budget, as fractions of the whole."""

    since: float
    until: float

    def first(self, share: float) -> Stretch:
        """Return the first ``share`` of the interval."""
        return Stretch(self.since, self.since + share * (self.until - self.since))

    def cooling(self, spent: float) -> float:
        """Return the remaining fraction, from 1 at the start to 0 at the end."""
        return max(0.0, 1 - (spent - self.since) / (self.until - self.since))


WHOLE = Stretch(0.0, 1.0)


class Meter:
    """A running watch and the number of evaluations, shared by all searches of one budget.

    Attributes
    ----------
    used : int
        Number of evaluations.
    """

    def __init__(self, watch: Watch, used: int = 0) -> None:
        self.watch, self.used = watch, used

    @property
    def spent(self) -> float:
        """Return the spent fraction of the budget, from 0 to 1."""
        return self.watch.share(self.used)

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return self.watch.elapsed_s()

    def left(self, wanted: int, until: float = 1.0) -> int:
        """Return how many of the ``wanted`` evaluations are allowed in the part ``until`` of the budget. 0: stop."""
        if self.watch.evaluations is not None:
            wanted = min(wanted, ceil(until * self.watch.evaluations) - self.used)
        return self.watch.left(self.used, max(0, wanted))

    def take(self, seconds: float) -> None:
        """Count seconds of work that the clock of the watch did not measure."""
        self.watch = replace(self.watch, began_s=self.watch.began_s - seconds)
