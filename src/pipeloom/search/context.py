"""What one call of the search is asked for, which all that it does can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.search.params import DEFAULTS, SearchParams
from pipeloom.search.result import Progress
from pipeloom.search.stopping import Meter, StoppingRule
from pipeloom.timeline import LowerBound


@dataclass(frozen=True, slots=True)
class Context:
    """What one call of the search is asked for.

    Attributes
    ----------
    meter : Meter
        Of the budget: it runs, and counts what all searches try.
    bound : LowerBound
        No schedule of the graph is faster.
    """

    meter: Meter
    bound: LowerBound
    seed: int
    method: str = "default"
    threads: int = 1
    params: SearchParams = DEFAULTS
    on_progress: Callable[[Progress], None] | None = None


def begin(
    budget: StoppingRule, bound_ns: int = 0, seed: int = 0, *, threads: int = 1, params: SearchParams = DEFAULTS
) -> Context:
    """Start a budget, for those who call a part of the search alone."""
    return Context(Meter(budget.start()), LowerBound(bound_ns, "given"), seed, threads=threads, params=params)
