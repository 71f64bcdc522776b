"""Plan the order of a step's microbatches, on the rank that has the step's inputs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from pipeloom.cost import Correction, Profile
from pipeloom.errors import InfeasibleError, InputError, PipeloomError, check_count
from pipeloom.integrations.steps.costs import MEASURED_STEPS, Measurements, counting_profile, stage_profile
from pipeloom.integrations.steps.layers import PlannedStages, divide_stages
from pipeloom.integrations.steps.running import ENCODER, MODULE, num_encoder_stages, stage_kind
from pipeloom.integrations.steps.strategies import StepMemory, StepStrategies, take_strategies
from pipeloom.limits import MAX_COUNT, MAX_WAIT_S
from pipeloom.packing import Microbatch, Packing, PackingSpec, SubMicrobatch, packed_batch, packing_of
from pipeloom.plan import Answer, BackendName, Delivery, ExecutionPlan
from pipeloom.planner import Planner
from pipeloom.planner.client import DEADLINE_S, fallback_plan
from pipeloom.planner.forwards import forward_problem
from pipeloom.planner.planning import proved_plan
from pipeloom.planner.problem import PlanningProblem
from pipeloom.runtime.launch.store import TcpPlanStore
from pipeloom.search import Budget, solve
from pipeloom.spec import (
    Batch,
    LayerSpec,
    Layout,
    ModelSpec,
    ModuleSpec,
    RankSpec,
    Sample,
    Strategy,
    TensorShape,
    Workload,
)
from pipeloom.taskgraph import TaskGraph
from pipeloom.taskgraph.iteration import iteration_graph
from pipeloom.timeline import Schedule, simulate
from pipeloom.units import size_text

_LOG = logging.getLogger(__name__)

Size = int | tuple[int, tuple[int, ...]]
"""Size of a microbatch; where there is an encoder, also those of its images."""
Sizes = tuple[Size, ...]
"""Sizes of all microbatches of a step."""
_MOST_MEASURED = 16
"""Most steps that measure strategies, if these do not contain enough microbatches of each."""

_UNIT_BYTES = 1 << 40
"""Bytes of a microbatch on a stage, far more than messages, while only the number of microbatches in flight is limited.
Interleaved 1F1B needs fewer on the first rank than there are stages and two times as many ranks."""
_EVERY_SAMPLE_ALONE = 1 << 30
_ANY_SIZE = MAX_COUNT
MOST_KNOWN = 128
"""Most orders that every rank keeps for sizes that come again."""


Backward = Literal["whole", "split", "either"]


def check_whole(entity: str, value: object) -> None:
    """Raise `InputError` unless a value is a whole number from 1 to `MAX_COUNT`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(entity, f"{str(value)[:60]!r} is not a whole number")
    check_count(entity, value)


def checked_sizes(sizes: Iterable[Any], entity: str = "sizes, microbatch {}") -> tuple[int, ...]:
    """Return the sizes of a step's microbatches as integers. Raise `InputError` unless they are from 1 to `MAX_COUNT`.

    ``entity`` names a size in messages, with a place for its number.
    """
    found = []
    for number, size in enumerate(sizes):
        where, remedy = entity.format(number), "give tokens, or another number that costs grow with"
        try:
            whole = int(size)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(where, f"{str(size)[:60]!r} is not a finite number", remedy) from error
        if not 1 <= whole <= MAX_COUNT:
            raise InputError(where, f"{whole} is {'below 1' if whole < 1 else f'above {MAX_COUNT}'}", remedy)
        found.append(whole)
    return tuple(found)


