"""State that all walks of one joint search share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.layout.cooptimize.kernels import ChainArrays
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement
from pipeloom.layout.cooptimize.params import CooptimizeParams
from pipeloom.layout.cooptimize.rules import PriorityRule
from pipeloom.search import Meter, Progress


@dataclass(frozen=True, slots=True)
class Start:
    """A placement and rule from which a walk may begin, and its makespan in ns."""

    ns: int
    placement: PartitionPlacement
    rule: PriorityRule


@dataclass(slots=True, eq=False)
class Best:
    """The best makespan of all walks in ns, and their total number of evaluations."""

    ns: int
    evaluations: int


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One joint search.

    Attributes
    ----------
    arrays : ChainArrays
        The chain in the form of the kernels.
    meter : Meter
        Progress against the budget. It counts the evaluations for the starts.
    target_ns : int
        Lower bound, in ns. Every walk ends when it is reached.
    exchanges : bool
        Whether single layers may be exchanged.
    """

    chain: LayerChain
    arrays: ChainArrays
    params: CooptimizeParams
    seed: int
    meter: Meter
    target_ns: int
    exchanges: bool
    best: Best
    on_progress: Callable[[Progress], None] | None
