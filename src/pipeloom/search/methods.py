"""Search methods by name, including those of other installed distributions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pipeloom.errors import InputError
from pipeloom.plugins import SEARCH_METHODS, installed
from pipeloom.search.alternate import alternate
from pipeloom.search.budget import WHOLE, Stretch
from pipeloom.search.context import Context
from pipeloom.search.local import local_search, portfolio
from pipeloom.search.phases import default
from pipeloom.search.result import Solution
from pipeloom.search.state import Run, Search
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


@dataclass(frozen=True)
class Method:
    """A search method.

    Attributes
    ----------
    solve : callable
        Search of a graph within the budget of a context, such as `search_orders` with a search of orders.
    assigns : bool
        Whether the method also assigns sub-microbatches of replicated modules to ranks.
    """

    solve: Callable[[TaskGraph, Context], Solution]
    assigns: bool = False


def search_orders(graph: TaskGraph, context: Context, run: Run, stretch: Stretch = WHOLE) -> Solution:
    """Search orders. If pairs have candidates, alternate the search of orders and the choice of strategies.

    Parameters
    ----------
    run : callable
        Search of orders under one choice of strategies.
    stretch : Stretch
        Part of the budget.
    """
    if graph.candidates is not None:
        return context.solution(graph, alternate(graph, context, run, stretch))
    search = Search(graph, context)
    with suppress(KeyboardInterrupt):
        run(search, stretch)
    return context.solution(graph, Schedule(search.orders(), method=context.method))


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
    "default": Method(partial(search_orders, run=default), assigns=True),
    "portfolio": Method(partial(search_orders, run=_portfolio)),
    "local search": Method(partial(search_orders, run=_local), assigns=True),
    "annealing": Method(partial(search_orders, run=_annealing), assigns=True),
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
