"""Schedules that a command line names, run on their instance: from files, or static ones by name."""

from __future__ import annotations

from pathlib import Path

from pipeloom.cli.output import print_note
from pipeloom.errors import InputError, PlanError
from pipeloom.io import read_schedule
from pipeloom.report import Track, make_track
from pipeloom.search.schedules import SCHEDULES, ScheduleSettings, is_schedule_name, schedule_name
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, bound_of, check, simulate


def stated_track(graph: TaskGraph, path: Path) -> Track:
    """Run the order of a schedule's file, or a static schedule by its name; a note says what of it is infeasible.

    Raises
    ------
    InputError
        Naming the file, when its order does not fit the instance or cannot run.
    """
    schedule = _schedule(graph, path)
    try:
        timeline = simulate(graph, schedule)
    except InputError as error:
        raise InputError(f"{path}: {error.entity}", error.problem, error.remedy) from error
    except PlanError as error:
        raise InputError(f"{path}: order", str(error), "pipeloom check names every violation") from error
    for violation in check(graph, schedule):
        print_note(f"note: {path} is infeasible, {violation.kind}: {violation.message}")
    name = schedule.method or path.name.removesuffix(".gz").removesuffix(".json")
    return make_track(name, graph, schedule, timeline, bound_of(graph, schedule, timeline))


def _schedule(graph: TaskGraph, path: Path) -> Schedule:
    if path.exists() or not is_schedule_name(str(path)):
        return read_schedule(path).schedule
    orders = SCHEDULES[schedule_name(str(path))].orders(graph.num_ranks, ScheduleSettings())
    return min((order(graph) for order in orders), key=lambda made: simulate(graph, made).makespan_ns)
