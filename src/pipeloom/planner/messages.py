"""Messages between trainer and planner: validated MessagePack, never pickled."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pipeloom.conversion import convert
from pipeloom.cost import Correction
from pipeloom.errors import PlannerError
from pipeloom.plan import Answer, packing_counts
from pipeloom.planner.planning import PlannedBatch
from pipeloom.spec import Batch
from pipeloom.taskgraph import FORWARD


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of a coming batch, and the correction of predicted times by measured ones."""

    batch: Batch
    correction: Correction = Correction()
    ahead: Batch | None = None
    """The global batch after this one. It is assigned to replicas before this one is planned."""
    replicas: tuple[Correction, ...] = ()
    """Correction of each replica for the assignment of ``ahead``, without links."""


def answer_of(
    planned: PlannedBatch, *, search_s: float, ready_ns: int, replica_of_sample: tuple[int, ...] = ()
) -> Answer:
    """Reduce a planned batch to the answer that is sent."""
    graph, timeline = planned.resolved.graph, planned.resolved.timeline(planned.timeline)
    duration = timeline.end_ns - timeline.start_ns
    order = [int(task) for tasks in planned.resolved.schedule(planned.schedule).order for task in tasks]
    return Answer(
        plan=planned.plan,
        packing=packing_counts(planned.packing),
        planned_ns=timeline.makespan_ns,
        lower_bound_ns=planned.lower_bound.ns,
        lower_bound=planned.lower_bound.name,
        bubble_share=1.0 - int(duration.sum()) / max(timeline.makespan_ns * graph.num_ranks, 1),
        planned_module_ns={
            name: (
                int(duration[(graph.module == m) & (graph.kind == FORWARD)].sum()),
                int(duration[(graph.module == m) & (graph.kind != FORWARD)].sum()),
            )
            for m, name in enumerate(graph.module_names)
        },
        planned_start_ns=tuple((int(timeline.start_ns[task]), int(timeline.end_ns[task])) for task in order),
        search_s=search_s,
        evaluations=planned.evaluations,
        method=planned.schedule.method,
        ready_ns=ready_ns,
        peak_bytes=planned.peak_bytes,
        replica_of_sample=replica_of_sample,
    )


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message for the store."""
    return msgspec.msgpack.encode(message)


def decode(kind: type[Message], data: bytes) -> Message:
    """Decode and validate a message.

    Raises
    ------
    PlannerError
        If the bytes are not a valid message of that kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        explained: Exception = error
        try:
            # The same error with path, value and bound.
            convert(msgspec.msgpack.decode(data), kind, kind.__name__)
        except (msgspec.MsgspecError, ValueError, RecursionError) as found:
            explained = found
        reason = " ".join(str(explained).split())
        raise PlannerError(f"{kind.__name__} message of {len(data)} bytes is not valid: {reason}") from error
