"""`PlanningProblem`: everything that planning needs and that is the same for all batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

from pipeloom import packing, search, tuning
from pipeloom.cost import Correction, PlannedCosts, Profile, ProfileCosts
from pipeloom.errors import InputError, check_not_negative, check_positive, check_seed
from pipeloom.packing import PackingSpec
from pipeloom.plan import BackendName
from pipeloom.search import SearchParams
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Layout, ModelSpec, RankSpec
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TunedPipeline, TuningSpec, is_chain, tuned_pipeline

_ANY_RANK = RankSpec()
_NO_LIMIT = MemoryLimit()
_COST_SETTINGS = ("strategies", "split_backward", "held_copies")


@dataclass(frozen=True)
class PlanningProblem:
    """A model on a layout with its costs and memory, and the settings of planning. It is the same for all batches.

    `from_profile` makes one from a measured profile. Only such a problem can be sent to the planner's process, or
    written to a file with `write_problem`.
    """

    model: ModelSpec
    layout: Layout
    costs: PlannedCosts
    packing: PackingSpec
    _: KW_ONLY
    memory: MemoryLimit = _NO_LIMIT
    """The memory of every rank, and the part of it that is reserved."""
    tuning: TuningSpec | None = None
    """PipeTune's techniques, chosen one by one; see `pipeloom.tuning`."""
    backend: BackendName = "gloo"
    """Message backend for which plans are made and verified."""
    search: SearchParams = DEFAULTS
    """Parameters of the search for orders."""
    threads: int = 1
    """Search threads; 0: half of the cores."""
    budget_s: float = 1.0
    """Seconds for each plan, if the caller gives no other budget."""
    seed: int = 0
    """Seed of all random choices."""
    method: str = "default"
    """Name of a search method."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a seed, a budget or threads out of range, and contradictory tuning choices."""
        check_seed("seed", self.seed)
        check_positive("planner.budget_s", self.budget_s)
        check_not_negative("planner.threads", self.threads)
        if self.tuning is not None:
            self.tuning.check_choices(self.costs.strategies, self.split_backward)

    @classmethod
    def from_profile(
        cls,
        model: ModelSpec,
        layout: Layout,
        profile: Profile,
        packing: PackingSpec,
        cluster: RankSpec = _ANY_RANK,
        **settings: Any,
    ) -> PlanningProblem:
        """Make a problem from measured layer costs.

        Parameters
        ----------
        cluster : RankSpec
            Links and memory of the ranks.
        **settings
            Further fields of the problem, and ``strategies``, ``split_backward`` and ``held_copies`` of `ProfileCosts`.
        """
        choices = {name: settings.pop(name) for name in _COST_SETTINGS if name in settings}
        costs = ProfileCosts(model, profile, cluster, **choices)
        return cls(model, layout, costs, packing, memory=MemoryLimit.of(cluster), **settings)

    @property
    def profile_costs(self) -> ProfileCosts:
        """The costs, which must come from a measured profile.

        Raises
        ------
        InputError
            If the costs are of another kind.
        """
        if not isinstance(self.costs, ProfileCosts):
            problem = f"are {type(self.costs).__name__}, which cannot be written to a file or sent to another process"
            raise InputError("costs", problem, "use ProfileCosts")
        return self.costs

    @cached_property
    def pipeline(self) -> TunedPipeline | None:
        """Tables of the uncorrected costs for PipeTune's recurrence; None if the recurrence does not apply.

        It applies if the search chooses microbatches, and the layout has one backbone chunk on each rank and all
        encoders before it.
        """
        by_name = self.tuning is not None and not self.tuning.searches
        if not by_name and not (self.plans_packing and is_chain(self.layout)):
            return None
        tokens = self.packing.token_budget
        return tuned_pipeline(
            self.model,
            self.layout,
            self.costs.uncorrected(),
            max_tokens=tokens,
            max_length=tokens,
            capacity_bytes=self.memory.capacity_bytes,
            num_messages=self.memory.num_messages,
        )

    @property
    def plans_packing(self) -> bool:
        """Whether the search chooses microbatches."""
        return self.packing.policy == "planned" or self.tuning is not None

    @property
    def split_backward(self) -> bool:
        """Whether a microbatch's backwards may be split."""
        return self.costs.split_backward

    def with_reserve(self, more: Sequence[int]) -> PlanningProblem:
        """Return the same problem with a larger reserve on every rank."""
        return self._with_same_pipeline(memory=self.memory.with_reserve(more))

    def with_search(
        self, search: SearchParams | None = None, *, seed: int | None = None, method: str | None = None
    ) -> PlanningProblem:
        """Return the same problem with other parameters, seed or method of the search. None: as before."""
        changes = {"search": search, "seed": seed, "method": method}
        return self._with_same_pipeline(**{name: value for name, value in changes.items() if value is not None})

    def whole_backwards(self) -> PlanningProblem:
        """Return the same problem without split backwards, which is faster to plan."""
        return self._with_same_pipeline(costs=self.costs.whole_backwards()) if self.split_backward else self

    def corrected(self, correction: Correction) -> PlanningProblem:
        """Return the same problem with costs corrected by measurements."""
        return self._with_same_pipeline(costs=self.costs.corrected(correction))

    def _with_same_pipeline(self, **changes: Any) -> PlanningProblem:
        """Return a copy with changes on which `pipeline` does not depend. Its tables take long to compute."""
        changed = replace(self, **changes)
        changed.__dict__["pipeline"] = self.pipeline
        return changed

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

    def problem(self) -> PlanningProblem:
        """Return this problem, as `Setup` did. Deprecated; removed in the next release."""
        return self


Problem = PlanningProblem
"""Deprecated name; removed in the next release."""
Setup = PlanningProblem.from_profile
"""Deprecated name; removed in the next release."""
