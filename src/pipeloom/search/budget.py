"""Budgets of searches. Below the planner, only this module reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from pipeloom.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a search stops: after some seconds, some evaluations, or whichever comes first.

    Attributes
    ----------
    seconds : float, optional
        Seconds of ``clock``.
    evaluations : int, optional
        Number of schedules to try. On one thread, the result is then the same on every machine.
    clock : str or callable
        ``"wall"``, ``"cpu"`` (CPU time of this process), or a function that returns seconds.
    task_s : float
        Seconds to reserve for each task of the graph, for the steps after the search; see `Meter.reserve`.
    began_s : float, optional
        Reading of the clock when the budget began. None: it begins with the search.

    Raises
    ------
    InputError
        A limit is not at least 0, or there is none.
    """

    seconds: float | None = None
    evaluations: int | None = None
    clock: Literal["wall", "cpu"] | Callable[[], float] = "wall"
    task_s: float = 0.0
    began_s: float | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        if self.seconds is None and self.evaluations is None:
            raise InputError("budget", "has neither seconds nor evaluations", "give one of them, or both")
        for limit, unit in ((self.seconds, "s"), (self.evaluations, "evaluations")):
            if limit is not None and not limit >= 0:
                raise InputError("budget", f"{limit} {unit} is not at least 0")

    def now(self) -> float:
        """Read the clock, in s."""
        if callable(self.clock):
            return self.clock()
        return time.process_time() if self.clock == "cpu" else time.monotonic()

    def part(self, fraction: float) -> Budget:
        """Return a fraction of the budget, for one of several searches.

        Raises
        ------
        InputError
            The fraction is not above 0 and at most 1.
        """
        if not 0 < fraction <= 1:
            raise InputError("budget", f"a part of {fraction:g} is not above 0 and at most 1")
        return replace(
            self,
            seconds=None if self.seconds is None else self.seconds * fraction,
            evaluations=None if self.evaluations is None else max(1, int(self.evaluations * fraction)),
        )

    def from_now(self) -> Budget:
        """Return the budget begun, so that the steps before the search count too. Use it for only one search."""
        return replace(self, began_s=self.now()) if self.began_s is None else self

    def start(self) -> Meter:
        """Begin to spend the budget."""
        return Meter(self.from_now())


class Meter:
    """A budget that is being spent, shared by all parts of a search.

    Attributes
    ----------
    budget : Budget
        The budget, which has begun.
    used : int
        Number of evaluations. Searches add theirs.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget, self.used = budget, 0

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        assert self.budget.began_s is not None
        return self.budget.now() - self.budget.began_s

    @property
    def spent(self) -> float:
        """Return the spent fraction of the budget, from 0 to 1."""
        parts, seconds, evaluations = [0.0], self.budget.seconds, self.budget.evaluations
        if seconds is not None:
            # A clock that Ctrl-C ran out reads infinity, also at a later start. The time between is then not a number.
            parts.append(elapsed_s / seconds if (elapsed_s := self.elapsed_s()) < seconds else 1.0)
        if evaluations is not None:
            parts.append(self.used / evaluations if self.used < evaluations else 1.0)
        return max(parts)

    def left(self, wanted: int, until: float = 1.0) -> int:
        """Return how many of the ``wanted`` evaluations are allowed in the part ``until`` of the budget. 0: stop."""
        if self.spent >= 1:
            return 0
        if self.budget.evaluations is None:
            return wanted
        return max(0, min(wanted, ceil(min(until, 1.0) * self.budget.evaluations) - self.used))

    def rest(self, until: float = 1.0) -> Budget:
        """Return what is left of the part ``until`` of the budget, for the next of consecutive searches."""
        budget = self.budget
        return replace(
            budget,
            seconds=None if budget.seconds is None else max(0.0, until * budget.seconds - self.elapsed_s()),
            evaluations=None if budget.evaluations is None else max(0, int(until * budget.evaluations) - self.used),
            began_s=budget.now(),
        )

    def expected(self, made: int, took_s: float, part: float) -> float:
        """Return the expected number of evaluations in a part of the budget, at ``made`` evaluations in ``took_s``
        seconds.

        A negative part ends before it begins, so it allows none.
        """
        counts, part = [], max(0.0, part)
        if self.budget.seconds is not None:
            counts.append(part * self.budget.seconds * made / took_s if took_s > 0 else 0.0)
        if self.budget.evaluations is not None:
            counts.append(part * self.budget.evaluations)
        return min(counts)

    def reserve(self, num_tasks: int) -> None:
        """Reserve time for the steps after the search of ``num_tasks`` tasks. Further calls reserve nothing more."""
        seconds = self.budget.seconds
        if seconds is not None and self.budget.task_s > 0:
            self.budget = replace(self.budget, seconds=max(0.0, seconds - num_tasks * self.budget.task_s), task_s=0.0)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Let Ctrl-C end the block and the budget, so that a search still returns its best result."""
        try:
            yield
        except KeyboardInterrupt:
            self.budget = replace(self.budget, seconds=0.0)

    def add(self, seconds: float) -> None:
        """Count seconds of work that the clock of the budget did not measure."""
        assert self.budget.began_s is not None
        self.budget = replace(self.budget, began_s=self.budget.began_s - seconds)


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


def Deadline(seconds: float, clock: Literal["wall", "cpu"] = "wall") -> Budget:
    """Return a `Budget` of ``seconds`` of a ``clock``. Deprecated; removed in the next release.

    Parameters
    ----------
    seconds, clock
        As in `Budget`.
    """
    return Budget(seconds=seconds, clock=clock)


def Evaluations(count: int) -> Budget:
    """Return a `Budget` of ``count`` evaluations. Deprecated; removed in the next release.

    Parameters
    ----------
    count
        The number of evaluations.
    """
    return Budget(evaluations=count)
