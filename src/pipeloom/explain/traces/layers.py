"""Layers of a stage, if the profiler recorded calls of modules."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pipeloom.explain.traces.traced import TracedRun
from pipeloom.io.kineto import RankTrace, TraceEvent
from pipeloom.taskgraph import FORWARD

_NODE = "autograd::engine::evaluate_function"


def layer_shares(traces: Sequence[RankTrace], run: TracedRun) -> dict[int, tuple[tuple[str, float, float], ...]]:
    """Find the layers of every stage, with their shares of its time.

    A stage is one module. Its layers are the modules that it calls or, if it calls only one, those that this one calls.
    The backward of a layer consists of the autograd nodes of its operators.

    ``traces`` are in the order of pipeline ranks. Return name, share of the forward and share of the backward of each
    layer, by stage. Stages without recorded calls, or with calls that differ between microbatches, are left out.
    """
    found: dict[int, tuple[tuple[str, float, float], ...]] = {}
    for position, trace in enumerate(traces):
        if not trace.modules:
            continue
        nodes = [event for event in trace.events if event.name.startswith(_NODE)]
        forwards: dict[int, list[tuple[int, int]]] = {}
        shift = run.clock_shift_ns[position]
        for iteration in run.iterations:
            for one in iteration.ranks[position]:
                if one.unit.kind == FORWARD:
                    forwards.setdefault(one.unit.stage, []).append((one.entered_ns - shift, one.end_ns - shift))
        for stage, of_stage in forwards.items():
            calls = [_layers(trace.modules, *times) for times in of_stage]
            if not calls[0] or any(len(row) != len(calls[0]) for row in calls):
                continue
            seconds = [_seconds(trace, nodes, column) for column in zip(*calls, strict=True)]
            forward, backward = (sum(row[i] for row in seconds) or 1.0 for i in (0, 1))
            linked = any(row[1] for row in seconds)
            found[stage] = tuple(
                (f"stage.{stage}.{i}.{call.name}", f / forward, b / backward if linked else f / forward)
                for i, (call, (f, b)) in enumerate(zip(calls[0], seconds, strict=True))
            )
    return found


def _layers(modules: Sequence[TraceEvent], entered_ns: int, end_ns: int) -> list[TraceEvent]:
    """Return the outermost modules of a computation, at least two if there are any.

    If a schedule names no computations, a computation begins with its first operator, inside its first modules, and
    ends with its last operator. So its modules are those that share half of their time with it.
    """
    inside = [event for event in modules if event.end_ns > entered_ns and event.start_ns < end_ns]
    inside = [event for event in inside if _share_half(event, entered_ns, end_ns)]
    while True:
        outer = _outermost(inside)
        if len(outer) != 1:
            return outer
        inside = [event for event in inside if event is not outer[0]]


def _share_half(event: TraceEvent, begin_ns: int, end_ns: int) -> bool:
    shared = min(event.end_ns, end_ns) - max(event.start_ns, begin_ns)
    return 2 * shared >= min(event.end_ns - event.start_ns, end_ns - begin_ns)


def _outermost(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    outer: list[TraceEvent] = []
    for event in events:
        if not outer or event.start_ns >= outer[-1].end_ns:
            outer.append(event)
    return outer


def _seconds(trace: RankTrace, nodes: Sequence[TraceEvent], calls: Sequence[TraceEvent]) -> tuple[float, float]:
    """Return the time of calls, and of the nodes of their backwards."""
    forward = sum(call.end_ns - call.start_ns for call in calls)
    begins = [link.forward_ns for link in trace.links]
    node_starts = [node.start_ns for node in nodes]
    backward = 0
    for call in calls:
        mine = trace.links[bisect_left(begins, call.start_ns) : bisect_left(begins, call.end_ns)]
        numbers = {bisect_right(node_starts, link.backward_ns) - 1 for link in mine}
        backward += sum(nodes[i].end_ns - nodes[i].start_ns for i in numbers if i >= 0)
    return forward, backward
