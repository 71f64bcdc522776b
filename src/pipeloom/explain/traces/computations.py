"""Computations of one rank's trace, and the waits between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.explain.traces.names import ComputationName, NamedRange, computation_of, message_of, step_of
from pipeloom.explain.traces.traced import Computation, PostedReceive, Unit
from pipeloom.explain.traces.unnamed import find_unnamed
from pipeloom.io.kineto import Kernel, RankTrace, TraceEvent
from pipeloom.taskgraph import FORWARD, KIND_NAMES, WEIGHT_GRADIENT

_SEND, _RECEIVE = "c10d::send", "c10d::recv_"
_ENDS = {"gloo:send": _SEND, "gloo:recv": _RECEIVE}
_VIEWS = frozenset({"detach", "aten::detach", "detach_", "aten::detach_"})
"""Operators for messages, which are not computation."""
_SIZES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2}
"""Bytes of elements sent by gloo, by the profiler's names of types."""
_CUT_NS, _CUT_SHARE = 100_000, 0.1
"""Tolerated overlap with the next range, absolute or as a share of its length, for ranges that end late."""
_WAIT_NS = 50_000
"""Shorter waits are calls whose message had already arrived."""


class _Transfer(NamedTuple):
    """One end of a message, posted and waited for until ``done_ns``."""

    is_send: bool
    posted_ns: int
    call_end_ns: int
    done_ns: int | None
    label: tuple[bool, int, int] | None
    """Whether it is of a forward, stage and microbatch, if the trace names them."""
    shape: tuple[int, ...]
    num_bytes: int


class RankRun(NamedTuple):
    """Computations, posted receives and allocations of a rank, by iteration."""

    iterations: dict[int, tuple[Computation, ...]]
    posted: dict[int, dict[Unit, PostedReceive]]
    allocated: dict[int, dict[Unit, int]]


def rank_run(trace: RankTrace, stage: int) -> RankRun:
    """Find the computations of a rank; ``stage`` is its stage if ranges do not name one.

    Raise `InputError` if the file has no computations of a pipeline, or no complete iteration.
    """
    by_step = _by_step(trace, _computations(trace))
    transfers = _transfers(trace)
    ranges = [event.start_ns for event in trace.events if event.is_range and not event.name.startswith("gloo:")]
    iterations, posted, allocated = {}, {}, {}
    before_ns = 0
    for number, found in by_step.items():
        last_ns = max(one.left_ns for one in found)
        if len({one.named for one in found}) == len(found) and _is_whole(found):
            mine = [one for one in transfers if before_ns <= one.posted_ns <= last_ns]
            iterations[number], posted[number] = _waits(found, stage, mine, ranges, bool(trace.kernels))
            allocated[number] = _allocated(trace, found, iterations[number])
        before_ns = last_ns
    if not iterations:
        raise InputError(trace.source, "has no complete iteration of a pipeline", "record at least one complete step")
    return RankRun(iterations, posted, allocated)


def _allocated(trace: RankTrace, found: Sequence[NamedRange], computations: Sequence[Computation]) -> dict[Unit, int]:
    """Return the bytes that each computation leaves allocated, between the host's entry and exit of its range."""
    if not trace.allocations:
        return {}
    moments = [one.at_ns for one in trace.allocations]
    sums = [0, *accumulate(one.num_bytes for one in trace.allocations)]
    taken = {}
    for one, computation in zip(found, computations, strict=True):
        # The loss of a forward may be computed after its range. A device runs behind the host, so use the host's time.
        until = one.left_ns if trace.kernels else max(one.left_ns, one.end_ns)
        taken[computation.unit] = sums[bisect_right(moments, until)] - sums[bisect_left(moments, one.entered_ns)]
    return taken


