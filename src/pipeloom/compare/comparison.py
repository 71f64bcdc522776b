"""Comparison of systems on one iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeloom.compare.baseline import System
from pipeloom.compare.iterations import Iterations
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.compare.registry import BASELINES, suitable
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.search import Budget
from pipeloom.spec import Layout


@dataclass(frozen=True)
class Comparison:
    """Result of one system on one iteration, or the reason why there is none."""

    name: str
    title: str
    layout: Layout | None
    result: BaselineResult | None
    problem: str = ""
    """Reason without a result."""
    tried: tuple[LayoutEvaluation, ...] = ()
    """Evaluations of the candidate layouts, the chosen one first."""
    can_run: bool = True
    """False if the system cannot run the model or the data with any memory."""


def compare_setting(
    setting: ModelOnCluster,
    iterations: Iterations,
    names: Sequence[str],
    *,
    budget: Budget,
    seed: int = 0,
    on_system: Callable[[str], None] = lambda _: None,
) -> Iterator[Comparison]:
    """Time one iteration under every system of ``names`` in turn, and yield its result.

    Systems choose their layouts on the typical iterations, before training. Those that pack samples themselves get them
    without padding. ``budget`` is that of systems that search. ``on_system`` is called with the title of each system
    before it is timed.
    """
    for name in suitable(setting, names):
        entry = BASELINES[name]
        on_system(entry.title)
        mine = iterations.real if entry.packs_samples else iterations
        yield compared(name, entry.title, partial(entry.make, setting, mine.typical), mine.groups, budget, seed)


def compared(
    name: str, title: str, make: Callable[[], System], microbatches: Microbatches, budget: Budget, seed: int
) -> Comparison:
    """Make a system and time one iteration under it; there is no result if the system raises `InputError`."""
    layout: Layout | None = None
    tried: tuple[LayoutEvaluation, ...] = ()
    try:
        one = make()
        layout, tried = one.layout, one.tried
        found = one.run(microbatches, budget, seed)
    except (InfeasibleError, InputError) as error:
        return Comparison(name, title, layout, None, str(error), tried, isinstance(error, InfeasibleError))
    return Comparison(name, title, layout, replace(found, name=title), tried=tried)
