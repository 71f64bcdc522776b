"""All systems by name, and one iteration under each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.explain.compare import BaselineResult
from pipeloom.lab.systems.chosen_layout import choose_layout
from pipeloom.lab.systems.dynapipe import dynapipe
from pipeloom.lab.systems.fsdp import NAME as FSDP_NAME
from pipeloom.lab.systems.fsdp import fsdp
from pipeloom.lab.systems.megascale_omni import megascale_omni
from pipeloom.lab.systems.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.lab.systems.optimus import has_encoders, optimus, optimus_bubbles
from pipeloom.lab.systems.systems import (
    System,
    dip_layout,
    megatron_1f1b,
    megatron_interleaved,
    nnscaler,
    searched_system,
    zero_bubble,
)
from pipeloom.layout.choose import FINAL, LayoutEvaluation
from pipeloom.search import StoppingRule
from pipeloom.spec import Layout, ModelSpec

OURS = "pipeloom"


@dataclass(frozen=True)
class SystemEntry:
    """A system to compare with, before it has a layout."""

    title: str
    """In tables and reports; no two systems have the same."""
    make: Callable[[ModelOnCluster, Sequence[Microbatches]], System]
    """Chooses its layout on sampled iterations."""
    suits: Callable[[ModelSpec], bool] = lambda _model: True
    """Whether it can train a model."""


SYSTEMS: dict[str, SystemEntry] = {
    "1f1b": SystemEntry("Megatron-LM 1F1B, by parameters", megatron_1f1b),
    "1f1b-time": SystemEntry("Megatron-LM 1F1B, by time", lambda c, t: megatron_1f1b(c, t, "time")),
    "interleaved": SystemEntry("Megatron-LM interleaved, by parameters", megatron_interleaved),
    "interleaved-time": SystemEntry(
        "Megatron-LM interleaved, by time", lambda c, t: megatron_interleaved(c, t, "time")
    ),
    "zero-bubble": SystemEntry("Zero-bubble H1, by time", zero_bubble),
    "nnscaler": SystemEntry("nnScaler*", nnscaler),
    "optimus": SystemEntry("Optimus, coarse", optimus, has_encoders),
    "optimus-fine": SystemEntry("Optimus, fine", optimus_bubbles, has_encoders),
    "megascale-omni": SystemEntry("MegaScale-Omni", megascale_omni, has_encoders),
    "dynapipe": SystemEntry("DynaPipe", dynapipe),
    "fsdp": SystemEntry(FSDP_NAME, fsdp),
    "dip": SystemEntry(
        "DIP as published", lambda c, t: searched_system("DIP as published", c, dip_layout(c, t), "mcts")
    ),
    "dip-priority": SystemEntry(
        "PipeWeaver as published",
        lambda c, t: searched_system("PipeWeaver as published", c, dip_layout(c, t), "mcts priority"),
    ),
    "pipeloom-dip-layout": SystemEntry(
        "Pipeloom, DIP's layout", lambda c, t: searched_system("Pipeloom, DIP's layout", c, dip_layout(c, t))
    ),
    OURS: SystemEntry("Pipeloom", lambda c, t: _ours(c, t)),
}
"""By the names that ``pipeloom compare`` takes. Without ``-time`` stages are balanced by parameters."""


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


def suitable(case: ModelOnCluster, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Systems that can train a model.

    Raises
    ------
    InputError
        An unknown name.
    """
    chosen = tuple(SYSTEMS if names is None else names)
    for name in chosen:
        if name not in SYSTEMS:
            raise InputError("system", f"{name!r} is none of {', '.join(SYSTEMS)}")
    return tuple(name for name in chosen if SYSTEMS[name].suits(case.model))


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
    case : ModelOnCluster
    typical : sequence of Microbatches
        Iterations on which systems choose their layouts, before training.
    groups : Microbatches
        The iteration.
    names : sequence of str
        Keys of `SYSTEMS`.
    budget : StoppingRule
        For the systems that search.
    seed : int
    on_system : callable
        Told the title of each system before its turn.

    Yields
    ------
    Comparison
        In the order of ``names``.
    """
    for name in suitable(case, names):
        entry = SYSTEMS[name]
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


def _ours(case: ModelOnCluster, typical: Sequence[Microbatches]) -> System:
    """Our search under the layout that does best on the sampled iterations."""
    tried = choose_layout(case, typical, final=FINAL)
    return replace(searched_system("Pipeloom", case, tried[0].layout), tried=tried)