class UpcomingSizes:
    """Sizes of the microbatches of the training steps, which are known ahead.

    Attributes
    ----------
    following : tuple of int or None
        Sizes of the step after the one that was taken last; None before the first step, at the end, and if they are
        invalid.
    """

    def __init__(self, sizes: Iterable[Sequence[int]]) -> None:
        self._left = iter(sizes)
        self.following: Sizes | None = None
        self._failure: Exception | None = None
        """Why the following sizes cannot be read."""
        self._step = -1
        """Step whose sizes were taken last."""
        self._taken: Sizes | None = None

    def take(self, step: int, count: int) -> Sizes:
        """Return the sizes of a step of ``count`` microbatches; the same ones again after a step that failed."""
        if step != self._step:
            if self._step < 0:
                self._read()
            if self._failure is not None:
                raise self._failure
            self._step, self._taken = step, self.following
            self._read()
        found = self._taken
        if found is None:
            raise InputError("sizes", f"ends after {step} steps", "give sizes for every step")
        if len(found) != count:
            raise InputError("sizes", f"step {step} has {len(found)}, and {count} microbatches", "give one for each")
        return found

    def _read(self) -> None:
        """Read the following sizes. An error is raised in the step that they are for."""
        if self._failure is None:
            try:
                sizes = next(self._left, None)
                self.following = None if sizes is None else checked_sizes(sizes)
            except Exception as error:
                self.following, self._failure = None, error


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Options for planning every step."""

    budget_s: float = 0.5
    """Seconds that the planner, which runs in its own process, searches for a step's plan; 0: a fixed heuristic."""
    deadline_s: float = DEADLINE_S
    """Seconds that a step waits for its plan; after that, it runs by the heuristic's plan."""
    backward: Backward = "whole"
    """Whether backwards are split into input and weight gradients: never, always, or where that is faster. The search
    treats ``"split"`` as ``"either"``; the heuristic splits all backwards for ``"split"``, and for ``"either"`` only
    those of the third step, to measure their costs."""
    order: Callable[[TaskGraph], Schedule] | None = None
    """Returns your own order from a step's task graph, in place of heuristic and search."""
    profile: Profile | None = None
    """Costs of the stages ``"stages/stage0"`` and so on; None: they are measured in the second to fourth step. With
    a profile, the first step measures the sizes of the stages' outputs, and the search begins after it."""
    rank: RankSpec = field(default_factory=RankSpec)
    """Links between ranks."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, seconds in (("budget_s", self.budget_s), ("deadline_s", self.deadline_s)):
            if not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_WAIT_S:
                raise InputError(f"planner.{name}", f"{seconds!r} is not between 0 and {MAX_WAIT_S:g} seconds")
        if self.backward not in get_args(Backward):
            raise InputError("planner.backward", f"{self.backward!r} is not one of {', '.join(get_args(Backward))}")
        if self.order is not None and not callable(self.order):
            raise InputError(
                "planner.order", f"{self.order!r} is not callable", "give a function from a task graph to a schedule"
            )


class Order(msgspec.Struct, frozen=True):
    """A plan, with the sizes of the microbatches that it is made for."""

    plan: ExecutionPlan
    samples: tuple[int, ...]
    """Number of the step's microbatch, by microbatch of the plan."""
    sizes: Sizes
    strategies: StepStrategies = ()

    def strategy(self, number: int, stage: int) -> str:
        """Return the strategy of a stage for a microbatch of the step, as in plans."""
        return self.strategies[number][stage] if self.strategies else "keep"


def single_packing(sizes: Sizes, samples: Sequence[int], layout: Layout) -> Packing:
    """Return a packing in which every microbatch has one sample."""
    if num_encoder_stages(layout):
        model = stages_spec(layout, [1.0] * len(layout.chunks))
        return packing_of(step_batch(sizes), model, layout, tuple((i,) for i in samples))
    parts = {size: ((SubMicrobatch(0, 1, Workload((text_size(size),))),),) for size in set(sizes)}
    microbatches = tuple(Microbatch((i,), parts[sizes[i]]) for i in samples)
    return Packing(step_batch(sizes), (MODULE,), microbatches, ("sequence",))


def step_batch(sizes: Sizes, iteration: int = 0) -> Batch:
    """Return the sample metadata of a step."""
    return Batch(tuple(_sample(str(i), size) for i, size in enumerate(sizes)), iteration)


def _sample(name: str, size: Size) -> Sample:
    if isinstance(size, int):
        return Sample(name, text_tokens=size)
    text, images = size
    return Sample(name, text_tokens=text, image_tokens=images, lengths={MODULE: (text,)})


