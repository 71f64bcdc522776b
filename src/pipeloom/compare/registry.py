"""Baselines of `pipeloom compare`, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeloom.compare.baseline import System, searched_system
from pipeloom.compare.baselines.dip import dip_layout
from pipeloom.compare.baselines.dynapipe import dynapipe
from pipeloom.compare.baselines.fsdp import NAME as FSDP_NAME
from pipeloom.compare.baselines.fsdp import fsdp
from pipeloom.compare.baselines.megascale_omni import megascale_omni
from pipeloom.compare.baselines.megatron import megatron_1f1b, megatron_interleaved
from pipeloom.compare.baselines.nnscaler import nnscaler
from pipeloom.compare.baselines.optimus import has_encoders, optimus, optimus_bubbles
from pipeloom.compare.baselines.zero_bubble import zero_bubble
from pipeloom.compare.chosen_layout import choose_layout
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.errors import InputError
from pipeloom.layout.choose import FINAL
from pipeloom.spec import ModelSpec

OURS = "pipeloom"


@dataclass(frozen=True)
class Baseline:
    """A baseline in the registry, which makes a `System` for a model."""

    title: str
    """Unique title in tables and reports."""
    make: Callable[[ModelOnCluster, Sequence[Microbatches]], System]
    """Make the system, whose layout is chosen on sampled iterations."""
    suits: Callable[[ModelSpec], bool] = lambda _model: True
    """Return whether it can train a model."""
    packs_samples: bool = False
    """Whether its data loader packs samples into microbatches itself, without the padding of the given ones."""


BASELINES: dict[str, Baseline] = {
    "1f1b": Baseline("Megatron-LM 1F1B, by parameters", megatron_1f1b),
    "1f1b-time": Baseline("Megatron-LM 1F1B, by time", lambda c, t: megatron_1f1b(c, t, "time")),
    "interleaved": Baseline("Megatron-LM interleaved, by parameters", megatron_interleaved),
    "interleaved-time": Baseline("Megatron-LM interleaved, by time", lambda c, t: megatron_interleaved(c, t, "time")),
    "zero-bubble": Baseline("Zero-bubble H1, by time", zero_bubble),
    "nnscaler": Baseline("nnScaler*", nnscaler),
    "optimus": Baseline("Optimus, coarse", optimus, has_encoders),
    "optimus-fine": Baseline("Optimus, fine", optimus_bubbles, has_encoders),
    "megascale-omni": Baseline("MegaScale-Omni", megascale_omni, has_encoders, packs_samples=True),
    "dynapipe": Baseline("DynaPipe", dynapipe, packs_samples=True),
    "fsdp": Baseline(FSDP_NAME, fsdp),
    "dip": Baseline("DIP as published", lambda c, t: searched_system("DIP as published", c, dip_layout(c, t), "mcts")),
    "dip-priority": Baseline(
        "PipeWeaver as published",
        lambda c, t: searched_system("PipeWeaver as published", c, dip_layout(c, t), "mcts priority"),
    ),
    "pipeloom-dip-layout": Baseline(
        "Pipeloom, DIP's layout", lambda c, t: searched_system("Pipeloom, DIP's layout", c, dip_layout(c, t))
    ),
    OURS: Baseline("Pipeloom", lambda c, t: _ours(c, t)),
}
"""Baselines by the names that ``pipeloom compare`` accepts. Without ``-time``, stages are balanced by parameters."""


def _ours(setting: ModelOnCluster, typical: Sequence[Microbatches]) -> System:
    """Make Pipeloom with the layout that is best on the sampled iterations."""
    tried = choose_layout(setting, typical, final=FINAL)
    return replace(searched_system("Pipeloom", setting, tried[0].layout), tried=tried)


def suitable(setting: ModelOnCluster, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of systems that can train a model; raise `InputError` for an unknown name."""
    chosen = tuple(BASELINES if names is None else names)
    for name in chosen:
        if name not in BASELINES:
            raise InputError("system", f"{name!r} is none of {', '.join(BASELINES)}")
    return tuple(name for name in chosen if BASELINES[name].suits(setting.model))
