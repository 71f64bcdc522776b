"""Problem: everything about planning that does not change from batch to batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeloom import packing, search, tuning
from pipeloom.cost import Correction, PlannedCosts
from pipeloom.packing import PackingSpec
from pipeloom.plan import BackendName
from pipeloom.search import SearchParams
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Layout, ModelSpec
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TunedPipeline, TuningSpec, is_chain, tuned_pipeline

_RECKONED = MemoryLimit()


@dataclass(frozen=True)
class Problem:
    """Everything about planning that does not change from batch to batch."""

    model: ModelSpec
    layout: Layout
    costs: PlannedCosts
    packing: PackingSpec
    capacity_bytes: int | None = None
    tuning: TuningSpec | None = None
    """PipeTune's techniques, where they are chosen one by one; see `pipeloom.tuning`."""
    pipeline: TunedPipeline | None = None
    """Tables of the uncorrected costs, for PipeTune's recurrence; made where left out and the layout has one chunk of
    the backbone a rank, and all encoders before it."""
    backend: BackendName = "gloo"
    """Over which the plans' messages go."""
    search: SearchParams = DEFAULTS
    """What tunes the search of orders."""
    threads: int = 1
    """Threads that search; 0: half of the cores."""
    spare_bytes: tuple[int, ...] = ()
    """Of every rank, what plans of this batch were found to need more than the rule puts aside."""
    reckoned: MemoryLimit = _RECKONED
    """How memory is reckoned: what is put aside for messages, and what of the host's may be filled."""

    def __post_init__(self) -> None:
        """Tabulate the costs for the recurrence, once; calibration scales the tables."""
        by_name = self.tuning is not None and not self.tuning.searches
        if self.pipeline is None and (by_name or (self.plans_packing and is_chain(self.layout))):
            tokens = self.packing.token_budget
            pipeline = tuned_pipeline(
                self.model,
                self.layout,
                self.costs.uncorrected(),
                max_tokens=tokens,
                max_length=tokens,
                capacity_bytes=self.capacity_bytes,
                num_messages=self.memory.num_messages,
            )
            object.__setattr__(self, "pipeline", pipeline)

    @property
    def memory(self) -> MemoryLimit:
        """What every rank has, and puts aside."""
        return replace(self.reckoned, capacity_bytes=self.capacity_bytes, spare_bytes=self.spare_bytes)

    def sparing(self, more: Sequence[int]) -> Problem:
        """Return the same problem with so much more put aside on every rank."""
        return replace(self, spare_bytes=self.memory.sparing(more).spare_bytes)

    @property
    def plans_packing(self) -> bool:
        """Whether microbatches are a part of the search."""
        return self.packing.policy == "planned" or self.tuning is not None

    @property
    def split_backward(self) -> bool:
        """Whether backwards may be split, a microbatch at a time."""
        return self.costs.split_backward

    def whole_backwards(self) -> Problem:
        """Return the same problem with no choice of splitting, which is faster to plan."""
        return replace(self, costs=self.costs.whole_backwards()) if self.split_backward else self

    def corrected(self, correction: Correction) -> Problem:
        """Return the same problem with costs corrected by what was measured."""
        return replace(self, costs=self.costs.corrected(correction))

    def warm_up(self) -> None:
        """Compile the kernels that planning takes; later runs find them compiled."""
        packing.warm_up()
        search.warm_up()
        if any(module.on_ranks == "replicated" for module in self.layout.modules):
            search.warm_up_assignment()
        if self.pipeline is not None:
            tuning.warm_up()
