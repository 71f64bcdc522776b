"""Search methods by name, those of other installed distributions too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeloom.errors import InputError
from pipeloom.plugins import SEARCH_METHODS, installed
from pipeloom.search.local import local_search, portfolio
from pipeloom.search.phases import default
from pipeloom.search.state import Run, Search
from pipeloom.search.stopping import Stretch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


@dataclass(frozen=True, slots=True)
class Exact:
    """What an exact solver found.

    Attributes
    ----------
    schedule : Schedule
        The hint, where it found nothing better.
    bound_ns : int
        No schedule is faster.
    proved : bool
        The schedule is optimal.
    """

    schedule: Schedule
    bound_ns: int
    proved: bool


class ExactSolver(Protocol):
    """States the whole problem at once; gets seconds of wall time, a feasible schedule and a known bound."""

    def __call__(
        self, graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0
    ) -> Exact:
        """Return the best schedule found, and a bound."""
        ...


@dataclass(frozen=True)
class Method:
    """A way to search.

    Attributes
    ----------
    run : callable
        The search of orders.
    every_rollout : bool
        Strategies are chosen each time an order is decoded (`dip.txt` §5.1), not by turns with the search of orders.
    start : callable, optional
        For methods with ``every_rollout``: a schedule whose strategies orders are made for; None: the leanest.
    assigns : bool
        Ranks for the parts of replicated modules are chosen, too; else the method stands for one graph as it is.
    finish : ExactSolver, optional
        Goes on from what ``run`` found in the first part of the budget.
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
    # It cools from the begin of the budget, static orders included.
    local_search(search, Stretch(0.0, stretch.until), search.params.orders.heat)


METHODS: dict[str, Method] = {
    "default": Method(default, assigns=True),
    "portfolio": Method(_portfolio),
    "local search": Method(_local, assigns=True),
    "annealing": Method(_annealing, assigns=True),
}
"""Search methods of Pipeloom itself, by name; `find_method` knows those of other distributions, too."""


def find_method(name: str, entity: str = "method") -> Method:
    """Return a search method by its name.

    Parameters
    ----------
    name : str
        A key of `METHODS`, or of what an installed distribution adds to ``pipeloom.search_methods``.
    entity : str
        What the error names: an option, or a field of a file.

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
