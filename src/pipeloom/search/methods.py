"""Search methods by name, including those of other installed distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeloom.errors import InputError
from pipeloom.plugins import SEARCH_METHODS, installed
from pipeloom.search.budget import Stretch
from pipeloom.search.local import local_search, portfolio
from pipeloom.search.phases import default
from pipeloom.search.state import Run, Search
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


@dataclass(frozen=True, slots=True)
class Exact:
    """The result of an exact solver.

    Attributes
    ----------
    schedule : Schedule
        Best schedule found. It is the hint if the solver found no better one.
    bound_ns : int
        Lower bound of the makespan, in ns.
    proved : bool
        Whether the schedule is optimal.
    """

    schedule: Schedule
    bound_ns: int
    proved: bool


class ExactSolver(Protocol):
    """An exact solver. It gets seconds of wall time, a feasible schedule and a known bound."""

    def __call__(
        self, graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0
    ) -> Exact:
        """Return the best schedule found, and a bound."""
        ...


@dataclass(frozen=True)
class Method:
    """A search method.

    Attributes
    ----------
    run : callable
        Search of orders.
    every_rollout : bool
        Whether strategies are chosen each time an order is decoded (DIP §5.1). Otherwise the choice alternates
        with the search of orders.
    start : callable, optional
        For methods with ``every_rollout``: return a schedule with the strategies for which orders are decoded. None:
        the minimum-memory candidates.
    assigns : bool
        Whether the method also assigns sub-microbatches of replicated modules to ranks.
    finish : ExactSolver, optional
        Exact solver that continues from the result of ``run`` in the first part of the budget.
    """

    run: Run
    every_rollout: bool = False
    start: Callable[[TaskGraph], Schedule | None] | None = None
    finish: ExactSolver | None = None
    assigns: bool = False


def _portfolio(search: Search, _stretch: Stretch) -> None:
    portfolio(search)


def _local(search: Search, stretch: Stretch) -> None:
    portfolio(search)
    local_search(search, stretch)


def _annealing(search: Search, stretch: Stretch) -> None:
    portfolio(search)
    # It cools from the start of the budget, including the static orders.
    local_search(search, Stretch(0.0, stretch.until), search.params.orders.heat)


METHODS: dict[str, Method] = {
    "default": Method(default, assigns=True),
    "portfolio": Method(_portfolio),
    "local search": Method(_local, assigns=True),
    "annealing": Method(_annealing, assigns=True),
}
"""Search methods of Pipeloom by name. `find_method` also finds those of other distributions."""


def find_method(name: str, entity: str = "method") -> Method:
    """Return a search method by its name.

    Parameters
    ----------
    name : str
        A key of `METHODS`, or a method that an installed distribution adds to ``pipeloom.search_methods``.
    entity : str
        Option or file field to name in the error.

    Raises
    ------
    InputError
        No method has this name.
    """
    if name in METHODS:
        return METHODS[name]
    added = installed(SEARCH_METHODS)
    if name not in added:
        remedy = "" if added else "the papers' searches and the exact solvers come with pipeloom-lab"
        raise InputError(entity, f"{name!r} is none of {', '.join([*METHODS, *added])}", remedy)
    method: Method = added[name]
    return method
