"""All systems by name, and one iteration under each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeloom.compare.baseline import System
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.compare.registry import BASELINES, suitable
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.search import StoppingRule
from pipeloom.spec import Layout


@dataclass(frozen=True)
class Comparison:
    """One system on one iteration: what it does, or why it cannot."""

    name: str
    title: str
    layout: Layout | None
    result: BaselineResult | None
    problem: str = ""
    """Why there is no result."""
    tried: tuple[LayoutEvaluation, ...] = ()
    """Layouts that its own was chosen among, and what each would cost; the chosen one first."""
    can_run: bool = True
    """False: the system cannot run the model or the data, whatever the memory."""


def compare_case(
    case: ModelOnCluster,
    typical: Sequence[Microbatches],
    groups: Microbatches,
    names: Sequence[str],
    *,
    budget: StoppingRule,
    seed: int = 0,
    on_system: Callable[[str], None] = lambda _: None,
) -> Iterator[Comparison]:
    """Time one iteration under every system, one after the other.

    Parameters
    ----------
    typical : sequence of Microbatches
        Iterations on which systems choose their layouts, before training.
    groups : Microbatches
        The iteration.
    names : sequence of str
        Keys of `BASELINES`.
    budget : StoppingRule
        For the systems that search.
    on_system : callable
        Told the title of each system before its turn.

    Yields
    ------
    Comparison
        In the order of ``names``.
    """
    for name in suitable(case, names):
        entry = BASELINES[name]
        on_system(entry.title)
        yield compared(name, entry.title, partial(entry.make, case, typical), groups, budget, seed)


def compared(
    name: str, title: str, make: Callable[[], System], groups: Microbatches, budget: StoppingRule, seed: int
) -> Comparison:
    """Make a system, and time one iteration under it; a system that refuses its input has no result."""
    layout: Layout | None = None
    tried: tuple[LayoutEvaluation, ...] = ()
    try:
        one = make()
        layout, tried = one.layout, one.tried
        found = one.run(groups, budget, seed)
    except (InfeasibleError, InputError) as error:
        return Comparison(name, title, layout, None, str(error), tried, isinstance(error, InfeasibleError))
    return Comparison(name, title, layout, replace(found, name=title), tried=tried)