def text_size(size: Size) -> int:
    """Return the size of a microbatch without its images."""
    return size if isinstance(size, int) else size[0]


def image_sizes(size: Size) -> tuple[int, ...]:
    """Return the sizes of a microbatch's images."""
    return () if isinstance(size, int) else size[1]


def stages_spec(layout: Layout, widths: Sequence[float]) -> ModelSpec:
    """Return a model with stages as layers; ``widths`` are sizes of their outputs, in units of four bytes per size."""
    shapes = planned_shapes(widths)
    modules = []
    for entry in layout.modules:
        layers = tuple(LayerSpec(kind=stage_kind(i), output=shapes[i]) for i in layout.chunks_of(entry.name))
        reads: Literal["images", "sequence"] = "images" if entry.name == ENCODER else "sequence"
        modules.append(ModuleSpec(entry.name, reads, layers, entry.after, entry.frozen))
    return ModelSpec("pipeline", tuple(modules))


def planned_shapes(widths: Sequence[float]) -> tuple[TensorShape, ...]:
    """Return the shapes of the stages' outputs by which plans are made."""
    return tuple(TensorShape(("tokens", max(1, round(width)))) for width in widths)


class _PlanRequests:
    """The planner's process, which works on one request at a time, the last one."""

    def __init__(self, problem: PlanningProblem, deadline_s: float) -> None:
        self._planner = Planner(problem, TcpPlanStore.host, deadline_s=deadline_s)
        self._requested: tuple[Sizes, int] = _NOTHING
        """Sizes of the plan that was requested last and is not collected yet, and its iteration."""
        self._num_requested = 0
        self._steps_left = 0
        """Steps of other sizes until the requested plan is given up."""
        self._noted: set[str] = set()
        """Reasons of plans that did not come from the search, which are already logged."""
        # Starting takes seconds, so steps do not wait for it.
        self._starting = threading.Thread(target=self._planner.start, name="pipeloom-planner-start", daemon=True)
        self._starting.start()

    def submit(self, sizes: Sizes) -> None:
        """Request a plan, without waiting, unless it is requested already, or the planner is starting or disabled.

        A planner that has died or hangs is restarted.
        """
        starting = self._starting.is_alive() and not self._planner.ready
        if not starting and not self._planner.is_disabled and not self.is_requested(sizes):
            self._num_requested += 1
            self._requested, self._steps_left = (sizes, self._num_requested), _MOST_STEPS_BETWEEN
            self._planner.submit(step_batch(sizes, self._num_requested), _NO_CORRECTION)

    def is_requested(self, sizes: Sizes) -> bool:
        """Whether a plan for these sizes is requested and not collected yet."""
        return sizes == self._requested[0]

    def collect(self) -> Delivery:
        """Return the requested plan; wait for it until the deadline. Log why it is the fallback plan, if it is."""
        delivery = self._planner.collect(self._requested[1])
        self._requested = _NOTHING
        if delivery.reason and delivery.reason not in self._noted:
            self._noted.add(delivery.reason)
            _LOG.warning("The step runs in the order of the heuristic: %s", delivery.reason)
        return delivery

    def pass_step(self) -> bool:
        """Note a step of other sizes. Return whether there is no request, or it has had precedence for long enough."""
        self._steps_left -= 1
        return self._requested is _NOTHING or self._steps_left < 0

    def close(self) -> None:
        """Stop the planner's process."""
        self._planner.close()


