"""`pipeloom.schedule/1`: an answer as a file, to and from `Schedule` and the figures stated beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from pipeloom.bounds import Budget, Number, NumBytes, Seconds, Seed
from pipeloom.errors import InputError
from pipeloom.io.document import check_format, convert, counts, dump, locate, read_document, seconds, time_ns, times_ns
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.taskgraph import NS_PER_S, IntArray, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline

FORMAT = "pipeloom.schedule/1"


class SearchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a schedule was found: by which method, from which seed, with how much work."""

    method: str = ""
    seed: Seed | None = None
    budget_s: Budget | None = None
    elapsed_s: Seconds | None = None
    evaluations: NumBytes | None = None


class _ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
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


@dataclass(frozen=True, slots=True, eq=False)
class StatedSchedule:
    """A schedule with what its file states about it; None where the file states nothing.

    The stated figures are claims: `pipeloom check` compares them with what the order really gives.

    Attributes
    ----------
    instance : str
        Name of the instance that it answers.
    start_ns : array, shape (num_tasks,), or None
    peak_bytes : array, shape (num_ranks,), or None
    """

    schedule: Schedule
    instance: str
    start_ns: IntArray | None = None
    makespan_ns: int | None = None
    lower_bound: LowerBound | None = None
    peak_bytes: IntArray | None = None
    search: SearchRecord | None = None

    def timeline(self, graph: TaskGraph) -> Timeline | None:
        """The stated start times with the durations that the graph and the chosen candidates give.

        Raises
        ------
        InputError
            When the start times, peaks or candidates do not fit the graph.
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


def read_schedule(path: PathLike) -> StatedSchedule:
    """Read a schedule; only `order` and `instance` are needed, all else may be absent or null.

    Parameters
    ----------
    path : path
        A ``pipeloom.schedule/1``.

    Raises
    ------
    InputError
        ``FILE: order[1][3]: -1 is negative`` and the like. Whether the order suits an instance is not
        asked here but by the checker.
    """
    return schedule_from_document(read_document(path), printable(str(path)))


def schedule_from_document(document: dict[str, Any], where: str = "schedule") -> StatedSchedule:
    """Build the schedule of a parsed document; errors as in `read_schedule`."""
    check_format(document, FORMAT, where)
    data = convert(document, _ScheduleFile, where)
    try:
        return _stated(data)
    except InputError as error:
        raise locate(error, where) from error


def _stated(data: _ScheduleFile) -> StatedSchedule:
    order = tuple(counts(f"order[{rank}]", tasks) for rank, tasks in enumerate(data.order))
    candidate = None if data.candidate is None else counts("candidate", data.candidate)
    bound = None
    if data.lower_bound_s is not None:
        bound = LowerBound(time_ns("lower_bound_s", data.lower_bound_s), data.lower_bound or "")
    return StatedSchedule(
        schedule=Schedule(order, candidate, data.search.method if data.search else ""),
        instance=data.instance,
        start_ns=None if data.start_s is None else times_ns("start_s", data.start_s, summed=False),
        makespan_ns=None if data.makespan_s is None else time_ns("makespan_s", data.makespan_s),
        lower_bound=bound,
        peak_bytes=None if data.peak_memory_bytes is None else counts("peak_memory_bytes", data.peak_memory_bytes),
        search=data.search,
    )


def schedule_document(
    graph: TaskGraph,
    schedule: Schedule,
    timeline: Timeline,
    lower_bound: LowerBound | None = None,
    search: SearchRecord | None = None,
) -> dict[str, Any]:
    """The answer as a JSON document, all fields given."""
    return {
        "format": FORMAT,
        "instance": graph.name,
        "order": [tasks.tolist() for tasks in schedule.order],
        "candidate": None if schedule.candidate is None else np.asarray(schedule.candidate).tolist(),
        "start_s": seconds(timeline.start_ns),
        "makespan_s": timeline.makespan_ns / NS_PER_S,
        "lower_bound_s": None if lower_bound is None else lower_bound.ns / NS_PER_S,
        "lower_bound": None if lower_bound is None else lower_bound.name,
        "peak_memory_bytes": timeline.peak_bytes.tolist(),
        "search": msgspec.to_builtins(search or SearchRecord(method=schedule.method)),
    }


def write_schedule(
    path: PathLike,
    graph: TaskGraph,
    schedule: Schedule,
    timeline: Timeline,
    lower_bound: LowerBound | None = None,
    search: SearchRecord | None = None,
) -> None:
    """Write an answer with its timeline, bound and the record of its search.

    Parameters
    ----------
    path : path
    graph : TaskGraph
        Which the schedule is of.
    schedule : Schedule
    timeline : Timeline
        When every task runs under it, see `simulate`.
    lower_bound : LowerBound or None
    search : SearchRecord or None
        How it was found.
    """
    write_text(path, dump(schedule_document(graph, schedule, timeline, lower_bound, search)))
