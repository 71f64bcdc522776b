"""What all walks of one joint search share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.layout.cooptimise.kernels import ChainArrays
from pipeloom.layout.cooptimise.layer_chain import LayerChain, PartitionPlacement
from pipeloom.layout.cooptimise.params import CooptimiseParams
from pipeloom.layout.cooptimise.rules import PriorityRule
from pipeloom.search import Progress
from pipeloom.search.stopping import Watch


@dataclass(frozen=True, slots=True)
class Start:
    """A placement under a rule, from which a walk may begin."""

    ns: int
    placement: PartitionPlacement
    rule: PriorityRule


@dataclass(slots=True, eq=False)
class Best:
    """The best makespan of all walks, which each of them lowers, and the evaluations that all have made."""

    ns: int
    evaluations: int


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One joint search.

    Attributes
    ----------
    arrays : ChainArrays
        The same for the kernels.
    watch : Watch
        The budget.
    tried : int
        Evaluations that the starts took.
    target_ns : int
        Lower bound, at which every walk ends.
    exchanges : bool
        Whether single layers may change places.
    """

    chain: LayerChain
    arrays: ChainArrays
    params: CooptimiseParams
    seed: int
    watch: Watch
    tried: int
    target_ns: int
    exchanges: bool
    best: Best
    on_progress: Callable[[Progress], None] | None