class StepPlanner:
    """Plans orders, on one rank.

    Parameters
    ----------
    backend : str
        Communication backend of the plans' messages.
    memory : StepMemory or None
        None: memory is not limited, and all microbatches keep what their layers save.
    """

    def __init__(
        self, layout: Layout, planning: Planning, backend: BackendName, memory: StepMemory | None = None
    ) -> None:
        self.layout, self.planning, self.backend, self.memory = layout, planning, backend, memory
        self.measurements = Measurements([], [1.0] * len(layout.chunks))
        self._known: dict[tuple[bool, Sizes], Order] = {}
        self._searched: set[Sizes] = set()
        """Sizes whose known order comes from the search."""
        self._requests: _PlanRequests | None = None
        self.counts: Counter[str] = Counter()
        """Training steps by origin of their order: the search, the heuristic, or the user's own function."""
        self._measured_from: int | None = None
        """First step that is planned with all costs; None: they are not measured yet."""
        if memory is None:
            self._set_up(planning.profile or stage_profile([], layout))
        else:
            memory.check_encoder(num_encoder_stages(layout))
            limit_bytes = _UNIT_BYTES * (len(layout.chunks) + layout.num_ranks)
            self._set_up(counting_profile(layout, _UNIT_BYTES), limit_bytes)

    def _set_up(self, profile: Profile, limit_bytes: int | None = None) -> None:
        self._known.clear()
        self._searched.clear()
        split = self.planning.backward != "whole"
        strategies: tuple[Strategy, ...] = ("keep",)
        stages = PlannedStages(stages_spec(self.layout, self.measurements.widths), self.layout, profile)
        if self.memory is not None and self.is_measured:
            limit_bytes, strategies = self.memory.activation_bytes, self.memory.strategies
            stages = divide_stages(stages, self.memory.num_layers)
        rank = msgspec.structs.replace(self.planning.rank, memory_capacity_bytes=limit_bytes)
        self.problem = PlanningProblem.from_profile(
            *stages,
            PackingSpec(_ANY_SIZE, policy="balanced", num_microbatches=_EVERY_SAMPLE_ALONE),
            rank,
            strategies=strategies,
            budget_s=self.planning.budget_s or 1.0,
            backend=self.backend,
            split_backward=split,
        )
        self.forwards = forward_problem(self.problem)

    def close(self) -> None:
        """Stop the planner's process."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    def begin(self, step: int) -> tuple[float, ...] | None:
        """Begin a training step. If the costs are measured by now, plan with them from here on.

        Return the sizes of the stages' outputs in the first step that is planned with measured costs, and None in
        others. If that step fails, the ranks do not all have them, so they are returned again when it is repeated.
        """
        measured = self.measurements
        measured.step = step
        if not self.is_measured and self._has_enough():
            self._measured_from = step
            self._set_up(self.planning.profile or stage_profile(measured.rows, self.layout))
            if self.planning.order is None and self.planning.budget_s:
                self._requests = _PlanRequests(self.problem, self.planning.deadline_s)
        return tuple(measured.widths) if step == self._measured_from else None

    def _has_enough(self) -> bool:
        """Return whether the measurements until the step that begins suffice."""
        step = self.measurements.step
        if self.planning.profile is not None:
            return step > 0
        if step < MEASURED_STEPS.stop:
            return False
        return self.memory is None or step >= _MOST_MEASURED or self.measurements.cover(self.memory.strategies)

    @property
    def is_measured(self) -> bool:
        """Whether the costs of the stages and the sizes of their outputs are known."""
        return self._measured_from is not None

    @property
    def measures(self) -> bool:
        """Whether the stages are measured in the step that has begun."""
        always = self.memory is not None or self.planning.profile is not None
        return not self.is_measured and (always or self.measurements.step in MEASURED_STEPS)

    def ask(self, sizes: Sizes) -> None:
        """Request a plan for later sizes, without waiting. The planner works on the last request."""
        if self._requests is not None and sizes not in self._searched:
            self._requests.submit(sizes)

    def order(self, sizes: Sizes, trains: bool) -> Order:
        """Return the order of a step."""
        known = self._known.get((trains, sizes))
        if trains and self.memory is not None and not self.is_measured:
            return self._to_measure(sizes, self.memory)
        if not trains:
            return known or self._keep(trains, sizes, self._first(self.forwards, sizes))
        if self.planning.order is not None:
            self.counts["own"] += 1
            return known or self._keep(trains, sizes, self._own(sizes))
        if self.planning.backward == "either" and self._splits:
            self.counts["heuristic"] += 1
            return self._first(self.problem, sizes)
        order = self._searched_or_first(sizes, known)
        self.counts["search" if sizes in self._searched else "heuristic"] += 1
        return order

    @property
    def _splits(self) -> bool:
        """Whether the heuristic splits all backwards in the step that has begun."""
        backward = self.planning.backward
        # Both kinds must be measured before the search can choose.
        return backward == "split" or (self.measures and self.measurements.step == MEASURED_STEPS[1])

    def _searched_or_first(self, sizes: Sizes, known: Order | None) -> Order:
        """Return the order of a training step: from the search if it has one by the deadline."""
        if self._requests is not None and self._requests.is_requested(sizes):
            delivery = self._requests.collect()
            if delivery.fresh:
                self._keep(True, sizes, self._order_of(delivery.answer, sizes))
                self._searched.add(sizes)
                return self._known[True, sizes]
        if known is None:
            return self._keep(True, sizes, self._first(self.problem, sizes))
        # Sizes that have come again may do so once more. An earlier request has precedence for some steps.
        if self._requests is not None and self._requests.pass_step():
            self.ask(sizes)
        return known

    def _keep(self, trains: bool, sizes: Sizes, order: Order) -> Order:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._searched.clear()
        self._known[trains, sizes] = order
        return order

    def _own(self, sizes: Sizes) -> Order:
        """Return the user's order."""
        assert self.planning.order is not None
        packing = single_packing(sizes, range(len(sizes)), self.layout)
        plan = self._proved(packing, self.planning.order, or_whole=self.planning.backward == "either")
        return self._made(plan, range(len(sizes)), sizes)

    def _proved(self, packing: Packing, order: Callable[[TaskGraph], Schedule], *, or_whole: bool) -> ExecutionPlan:
        """Return the plan of an order of a packing's tasks."""
        problem = self.problem
        graph = iteration_graph(problem.layout, packing, problem.costs, "step", problem.memory, or_whole=or_whole).graph
        schedule = order(graph)
        return proved_plan(problem, packing, graph, schedule, simulate(graph, schedule))[1]

    def _to_measure(self, sizes: Sizes, memory: StepMemory) -> Order:
        """Return an order of the heuristic under strategies that are to be measured."""
        self.counts["heuristic"] += 1
        order = self._first(self.problem, sizes)
        chosen = memory.to_measure(len(sizes), len(self.layout.chunks), self.measurements.step)
        return msgspec.structs.replace(order, strategies=chosen)

    def _first(self, problem: PlanningProblem, sizes: Sizes) -> Order:
        """Return the order of the fixed heuristic."""
        try:
            if problem.split_backward and self._splits:
                packing = packed_batch(step_batch(sizes), problem.model, problem.layout, problem.costs, problem.packing)
                plan = self._proved(packing, _heuristic, or_whole=False)
            else:
                planned = fallback_plan(problem, step_batch(sizes))
                packing, plan = planned.packing, planned.plan
        except InfeasibleError as error:
            if self.memory is None:
                raise
            limit = size_text(self.memory.activation_bytes)
            raise InfeasibleError(f"activation_bytes: {limit} is not enough for this step: {error}") from error
        return self._made(plan, [m.samples[0] for m in packing.microbatches], sizes)

    def _order_of(self, answer: Answer, sizes: Sizes) -> Order:
        samples = answer.packing.samples
        if any(len(members) != 1 for members in samples):
            raise PipeloomError("a plan put two microbatches together; plan with one sample in each")
        return self._made(answer.plan, [members[0] for members in samples], sizes)

    def _made(self, plan: ExecutionPlan, samples: Sequence[int], sizes: Sizes) -> Order:
        strategies: StepStrategies = ()
        if self.memory is not None:
            plan, strategies = take_strategies(plan, self.layout, samples)
        return Order(plan, tuple(samples), sizes, strategies)


def _heuristic(graph: TaskGraph) -> Schedule:
    """Return the order of the fixed heuristic, as for fallback plans."""
    return solve(graph, budget=Budget(evaluations=1), seed=0, method="portfolio").schedule


_NO_CORRECTION = Correction()
_NOTHING: tuple[Sizes, int] = ((), 0)
_MOST_STEPS_BETWEEN = 16
"""Steps of other sizes after which a requested plan is given up."""
