"""What a rank needs to run an iteration: a plan, the packing it was made for, and what it promises."""

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
    """A plan with its packing and its prediction, as it travels."""

    plan: ExecutionPlan
    packing: PackingCounts
    planned_ns: Nanoseconds
    lower_bound_ns: Nanoseconds
    lower_bound: str
    """Name of the bound that binds."""
    bubble_share: Value
    """Idle share of all ranks' time between start and planned end."""
    planned_module_ns: dict[str, tuple[Nanoseconds, Nanoseconds]]
    """Per module, planned nanoseconds of all forward and of all backward tasks: what calibration compares."""
    planned_start_ns: tuple[tuple[Nanoseconds, Nanoseconds], ...]
    """Planned start and end of every compute action: rank after rank, in each rank's order."""
    search_s: Seconds
    evaluations: NumBytes
    method: str
    ready_ns: Nanoseconds
    """Monotonic clock of the planner's host when the plan was ready."""
    peak_bytes: tuple[NumBytes, ...] = ()
    """Most that each rank needs, workspace and messages included; empty where memory is not limited."""
    dealt: tuple[Number, ...] = ()
    """The replica of every sample of the global batch after this one; empty where that was not asked for, or failed."""

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return gap(self.planned_ns, self.lower_bound_ns)


class RankAnswer(msgspec.Struct, frozen=True):
    """What a rank is given to run an iteration, as it travels."""

    plan: RankPlan
    packing: PackingCounts


@dataclass(frozen=True, slots=True)
class Delivery:
    """A plan that may be run, and where it came from; see `delivery_of`."""

    answer: Answer
    packing: Packing
    first: RankPlan
    """What the first rank runs."""
    by_rank: tuple[bytes, ...]
    """What travels to every rank: its own `RankAnswer`, encoded."""
    fresh: bool
    """Made by the planner for this batch; else the fallback."""
    lead_s: float
    """How long before its use the plan was ready; negative for time waited."""
    reason: str = ""
    """Why the fallback was taken; empty for a fresh plan."""

    def needed_at(self, moment_ns: int) -> Delivery:
        """The same, with its lead counted to the moment at which the plan was needed (monotonic clock)."""
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
    """Make a plan ready to be handed out: every rank's part of it is encoded, so that none decodes another's.

    Parameters
    ----------
    answer : Answer
        Verified.
    packing : Packing
        The answer's, of the batch at hand.
    layout : Layout
        The plan's.
    backend : str
        Over which the ranks' messages go.
    fresh, lead_s, reason
        As in `Delivery`.
    """
    encode = msgspec.msgpack.Encoder().encode
    plans = rank_plans(answer.plan, layout, joins=BACKENDS[backend].joins)
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
