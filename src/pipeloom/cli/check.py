"""`pipeloom check`: the independent checker over files."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeloom.cli.output import JSON_HELP, figures_document, figures_text, print_json, print_note
from pipeloom.errors import InputError
from pipeloom.io import ScheduleFile, read_instance, read_schedule
from pipeloom.printing import print_line
from pipeloom.report import key_figures, make_track
from pipeloom.taskgraph import NS_PER_S, TaskGraph
from pipeloom.timeline import check as check_schedule
from pipeloom.timeline import lower_bound, peaks_with_instants, simulate

HELP = """\
Check whether a schedule is feasible for an instance, and list violations.

Checks the order of tasks, the declared start times (overlap, edges, earliest start), the memory of every rank, and
the declared figures (makespan, bound, peaks). It shares no code with the simulator and the search.
"""
EPILOG = (
    "Example: pipeloom check tiny.json tiny.schedule.json. Exit code 0: feasible; 1: violated, each violation on a "
    "separate line; 2: a file is wrong."
)
_SHOWN = 40  # violations that are printed


def check(
    instance: Path = typer.Argument(..., metavar="INSTANCE", help="A pipeloom.instance/1 file."),
    schedule: Path = typer.Argument(..., metavar="SCHEDULE", help="A pipeloom.schedule/1 file."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    graph = read_instance(instance)
    record = read_schedule(schedule)
    if record.instance != graph.name:
        print_note(f"note: {schedule} is for instance {record.instance!r}, {instance} is named {graph.name!r}")
    violations = judge(graph, record, str(schedule))
    document: dict[str, object] = {
        "feasible": not violations,
        "instance": graph.name,
        "violations": [{"kind": kind, "message": message} for kind, message in violations],
    }
    if violations:
        if json:
            print_json(document)
        else:
            print_line(f"violated: {schedule} breaks {len(violations)} rule{'s' * (len(violations) > 1)} of {instance}")
            for kind, message in violations[:_SHOWN]:
                print_line(f"  {kind}: {message}")
            if len(violations) > _SHOWN:
                print_line(f"  ... and {len(violations) - _SHOWN} more; --json gives them all")
        raise typer.Exit(1)
    timeline = simulate(graph, record.schedule)
    track = make_track(graph.name, graph, record.schedule, timeline, lower_bound(graph))
    if json:
        print_json(document | figures_document(track))
    else:
        print_line(f"feasible: {figures_text(key_figures(track))}")


def judge(graph: TaskGraph, record: ScheduleFile, where: str) -> list[tuple[str, str]]:
    """Return all violations as kind and message: those of the checker, or else wrong figures."""
    try:
        timeline = record.timeline(graph)
    except InputError as error:
        if error.entity.startswith("candidate"):  # the checker reports it
            timeline = None
        else:
            raise InputError(f"{where}: {error.entity}", error.problem, error.remedy) from error
    violations = check_schedule(graph, record.schedule, timeline)
    found: list[tuple[str, str]] = [(violation.kind, violation.message) for violation in violations]
    return found or [("stated", message) for message in _wrong_figures(graph, record)]


def _wrong_figures(graph: TaskGraph, record: ScheduleFile) -> list[str]:
    """Return the declared figures that differ from the schedule's by more than a nanosecond per task."""
    timeline = simulate(graph, record.schedule)
    found = []
    makespan = timeline.makespan_ns
    # A nanosecond per task for other rounding, and the resolution of seconds in double precision.
    slack = graph.num_tasks + (makespan >> 50)
    if record.makespan_ns is not None and abs(record.makespan_ns - makespan) > slack:
        found.append(f"makespan_s is {record.makespan_ns / NS_PER_S:.9f}, the order gives {makespan / NS_PER_S:.9f}")
    if record.lower_bound is not None and record.lower_bound.ns > makespan + slack:
        found.append(
            f"lower_bound_s is {record.lower_bound.ns / NS_PER_S:.9f}, above the makespan {makespan / NS_PER_S:.9f}"
        )
    peaks = record.peak_bytes
    if peaks is not None and len(peaks) != graph.num_ranks:
        found.append(f"peak_memory_bytes has {len(peaks)} entries, the instance {graph.num_ranks} ranks")
    elif peaks is not None:
        # A task of zero duration may be counted or not.
        with_instants = peaks_with_instants(graph, record.schedule)
        for rank, (least, most) in enumerate(zip(timeline.peak_bytes.tolist(), with_instants.tolist(), strict=True)):
            if not least <= peaks[rank] <= most:
                found.append(f"peak_memory_bytes[{rank}] is {peaks[rank]}, the order gives {least}")
    return found
