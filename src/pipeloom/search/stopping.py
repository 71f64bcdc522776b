"""When a search ends. The only place below the planner that reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple, Protocol

from pipeloom.errors import InputError


class StoppingRule(Protocol):
    """What `pipeloom.search.solve` asks for; `Deadline`, `Evaluations` and `Both` are the ones there are."""

    def start(self) -> Watch:
        """Begin to count."""
        ...


@dataclass(frozen=True, slots=True)
class Watch:
    """A rule that has begun to count.

    Attributes
    ----------
    now : callable
        Seconds of the rule's clock.
    task_s : float
        Of the seconds, what is kept for each task of the graph, for what follows the search; see `Before`.
    """

    now: Callable[[], float]
    began_s: float
    seconds: float | None
    evaluations: int | None
    task_s: float = 0.0

    def before(self, num_tasks: int) -> Watch:
        """Keep the seconds that what follows the search of so many tasks takes; asked again, nothing more."""
        if self.seconds is None or self.task_s == 0:
            return self
        return replace(self, seconds=max(0.0, self.seconds - num_tasks * self.task_s), task_s=0.0)

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.now() - self.began_s

    def left(self, used: int, wanted: int) -> int:
        """How many of the ``wanted`` evaluations may still be made after ``used``; 0: stop."""
        if self.seconds is not None and self.elapsed_s() >= self.seconds:
            return 0
        return wanted if self.evaluations is None else max(0, min(wanted, self.evaluations - used))

    def share(self, used: int) -> float:
        """Part of the budget that is spent, between 0 and 1."""
        parts = [0.0]
        if self.seconds is not None:
            parts.append(self.elapsed_s() / self.seconds if self.seconds > 0 else 1.0)
        if self.evaluations is not None:
            parts.append(used / self.evaluations if self.evaluations > 0 else 1.0)
        return min(1.0, max(parts))

    def expected(self, made: int, took_s: float, part: float) -> float:
        """How many evaluations a part of the budget has room for at the speed of ``made`` in ``took_s`` seconds.

        A part that is over before it begins is negative, and has room for none.
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
        """Refuse negative times."""
        if not self.seconds >= 0:
            raise InputError("budget", f"{self.seconds} s is negative")

    def start(self) -> Watch:
        """Begin to count."""
        now = _clock(self.clock)
        return Watch(now, now(), self.seconds, None)


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Stop after a number of schedules tried: the same answer on every machine, on one thread."""

    count: int

    def __post_init__(self) -> None:
        """Refuse negative counts."""
        if self.count < 0:
            raise InputError("budget", f"{self.count} evaluations is negative")

    def start(self) -> Watch:
        """Begin to count."""
        return Watch(time.monotonic, time.monotonic(), None, self.count)


@dataclass(frozen=True, slots=True)
class Both:
    """Stop at whichever comes first."""

    deadline: Deadline
    evaluations: Evaluations

    def start(self) -> Watch:
        """Begin to count."""
        now = _clock(self.deadline.clock)
        return Watch(now, now(), self.deadline.seconds, self.evaluations.count)


@dataclass(frozen=True, slots=True)
class Share:
    """Stop after a part of what another rule allows: for two searches that share one budget."""

    rule: StoppingRule
    part: float

    def __post_init__(self) -> None:
        """Refuse parts that are none."""
        if not 0 < self.part <= 1:
            raise InputError("budget", f"a part of {self.part:g} is not above 0 and at most 1")

    def start(self) -> Watch:
        """Begin to count."""
        watch = self.rule.start()
        return replace(
            watch,
            seconds=None if watch.seconds is None else watch.seconds * self.part,
            evaluations=None if watch.evaluations is None else max(1, int(watch.evaluations * self.part)),
        )


@dataclass(frozen=True, slots=True)
class Until:
    """Stop when a watch that is running has counted a part of its budget: for searches one after the other.

    Attributes
    ----------
    used : int
        Evaluations made so far.
    part : float
        Of the whole budget, what came before included.
    """

    watch: Watch
    used: int
    part: float

    def start(self) -> Watch:
        """Begin to count what is left."""
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
    """A rule that began to count before the search: what led up to it counts too. Serves one search.

    Attributes
    ----------
    watch : Watch
        For example ``Deadline(1.0, "cpu").start()``.
    """

    watch: Watch

    def start(self) -> Watch:
        """Go on counting."""
        return self.watch


@dataclass(frozen=True, slots=True)
class Before:
    """Stop so long before another rule's seconds are over that what follows the search is done when they are.

    A search knows the size of its graph, and keeps so much for each task (`Watch.before`). Evaluations are not seconds,
    and stay as they are.

    Attributes
    ----------
    task_s : float
        Seconds that follow for each task.
    """

    rule: StoppingRule
    task_s: float

    def start(self) -> Watch:
        """Begin to count."""
        return replace(self.rule.start(), task_s=self.task_s)


class Stretch(NamedTuple):
    """A stretch of a budget, between two parts of the whole."""

    since: float
    until: float

    def first(self, share: float) -> Stretch:
        """Its first part."""
        return Stretch(self.since, self.since + share * (self.until - self.since))

    def cooling(self, spent: float) -> float:
        """What is left of it, from 1 at its begin to 0 at its end."""
        return max(0.0, 1 - (spent - self.since) / (self.until - self.since))


WHOLE = Stretch(0.0, 1.0)


class Meter:
    """A watch that is running, and the schedules tried so far: what all searches of one budget share.

    Attributes
    ----------
    used : int
        Evaluations made.
    """

    def __init__(self, watch: Watch, used: int = 0) -> None:
        self.watch, self.used = watch, used

    @property
    def spent(self) -> float:
        """Part of the budget that is spent, between 0 and 1."""
        return self.watch.share(self.used)

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.watch.elapsed_s()

    def left(self, wanted: int, until: float = 1.0) -> int:
        """How many of the ``wanted`` evaluations may still be made, before the part ``until`` of them; 0: stop."""
        if self.watch.evaluations is not None:
            wanted = min(wanted, ceil(until * self.watch.evaluations) - self.used)
        return self.watch.left(self.used, max(0, wanted))

    def take(self, seconds: float) -> None:
        """Count seconds of work that the watch's clock has not seen."""
        self.watch = replace(self.watch, began_s=self.watch.began_s - seconds)