def _computations(trace: RankTrace) -> list[NamedRange]:
    """Return all computations, sorted by start."""
    named = [
        NamedRange(what, event.start_ns, event.end_ns, event.start_ns, event.end_ns)
        for event in trace.events
        if event.is_range and (what := computation_of(event.name))
    ]
    in_ranges = bool(named)
    named = _cut(trace, named) or find_unnamed(trace, _is_message)
    if not named:
        raise InputError(
            trace.source,
            "has no forward or backward of a pipeline",
            "record ranks that run a schedule of torch.distributed.pipelining, or name ranges PP:<stage>F<microbatch>",
        )
    if trace.kernels:
        found = [_on_device(one, trace.kernels) for one in named]
    elif in_ranges:
        work = [
            event
            for event in trace.events
            if not event.is_range and not _is_message(event) and event.name not in _VIEWS
        ]
        starts = [event.start_ns for event in work]
        found = _with_losses([_on_host(one, work, starts) for one in named], trace, work, starts)
    else:
        return named
    if all(one.end_ns <= one.start_ns for one in found):
        raise InputError(
            trace.source,
            f"has no {'kernel' if trace.kernels else 'operator'} in the {len(found)} ranges of its computations",
            "record with ProfilerActivity.CPU, and on GPUs also with ProfilerActivity.CUDA",
        )
    return _in_turn(found, on_host=not trace.kernels)


def _cut(trace: RankTrace, found: Sequence[NamedRange]) -> list[NamedRange]:
    """Sort ranges, and end each where the next one begins; raise `InputError` if two overlap too much."""
    ordered = sorted(found, key=lambda one: one.entered_ns)
    for i, (one, after) in enumerate(pairwise(ordered)):
        over = one.left_ns - after.entered_ns
        if over > max(_CUT_NS, _CUT_SHARE * (one.left_ns - one.entered_ns)):
            raise InputError(
                trace.source,
                f"{_text(one.named)} continues for {over / 1e6:.3g} ms after {_text(after.named)} begins",
                "record ranges that do not overlap",
            )
        if over > 0:
            ordered[i] = one._replace(end_ns=after.entered_ns, left_ns=after.entered_ns)
    return ordered


def _text(named: ComputationName) -> str:
    """Return the name of a computation, as in traces."""
    stage = "" if named.stage is None else named.stage
    return f"PP:{stage}{KIND_NAMES[named.kind]}{named.microbatch}"


def _in_turn(found: list[NamedRange], *, on_host: bool = False) -> list[NamedRange]:
    """End each computation before the next one, since a rank computes one at a time."""
    for i, (one, after) in enumerate(pairwise(found)):
        end = max(one.start_ns, min(one.end_ns, after.entered_ns if on_host else after.start_ns))
        found[i] = one._replace(end_ns=end)
        found[i + 1] = after._replace(start_ns=max(after.start_ns, end), end_ns=max(after.end_ns, end))
    return found


def _is_message(event: TraceEvent) -> bool:
    return event.name in (_SEND, _RECEIVE)


def _on_host(one: NamedRange, work: Sequence[TraceEvent], starts: Sequence[int]) -> NamedRange:
    """Limit a range to the time from its first operator to the end of its last."""
    inside = work[bisect_left(starts, one.start_ns) : bisect_left(starts, one.end_ns)]
    if not inside:
        return one._replace(start_ns=one.end_ns)
    return one._replace(start_ns=inside[0].start_ns, end_ns=max(event.end_ns for event in inside))


def _on_device(one: NamedRange, kernels: Sequence[Kernel]) -> NamedRange:
    """Replace a range by the time from its first kernel to the end of its last, without those of messages."""
    inside = [kernel for kernel in kernels if one.start_ns <= kernel.launched_ns < one.end_ns and not _is_nccl(kernel)]
    if not inside:
        return one._replace(start_ns=one.end_ns)
    return one._replace(start_ns=inside[0].start_ns, end_ns=max(kernel.end_ns for kernel in inside))


def _is_nccl(kernel: Kernel) -> bool:
    return "nccl" in kernel.name.lower()


