"""`pipeloom simulate`: simulate a schedule from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pipeloom.cli.output import (
    JSON_HELP,
    check_targets,
    draw,
    figures_document,
    print_json,
    print_note,
    print_written,
    stdout,
)
from pipeloom.errors import InputError, PlanError, located
from pipeloom.io import read_instance, read_schedule
from pipeloom.report import Track, comparison_table, make_track, time_text
from pipeloom.report.any_width import Table
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Bubbles, bound_of, bubbles, check
from pipeloom.timeline import simulate as run_order

HELP = """\
Simulate a schedule's order and show times, bubbles by cause, and memory.

Every task starts as early as its rank and dependencies allow; start times in the file are not used.
"""
EPILOG = (
    "Example: pipeloom simulate tiny.json tiny.schedule.json --html tiny.html --trace tiny.trace.json. Open the page "
    "in any browser, the trace in https://ui.perfetto.dev."
)


def simulate(
    instance: Path = typer.Argument(..., metavar="INSTANCE", help="A pipeloom.instance/1 file."),
    schedule: Path = typer.Argument(..., metavar="SCHEDULE", help="A pipeloom.schedule/1 file with the order."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Write a Chrome trace (JSON)."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with the timeline."),
    svg: Path | None = typer.Option(None, metavar="FILE", help="Write a static SVG image."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    check_targets(trace, html, svg)
    graph = read_instance(instance)
    track = read_track(graph, schedule)
    idle = bubbles(track.graph, track.timeline)
    written = draw([track], title=graph.name or instance.stem, trace_file=trace, html_file=html, svg_file=svg)
    if json:
        print_json(
            figures_document(track)
            | {
                "instance": graph.name,
                "start_s": [t / 1e9 for t in track.timeline.start_ns.tolist()],
                "bubbles": _bubbles_document(idle),
                "written": written,
            }
        )
        return
    console = stdout()
    console.print(comparison_table([track], title=graph.name))
    console.print(_bubbles_table(graph, idle))
    print_written(written)


def _bubbles_document(idle: Bubbles) -> list[dict[str, Any]]:
    """Return the idle seconds of every rank by cause."""
    return [
        {
            "rank": rank,
            "warm_up_s": int(idle.warm_up_ns[rank]) / 1e9,
            "waiting_s": [int(ns) / 1e9 for ns in idle.waiting_ns[rank]],
            "transfer_s": int(idle.transfer_ns[rank]) / 1e9,
            "memory_s": int(idle.memory_ns[rank]) / 1e9,
            "order_s": int(idle.order_ns[rank]) / 1e9,
            "cool_down_s": int(idle.cool_down_ns[rank]) / 1e9,
        }
        for rank in range(len(idle.warm_up_ns))
    ]


def _bubbles_table(graph: TaskGraph, idle: Bubbles) -> Table:
    """Return a table of the idle time of every rank by cause."""
    columns = ("rank", "warm-up", "waiting for ranks", "transfer", "memory", "order", "cool-down", "all")
    table = Table(*columns, title="Idle time by cause")
    for rank in range(graph.num_ranks):
        values = (
            idle.warm_up_ns[rank],
            idle.waiting_ns[rank].sum(),
            idle.transfer_ns[rank],
            idle.memory_ns[rank],
            idle.order_ns[rank],
            idle.cool_down_ns[rank],
            idle.idle_ns[rank],
        )
        table.add_row(str(rank), *(time_text(int(value)) if value else "-" for value in values))
    return table


def read_track(graph: TaskGraph, path: Path) -> Track:
    """Simulate the order of a schedule file; a note reports why it is infeasible.

    Raise `InputError` if its order does not fit the instance or cannot run; the message names the file.
    """
    record = read_schedule(path)
    try:
        with located(str(path)):
            timeline = run_order(graph, record.schedule)
    except PlanError as error:
        raise InputError(f"{path}: order", str(error), "pipeloom check names every violation") from error
    for violation in check(graph, record.schedule):
        print_note(f"note: {path} is infeasible, {violation.kind}: {violation.message}")
    name = record.schedule.method or path.name.removesuffix(".gz").removesuffix(".json")
    return make_track(name, graph, record.schedule, timeline, bound_of(graph, record.schedule, timeline))
