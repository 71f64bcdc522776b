"""Computations without named ranges (`Schedule1F1B`), found from autograd's backwards and their forwards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from pipeloom.errors import InputError
from pipeloom.explain.traces.names import ComputationName, NamedRange, step_of
from pipeloom.io.kineto import RankTrace, TraceEvent
from pipeloom.taskgraph import BACKWARD, FORWARD

_ENGINE = "autograd::engine::evaluate_function"


def find_unnamed(trace: RankTrace, is_message: Callable[[TraceEvent], bool]) -> list[NamedRange]:
    """Find forwards and backwards, in the host's order, by the profiler's links between them.

    Events for which ``is_message`` is true post messages, which separate two backwards without a forward between them.
    Microbatches are numbered -1, -2, ... over the whole trace by their forwards, and are renumbered in every iteration
    later. Return an empty list without messages or backwards. Raise `InputError` if iterations are not marked, or
    computations overlap.
    """
    messages = [event.start_ns for event in trace.events if is_message(event)]
    if not messages or not trace.links:
        return []
    if not any(step_of(event.name) is not None for event in trace.events):
        raise InputError(
            trace.source,
            "has neither named computations nor named iterations",
            "call profiler.step() after every iteration, or record a schedule that names its ranges",
        )
    runs = _backward_runs(trace, messages)
    work = [event for event in trace.events if not event.is_range and not is_message(event)]
    starts = [event.start_ns for event in work]
    by_backward = sorted(trace.links, key=lambda link: link.backward_ns)
    backward_ns = [link.backward_ns for link in by_backward]
    pairs = []
    for begin, end in runs:
        of_run = by_backward[bisect_left(backward_ns, begin) : bisect_right(backward_ns, end)]
        forwards = [link.forward_ns for link in of_run if link.forward_ns < begin]
        if forwards:
            first, last = min(forwards), max(forwards)
            inside = [
                e.end_ns for e in work[bisect_left(starts, first) : bisect_right(starts, last)] if e.start_ns <= last
            ]
            pairs.append(((first, max(inside, default=last)), (begin, end)))
    pairs.sort()
    found = []
    for number, (forward, backward) in enumerate(pairs, start=1):
        found.append(NamedRange(ComputationName(FORWARD, None, -number), *forward, *forward))
        found.append(NamedRange(ComputationName(BACKWARD, None, -number), *backward, *backward))
    found.sort(key=lambda one: one.start_ns)
    for one, after in pairwise(found):
        if one.end_ns > after.start_ns:
            raise InputError(trace.source, "has overlapping computations", "name ranges PP:<stage>F<microbatch>")
    return found


def _backward_runs(trace: RankTrace, messages: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end of every run of autograd nodes without a message or a forward's operator between them."""
    nodes = [event for event in trace.events if event.name.startswith(_ENGINE)]
    cuts = sorted([*messages, *(link.forward_ns for link in trace.links)])
    runs: list[tuple[int, int]] = []
    for node in nodes:
        if runs and bisect_left(cuts, node.start_ns) == bisect_left(cuts, runs[-1][1]):
            runs[-1] = (runs[-1][0], max(runs[-1][1], node.end_ns))
        elif not runs or node.start_ns >= runs[-1][1]:
            runs.append((node.start_ns, node.end_ns))
    return runs