def _with_losses(
    found: list[NamedRange], trace: RankTrace, work: Sequence[TraceEvent], starts: Sequence[int]
) -> list[NamedRange]:
    """Extend forwards by their losses, which some schedules compute after the range."""
    if not trace.links:
        return found
    forward_ns = [link.forward_ns for link in trace.links]
    longer = []
    for i, one in enumerate(found):
        until = found[i + 1].entered_ns if i + 1 < len(found) else one.end_ns
        lo, hi = bisect_left(forward_ns, one.end_ns), bisect_left(forward_ns, until)
        # Ignore operators that no backward of the iteration differentiates.
        after = [link for link in trace.links[lo:hi] if _inside_any(link.backward_ns, found)]
        if one.named.kind == FORWARD and after:
            last = max(link.forward_ns for link in after)
            inside = work[bisect_left(starts, one.end_ns) : bisect_right(starts, last)]
            one = one._replace(end_ns=max([one.end_ns, *(event.end_ns for event in inside)]))
        longer.append(one)
    return longer


def _inside_any(moment: int, found: Sequence[NamedRange]) -> bool:
    before = bisect_right(found, moment, key=lambda one: one.entered_ns) - 1
    return before >= 0 and moment <= found[before].end_ns


def _by_step(trace: RankTrace, found: Sequence[NamedRange]) -> dict[int, list[NamedRange]]:
    """Split computations into iterations, at the profiler's steps or else at repeated computations."""
    steps = [(event.start_ns, number) for event in trace.events if (number := step_of(event.name)) is not None]
    cut: dict[int, list[NamedRange]] = {}
    if steps:
        begins = [start for start, _ in steps]
        for one in found:
            at = bisect_right(begins, one.entered_ns) - 1
            if at >= 0:
                cut.setdefault(steps[at][1], []).append(one)
    else:
        seen: set[ComputationName] = set()
        number = 0
        for one in found:
            if one.named in seen:
                seen, number = set(), number + 1
            seen.add(one.named)
            cut.setdefault(number, []).append(one)
    return {number: _numbered(part) for number, part in cut.items()}


def _numbered(found: list[NamedRange]) -> list[NamedRange]:
    """Number unnamed microbatches from zero; they have negative numbers over the whole trace."""
    if not found or found[0].named.stage is not None or min(one.named.microbatch for one in found) >= 0:
        return found
    order = sorted({one.named.microbatch for one in found}, reverse=True)
    number = {old: new for new, old in enumerate(order)}
    return [one._replace(named=one.named._replace(microbatch=number[one.named.microbatch])) for one in found]


def _is_whole(found: Sequence[NamedRange]) -> bool:
    """Return whether each backward has its forward, and all or no forwards of a stage have backwards."""
    kinds: dict[tuple[int | None, int], set[int]] = {}
    for one in found:
        kinds.setdefault((one.named.stage, one.named.microbatch), set()).add(one.named.kind)
    stages: dict[int | None, set[frozenset[int]]] = {}
    for (stage, _), done in kinds.items():
        stages.setdefault(stage, set()).add(frozenset(done))
    allowed = (frozenset({0}), frozenset({0, 1}), frozenset({0, 2, 3}))
    return all(done in allowed for of_stage in stages.values() for done in of_stage) and all(
        len(of_stage) == 1 or frozenset({0}) not in of_stage for of_stage in stages.values()
    )


def _transfers(trace: RankTrace) -> list[_Transfer]:
    """Return all posted ends of messages, in order."""
    calls = [event for event in trace.events if _is_message(event) and not event.is_range]
    labels = [(event, label) for event in trace.events if event.is_range and (label := message_of(event.name))]
    label_starts = [event.start_ns for event, _ in labels]
    ends = {kind: [e for e in trace.events if e.is_range and _ENDS.get(e.name) == kind] for kind in (_SEND, _RECEIVE)}
    end_starts = {kind: [event.start_ns for event in events] for kind, events in ends.items()}
    nccl = sorted((k for k in trace.kernels if _is_nccl(k)), key=lambda kernel: kernel.launched_ns)
    launched = [kernel.launched_ns for kernel in nccl]
    found = []
    for call in calls:
        done, dtype = None, ""
        at = bisect_left(end_starts[call.name], call.start_ns)
        if at < len(ends[call.name]) and end_starts[call.name][at] <= call.end_ns:
            done, dtype = ends[call.name][at].end_ns, ends[call.name][at].dtype
        at = bisect_left(launched, call.start_ns)
        if done is None and at < len(nccl):
            done = nccl[at].end_ns
        at = bisect_right(label_starts, call.start_ns) - 1
        label = None
        if at >= 0 and labels[at][0].end_ns >= call.end_ns:
            label = labels[at][1]
        size = prod(call.shape) * _SIZES.get(dtype, 0) if call.shape else 0
        found.append(_Transfer(call.name == _SEND, call.start_ns, call.end_ns, done, label, call.shape, size))
    return found


