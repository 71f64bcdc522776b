"""Problem: the settings of planning that are the same for all batches."""

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

_DEFAULT_MEMORY = MemoryLimit()


@dataclass(frozen=True)
class Problem:
    """The settings of planning that are the same for all batches."""

    model: ModelSpec
    layout: Layout
    costs: PlannedCosts
    packing: PackingSpec
    capacity_bytes: int | None = None
    tuning: TuningSpec | None = None
    """PipeTune's techniques, chosen one by one; see `pipeloom.tuning`."""
    pipeline: TunedPipeline | None = None
    """Tables of the uncorrected costs for PipeTune's recurrence. Built by default if the layout has one backbone chunk
    on each rank and all encoders before it."""
    backend: BackendName = "gloo"
    """Message backend of the plans."""
    search: SearchParams = DEFAULTS
    """Parameters of the search for orders."""
    threads: int = 1
    """Search threads; 0: half of the cores."""
    reserve_bytes: tuple[int, ...] = ()
    """Bytes of each rank that plans of this batch need in addition to the reserve of the rule."""
    memory_model: MemoryLimit = _DEFAULT_MEMORY
    """Memory model: the reserve for messages and the usable host memory."""

    def __post_init__(self) -> None:
        """Tabulate the costs for the recurrence once; calibration scales the tables."""
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
        """The memory limit and reserve of every rank."""
        return replace(self.memory_model, capacity_bytes=self.capacity_bytes, reserve_bytes=self.reserve_bytes)

    def with_reserve(self, more: Sequence[int]) -> Problem:
        """Return the same problem with a larger reserve on every rank."""
        return replace(self, reserve_bytes=self.memory.with_reserve(more).reserve_bytes)

    @property
    def plans_packing(self) -> bool:
        """Whether the search chooses microbatches."""
        return self.packing.policy == "planned" or self.tuning is not None

    @property
    def split_backward(self) -> bool:
        """Whether a microbatch's backwards may be split."""
        return self.costs.split_backward

    def whole_backwards(self) -> Problem:
        """Return the same problem without split backwards, which is faster to plan."""
        return replace(self, costs=self.costs.whole_backwards()) if self.split_backward else self

    def corrected(self, correction: Correction) -> Problem:
        """Return the same problem with costs corrected by measurements."""
        return replace(self, costs=self.costs.corrected(correction))

    def compile_kernels(self) -> None:
        """Compile the kernels for planning. Later runs load the compiled kernels."""
        packing.compile_kernels()
        search.compile_kernels()
        if any(module.on_ranks == "replicated" for module in self.layout.modules):
            search.compile_assignment_kernels()
        if self.pipeline is not None:
            tuning.compile_kernels()

    def warm_up(self) -> None:
        """Call `compile_kernels`. Deprecated; removed in the next release."""
        self.compile_kernels()
