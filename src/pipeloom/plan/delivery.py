"""Delivery of a plan to the ranks: the plan, its packing and its prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from pipeloom.bounds import Nanoseconds, Number, NumBytes, Seconds, Value
from pipeloom.packing import Packing
from pipeloom.plan.action import ExecutionPlan
from pipeloom.plan.dryrun import BACKENDS, BackendName
from pipeloom.plan.rank_plan import RankPlan, rank_plans
from pipeloom.spec import Layout
from pipeloom.timeline import gap


class PackingCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packing as numbers: sample positions per microbatch, and sub-microbatch sizes per module."""

    samples: tuple[tuple[Number, ...], ...]
    counts: tuple[tuple[tuple[Number, ...], ...], ...]


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan with its packing and its prediction, as sent by the planner."""

    plan: ExecutionPlan
    packing: PackingCounts
    planned_ns: Nanoseconds
    lower_bound_ns: Nanoseconds
    lower_bound: str
    """Name of the binding bound."""
    bubble_share: Value
    """Idle share of all ranks' planned time."""
    planned_module_ns: dict[str, tuple[Nanoseconds, Nanoseconds]]
    """Planned time of all forward and of all backward tasks of each module. Calibration compares it with measured time.
    """
    planned_start_ns: tuple[tuple[Nanoseconds, Nanoseconds], ...]
    """Planned start and end of every compute action: rank after rank, in each rank's order."""
    search_s: Seconds
    evaluations: NumBytes
    method: str
    ready_ns: Nanoseconds
    """Monotonic clock of the planner's host when the plan was ready."""
    peak_bytes: tuple[NumBytes, ...] = ()
    """Peak memory of each rank, workspace and messages included; empty without a memory limit."""
    replica_of_sample: tuple[Number, ...] = ()
    """Replica of every sample of the next global batch; empty if no assignment was requested, or if it failed."""

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return gap(self.planned_ns, self.lower_bound_ns)


class RankAnswer(msgspec.Struct, frozen=True):
    """The part of an answer that one rank needs, as sent to it."""

    plan: RankPlan
    packing: PackingCounts


@dataclass(frozen=True, slots=True)
class Delivery:
    """A plan that is ready to run, and its origin; see `delivery_of`."""

    answer: Answer
    packing: Packing
    first: RankPlan
    """Plan of the first rank."""
    by_rank: tuple[bytes, ...]
    """Encoded `RankAnswer` of every rank."""
    fresh: bool
    """Whether the planner made the plan for this batch; otherwise it is the fallback plan."""
    lead_s: float
    """Time between the plan's completion and its use; negative if training waited."""
    reason: str = ""
    """Reason for the fallback; empty for a fresh plan."""

    def needed_at(self, moment_ns: int) -> Delivery:
        """Return the delivery with its lead if training needed the plan at ``moment_ns`` (monotonic clock)."""
        return replace(self, lead_s=(moment_ns - self.answer.ready_ns) / 1e9)


def delivery_of(
    answer: Answer,
    packing: Packing,
    layout: Layout,
    *,
    backend: BackendName = "gloo",
    fresh: bool = True,
    lead_s: float = 0.0,
    reason: str = "",
) -> Delivery:
    """Prepare a plan for broadcast: encode the part of each rank, so that each rank decodes only its own actions.

    Parameters
    ----------
    answer : Answer
        A verified answer.
    packing : Packing
        The answer's packing of the current batch.
    backend : str
        Backend of the messages between ranks.
    fresh, lead_s, reason
        See `Delivery`.
    """
    encode = msgspec.msgpack.Encoder().encode
    plans = rank_plans(answer.plan, layout, batches_p2p=BACKENDS[backend].batches_p2p)
    by_rank = tuple(encode(RankAnswer(plan, answer.packing)) for plan in plans)
    return Delivery(answer, packing, plans[0], by_rank, fresh, lead_s, reason)


def packing_counts(packing: Packing) -> PackingCounts:
    """Reduce a packing to numbers."""
    return PackingCounts(
        samples=tuple(microbatch.samples for microbatch in packing.microbatches),
        counts=tuple(
            tuple(tuple(part.count for part in parts) for parts in microbatch.parts)
            for microbatch in packing.microbatches
        ),
    )