def _waits(
    found: Sequence[NamedRange], stage: int, transfers: Sequence[_Transfer], ranges: Sequence[int], on_device: bool
) -> tuple[tuple[Computation, ...], dict[Unit, PostedReceive]]:
    """Assign waits for messages to the computations that they delayed."""
    units = [
        Unit(one.named.kind, stage if one.named.stage is None else one.named.stage, one.named.microbatch)
        for one in found
    ]
    posted: dict[Unit, PostedReceive] = {}
    # End of each wait, whether it is for a send, and the unit whose input or output it is about.
    ended: list[tuple[int, bool, Unit | None]] = []
    for message in transfers:
        unit = _of_transfer(message, found, units)
        if not message.is_send and unit is not None:
            posted.setdefault(unit, PostedReceive(message.posted_ns, message.shape, message.num_bytes))
        if message.done_ns is not None:
            ended.append((message.done_ns, message.is_send, unit))
    ended.sort(key=lambda row: row[0])
    # Waiting starts after the host's latest entry into a range or end of a post. A device waits independently.
    busy = () if on_device else ([message.call_end_ns for message in transfers], ranges)
    computations: list[Computation] = []
    for one, unit in zip(found, units, strict=True):
        free = min(one.entered_ns, posted[unit].at_ns) if unit in posted else one.entered_ns
        before_ns = computations[-1].end_ns if computations else free
        computations.append(_after_waits(one, unit, before_ns, ended, busy))
    return tuple(computations), posted


def _after_waits(
    one: NamedRange,
    unit: Unit,
    free_ns: int,
    ended: Sequence[tuple[int, bool, Unit | None]],
    busy: Sequence[Sequence[int]],
) -> Computation:
    """Return a computation with the wait before it, if there was one since the rank was free."""
    start, end = one.start_ns, max(one.start_ns, one.end_ns)
    last = bisect_right(ended, start, key=lambda row: row[0]) - 1
    if last < 0 or ended[last][0] <= free_ns:
        free = min(free_ns, start)
        return Computation(unit, start, end, free, free, None)
    received = ended[last][0]
    before = [column[at] for column in busy if (at := bisect_left(column, received) - 1) >= 0]
    entered = max([free_ns, *before])
    arrived = max((moment for moment, sent, of in ended[: last + 1] if not sent and of == unit), default=entered)
    was_short = received - entered <= _WAIT_NS
    held_by = ended[last][2] if ended[last][1] and not was_short and received - arrived > _WAIT_NS else None
    return Computation(unit, start, end, entered, received, arrived if arrived - entered > _WAIT_NS else None, held_by)


def _of_transfer(one: _Transfer, found: Sequence[NamedRange], units: Sequence[Unit]) -> Unit | None:
    """Return the unit whose output is sent, or whose input is received."""
    if one.label is not None:
        forward, stage, microbatch = one.label
        for unit in units:
            matches = unit.kind == FORWARD if forward else unit.kind not in (FORWARD, WEIGHT_GRADIENT)
            if matches and (unit.stage, unit.microbatch) == (stage, microbatch):
                return unit
        return None
    if one.is_send:
        at = bisect_right(found, one.posted_ns, key=lambda each: each.entered_ns) - 1
    else:
        at = bisect_right(found, one.posted_ns, key=lambda each: each.left_ns)
    return units[at] if 0 <= at < len(units) else None
