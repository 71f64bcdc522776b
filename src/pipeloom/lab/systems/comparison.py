"""All systems by name, and one iteration under each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.explain.compare import BaselineResult
from pipeloom.lab.systems.chosen_layout import choose_layout
from pipeloom.lab.systems.fsdp import NAME as FSDP_NAME
from pipeloom.lab.systems.fsdp import fsdp
from pipeloom.lab.systems.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.lab.systems.optimus import optimus, optimus_bubbles
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
from pipeloom.spec import Layout

OURS = "pipeloom"
SYSTEMS: dict[str, Callable[[ModelOnCluster, Sequence[Microbatches]], System]] = {
    "1f1b": lambda c, t: megatron_1f1b(c, t),
    "1f1b-time": lambda c, t: megatron_1f1b(c, t, "time"),
    "interleaved": lambda c, t: megatron_interleaved(c, t),
    "interleaved-time": lambda c, t: megatron_interleaved(c, t, "time"),
    "zero-bubble": zero_bubble,
    "nnscaler": nnscaler,
    "optimus": optimus,
    "optimus-fine": optimus_bubbles,
    "fsdp": fsdp,
    "dip": lambda c, t: searched_system("DIP as published", c, dip_layout(c, t), "mcts"),
    "dip-priority": lambda c, t: searched_system("PipeWeaver as published", c, dip_layout(c, t), "mcts priority"),
    "pipeloom-dip-layout": lambda c, t: searched_system("Pipeloom, DIP's layout", c, dip_layout(c, t)),
    OURS: lambda c, t: _ours(c, t),
}
"""How a system gets its layout from sampled iterations. Without ``-time`` stages are balanced by parameters."""
TITLES = {
    "1f1b": "Megatron-LM 1F1B, by parameters",
    "1f1b-time": "Megatron-LM 1F1B, by time",
    "interleaved": "Megatron-LM interleaved, by parameters",
    "interleaved-time": "Megatron-LM interleaved, by time",
    "zero-bubble": "Zero-bubble H1, by time",
    "nnscaler": "nnScaler*",
    "optimus": "Optimus, coarse",
    "optimus-fine": "Optimus, fine",
    "fsdp": FSDP_NAME,
    "dip": "DIP as published",
    "dip-priority": "PipeWeaver as published",
    "pipeloom-dip-layout": "Pipeloom, DIP's layout",
    OURS: "Pipeloom",
}


@dataclass(frozen=True)
class Comparison:
    """One system on one iteration: what it does, or why it cannot."""

    name: str
    title: str
    layout: Layout | None
    result: BaselineResult | None
    problem: str = ""
    tried: tuple[LayoutEvaluation, ...] = ()
    """Layouts that its own was chosen among, and what each would cost; the chosen one first."""


def suitable(case: ModelOnCluster, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Systems that can train a model: Optimus wants encoders before a language model.

    Raises
    ------
    InputError
        An unknown name.
    """
    chosen = tuple(SYSTEMS if names is None else names)
    for name in chosen:
        if name not in SYSTEMS:
            raise InputError("system", f"{name!r} is none of {', '.join(SYSTEMS)}")
    modules = case.model.modules
    encodes = len(modules) > 1 and modules[-1].reads != "videos"
    return tuple(name for name in chosen if not name.startswith("optimus") or encodes)


def compare_case(
    case: ModelOnCluster,
    typical: Sequence[Microbatches],
    groups: Microbatches,
    names: Sequence[str],
    *,
    budget: StoppingRule,
    seed: int = 0,
    on_system: Callable[[str], None] = lambda _: None,
) -> tuple[Comparison, ...]:
    """Time one iteration under every system.

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

    Returns
    -------
    tuple of Comparison
        In the order of ``names``.
    """
    out = []
    for name in suitable(case, names):
        title = TITLES[name]
        on_system(title)
        layout: Layout | None = None
        tried: tuple[LayoutEvaluation, ...] = ()
        try:
            one = SYSTEMS[name](case, typical)
            layout, tried = one.layout, one.tried
            found = one.run(groups, budget, seed)
        except InfeasibleError as error:
            out.append(Comparison(name, title, layout, None, str(error), tried))
            continue
        out.append(Comparison(name, title, layout, replace(found, name=title), tried=tried))
    return tuple(out)


def _ours(case: ModelOnCluster, typical: Sequence[Microbatches]) -> System:
    """Our search under the layout that does best on the sampled iterations."""
    tried = choose_layout(case, typical, final=FINAL)
    return replace(searched_system("Pipeloom", case, tried[0].layout), tried=tried)
