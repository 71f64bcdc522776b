"""What trainer and planner say to each other: validated MessagePack, never pickled."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pipeloom.cost import Profile, ProfileCosts, Strategy
from pipeloom.errors import PlannerError
from pipeloom.packing import Packing, PackingSpec
from pipeloom.plan import ExecutionPlan
from pipeloom.planner.plan_batch import PlannedBatch, Problem
from pipeloom.spec import Batch, ClusterSpec, Layout, ModelSpec


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sent once: the problem, and how long to search."""

    model: ModelSpec
    layout: Layout
    profile: Profile
    cluster: ClusterSpec
    packing: PackingSpec
    budget_s: float
    seed: int
    method: str = "default"
    strategies: tuple[Strategy, ...] = ("keep",)

    def problem(self) -> Problem:
        """The problem in the form that planning takes."""
        costs = ProfileCosts(self.model, self.profile, self.cluster, self.strategies)
        return Problem(self.model, self.layout, costs, self.packing, self.cluster.memory_capacity_bytes)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of a coming batch, and how measured times compare with predicted ones so far."""

    batch: Batch
    factors: dict[str, tuple[float, float]] = {}


class PackingCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packing as numbers: sample positions per microbatch, and sub-microbatch sizes per module."""

    samples: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[tuple[int, ...], ...], ...]


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan with its packing and its prediction."""

    plan: ExecutionPlan
    packing: PackingCounts
    planned_ns: int
    lower_bound_ns: int
    lower_bound: str
    bubble_share: float
    """Idle share of all ranks' time between start and planned end."""
    planned_module_ns: dict[str, tuple[int, int]]
    """Per module, planned nanoseconds of all forward and all backward tasks: what calibration compares."""
    search_s: float
    evaluations: int
    method: str
    ready_ns: int
    """Clock reading (``time.monotonic_ns`` of the planner's host) when the plan was ready."""

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return self.planned_ns / max(self.lower_bound_ns, 1) - 1.0


def answer_of(planned: PlannedBatch, *, search_s: float, ready_ns: int) -> Answer:
    """Reduce a planned batch to what travels."""
    graph, packing = planned.graph, planned.packing
    makespan = planned.timeline.makespan_ns
    busy = int((planned.timeline.end_ns - planned.timeline.start_ns).sum())
    duration = planned.timeline.end_ns - planned.timeline.start_ns
    return Answer(
        plan=planned.plan,
        packing=packing_counts(packing),
        planned_ns=makespan,
        lower_bound_ns=planned.lower_bound.ns,
        lower_bound=planned.lower_bound.name,
        bubble_share=1.0 - busy / max(makespan * graph.num_ranks, 1),
        planned_module_ns={
            name: (
                int(duration[(graph.module == m) & (graph.kind == 0)].sum()),
                int(duration[(graph.module == m) & (graph.kind != 0)].sum()),
            )
            for m, name in enumerate(graph.module_names)
        },
        search_s=search_s,
        evaluations=planned.evaluations,
        method=planned.schedule.method,
        ready_ns=ready_ns,
    )


def packing_counts(packing: Packing) -> PackingCounts:
    """Reduce a packing to numbers."""
    return PackingCounts(
        samples=tuple(microbatch.samples for microbatch in packing.microbatches),
        counts=tuple(
            tuple(tuple(part.count for part in parts) for parts in microbatch.parts)
            for microbatch in packing.microbatches
        ),
    )


Message = TypeVar("Message", Setup, Request, Answer)


def encode(message: Setup | Request | Answer) -> bytes:
    """Encode a message for the store."""
    return msgspec.msgpack.encode(message)


def decode(kind: type[Message], data: bytes) -> Message:
    """Decode and validate a message.

    Raises
    ------
    PlannerError
        When the bytes are not a valid message of that kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PlannerError(f"{kind.__name__} message of {len(data)} bytes is not valid: {error}") from error
