"""`pipeloom.schedule/1`: reads and writes a schedule with its timeline, lower bound and search record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from pipeloom.bounds import Budget, Number, NumBytes, Seconds, Seed
from pipeloom.errors import InputError
from pipeloom.io.document import convert_format, dump, int_array, read_document, seconds, time_ns, times_ns, to_document
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.taskgraph import NS_PER_S, IntArray, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline

FORMAT: Literal["pipeloom.schedule/1"] = "pipeloom.schedule/1"


class SearchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Search that found a schedule: its method and seed, its budget and elapsed time in seconds, and evaluations."""

    method: str | None = ""
    """None becomes an empty string, which means the same."""
    seed: Seed | None = None
    budget_s: Budget | None = None
    elapsed_s: Seconds | None = None
    evaluations: NumBytes | None = None

    def __post_init__(self) -> None:
        if self.method is None:
            msgspec.structs.force_setattr(self, "method", "")


class _ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a file, in the order in which they are written."""

    format: Literal["pipeloom.schedule/1"]
    instance: str
    order: list[list[Number]]
    candidate: list[Number] | None = None
    start_s: list[Seconds] | None = None
    makespan_s: Seconds | None = None
    lower_bound_s: Seconds | None = None
    lower_bound: str | None = None
    peak_memory_bytes: list[NumBytes] | None = None
    search: SearchRecord | None = None


_ALWAYS_WRITTEN: dict[type, tuple[str, ...]] = {
    _ScheduleFile: (
        *("format", "instance", "order", "candidate", "start_s", "makespan_s"),
        *("lower_bound_s", "lower_bound", "peak_memory_bytes", "search"),
    ),
    SearchRecord: ("method", "seed", "budget_s", "elapsed_s", "evaluations"),
}
"""Fields that are always written. A field that was added later is omitted at its default (`docs/formats.md`)."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleFile:
    """Contents of a schedule file. A field is None if the file does not have it.

    Times, bound and peaks are claims of the file. `pipeloom check` compares them with the values that follow from the
    order.
    """

    schedule: Schedule
    instance: str
    """Name of the instance that the schedule is for."""
    start_ns: IntArray | None = None
    """Start of every task, shape (num_tasks,)."""
    makespan_ns: int | None = None
    lower_bound: LowerBound | None = None
    peak_bytes: IntArray | None = None
    """Largest memory in use on every rank, shape (num_ranks,)."""
    search: SearchRecord | None = None

    def timeline(self, graph: TaskGraph) -> Timeline | None:
        """Combine the start times with the durations of the graph and the chosen candidates.

        Raises
        ------
        InputError
            If the start times, peaks or candidates do not fit the graph.
        """
        if self.start_ns is None:
            return None
        if len(self.start_ns) != graph.num_tasks:
            problem = f"has {len(self.start_ns)} entries, the instance has {graph.num_tasks} tasks"
            raise InputError("start_s", problem)
        if self.peak_bytes is not None and len(self.peak_bytes) != graph.num_ranks:
            problem = f"has {len(self.peak_bytes)} entries, the instance has {graph.num_ranks} ranks"
            raise InputError("peak_memory_bytes", problem)
        chosen = graph.with_candidates(self.schedule.candidate)
        peaks = np.zeros(graph.num_ranks, np.int64) if self.peak_bytes is None else self.peak_bytes
        return Timeline(self.start_ns, self.start_ns + chosen.duration_ns, peaks)


def read_schedule(path: PathLike) -> ScheduleFile:
    """Read a schedule.

    Parameters
    ----------
    path : path
        A ``pipeloom.schedule/1``. Only `order` and `instance` are required.

    Raises
    ------
    InputError
        For example ``FILE: order[1][3]: -1 is negative``. This function does not check whether the order fits an
        instance; `pipeloom check` does.
    """
    return schedule_from_document(read_document(path), printable(str(path)))


def schedule_from_document(document: dict[str, Any], where: str = "schedule") -> ScheduleFile:
    """Build the schedule of a parsed document. Errors are those of `read_schedule`."""
    data = convert_format(document, _ScheduleFile, FORMAT, where)
    order = tuple(int_array(tasks) for tasks in data.order)
    method = data.search.method if data.search else ""
    candidate = None if data.candidate is None else int_array(data.candidate)
    bound_s = data.lower_bound_s
    return ScheduleFile(
        schedule=Schedule(order, candidate, method or ""),
        instance=data.instance,
        start_ns=None if data.start_s is None else times_ns(data.start_s),
        makespan_ns=None if data.makespan_s is None else time_ns(data.makespan_s),
        lower_bound=None if bound_s is None else LowerBound(time_ns(bound_s), data.lower_bound or ""),
        peak_bytes=None if data.peak_memory_bytes is None else int_array(data.peak_memory_bytes),
        search=data.search,
    )


def schedule_document(
    graph: TaskGraph,
    schedule: Schedule,
    timeline: Timeline,
    lower_bound: LowerBound | None = None,
    search: SearchRecord | None = None,
) -> dict[str, Any]:
    """Return a schedule as a JSON document. Parameters are those of `write_schedule`."""
    file = _ScheduleFile(
        format=FORMAT,
        instance=graph.name,
        order=[tasks.tolist() for tasks in schedule.order],
        candidate=None if schedule.candidate is None else np.asarray(schedule.candidate).tolist(),
        start_s=seconds(timeline.start_ns),
        makespan_s=timeline.makespan_ns / NS_PER_S,
        lower_bound_s=None if lower_bound is None else lower_bound.ns / NS_PER_S,
        lower_bound=None if lower_bound is None else lower_bound.name,
        peak_memory_bytes=timeline.peak_bytes.tolist(),
        search=search or SearchRecord(method=schedule.method),
    )
    document: dict[str, Any] = to_document(file, _ALWAYS_WRITTEN)
    return document


def write_schedule(
    path: PathLike,
    graph: TaskGraph,
    schedule: Schedule,
    timeline: Timeline,
    lower_bound: LowerBound | None = None,
    search: SearchRecord | None = None,
) -> None:
    """Write a schedule with its timeline, lower bound and search record.

    Parameters
    ----------
    path : path
        A name that ends in ``.gz`` is compressed.
    graph : TaskGraph
        Instance of the schedule.
    schedule : Schedule
        Order of tasks, and chosen candidates.
    timeline : Timeline
        Start and end of every task under the schedule, see `simulate`.
    lower_bound : LowerBound or None
        None: the file has no bound.
    search : SearchRecord or None
        None: the record has only the method of the schedule.
    """
    write_text(path, dump(schedule_document(graph, schedule, timeline, lower_bound, search)))
