"""Schedules from files, run on their instance."""

from __future__ import annotations

from pathlib import Path

from pipeloom.cli.output import print_note
from pipeloom.errors import InputError, PlanError
from pipeloom.io import read_schedule
from pipeloom.report import Track, make_track
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import bound_of, check, simulate


def stated_track(graph: TaskGraph, path: Path) -> Track:
    """Run the order of a schedule's file; a note says what of it is infeasible.

    Raises
    ------
    InputError
        Naming the file, when its order does not fit the instance or cannot run.
    """
    stated = read_schedule(path)
    try:
        timeline = simulate(graph, stated.schedule)
    except InputError as error:
        raise InputError(f"{path}: {error.entity}", error.problem, error.remedy) from error
    except PlanError as error:
        raise InputError(f"{path}: order", str(error), "pipeloom check names every violation") from error
    for violation in check(graph, stated.schedule):
        print_note(f"note: {path} is infeasible, {violation.kind}: {violation.message}")
    name = stated.schedule.method or path.name.removesuffix(".gz").removesuffix(".json")
    return make_track(name, graph, stated.schedule, timeline, bound_of(graph, stated.schedule, timeline))
