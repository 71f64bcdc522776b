"""`pipeloom reproduce`: a paper's evaluation, again, from seeds."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.output import JSON_HELP, print_json, print_note, print_written
from pipeloom.errors import InputError
from pipeloom.limits import MAX_COUNT, MAX_THREADS, MAX_WAIT_S
from pipeloom.printing import print_line

if TYPE_CHECKING:
    from pipeloom_lab.reproduce import Progress, Record

HELP = """\
Run a paper's evaluation again, record its tables and figures, and write the pages.

Leaves FOLDER/PAPER/PART.json, the pictures beside it, FOLDER/PAPER.md, and FOLDER/index.md with every claim of the
papers beside ours. A part is recorded as soon as it has ended; after an interruption the same command goes on from
there. The paper's own numbers stand beside ours, and enter no computation.
"""
EPILOG = (
    "Examples: pipeloom reproduce dip --list; pipeloom reproduce dip table-5 --seeds 1; "
    "pipeloom reproduce all --out docs/results."
)


def reproduce(
    paper: str = typer.Argument(..., metavar="PAPER", help="dip, pipetune, adaptis, or all."),
    part: list[str] = typer.Argument(None, metavar="[PART]...", help="Some of its tables and figures; default: all."),
    show: bool = typer.Option(False, "--list", help="Name the parts and leave."),
    seeds: int | None = typer.Option(None, min=1, max=10000, metavar="N", help="Seeds 0 to N-1; default: 0 to 2."),
    iterations: int | None = typer.Option(
        None, min=1, max=MAX_COUNT, metavar="N", help="Batches for every mean, where the paper has more; default: 10."
    ),
    search: float | None = typer.Option(
        None,
        min=0.0,
        max=MAX_WAIT_S,
        metavar="SECONDS",
        help="Processor seconds of our search for one batch (dip: of given microbatches); default: 1.",
    ),
    solver: float | None = typer.Option(
        None,
        min=0.0,
        max=MAX_WAIT_S,
        metavar="SECONDS",
        help="Seconds after which an exact solver is cut; default: 60.",
    ),
    full: bool = typer.Option(False, "--full", help="All defaults as large as in the paper; may take days."),
    processes: int | None = typer.Option(
        None,
        min=1,
        max=MAX_THREADS,
        metavar="N",
        help="Parts made at a time; those that read the clock run alone; default: as many as cores.",
    ),
    again: bool = typer.Option(False, "--again", help="Make also what is recorded of this source with these options."),
    out: Path = typer.Option(Path("docs/results"), metavar="FOLDER", help="Where data, pages and pictures go."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Run a paper's evaluation again, record its tables and figures, and write the pages."""
    from pipeloom_lab.reproduce import PAPERS, Options, full_of, parts_of, reproduce

    papers = list(PAPERS) if paper == "all" else [paper]
    if paper == "all" and part:
        raise InputError("PART", f"{part[0]!r} is of one paper", f"say which: {', '.join(PAPERS)}")
    if show:
        for each in papers:
            for one in parts_of(each):
                print_line(f"{one.name:24} {one.title} ({one.source})")
        return
    if seeds is not None and not 1 <= seeds <= 10_000:
        raise InputError("--seeds", f"{seeds} is not between 1 and 10000")
    given: dict[str, Any] = {
        "seeds": None if seeds is None else tuple(range(seeds)),
        "iterations": iterations,
        "search_s": search,
        "solver_s": solver,
    }
    known = {name: value for name, value in given.items() if value is not None}
    wanted = [(each, replace(full_of(each) if full else Options(), **known)) for each in papers]
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    made = reproduce(wanted, part or (), out, processes=count, again=again, on_progress=_tell)
    page = out / ("index.md" if paper == "all" else f"{paper}.md")
    if json:
        found = made if paper == "all" else made[paper]
        print_json({"page": str(page), "parts": _documents(found)})
    else:
        print_written([page])


def _documents(found: dict[str, Any]) -> dict[str, Any]:
    return {name: _documents(one) if isinstance(one, dict) else _document(one) for name, one in found.items()}


def _document(record: Record) -> dict[str, object]:
    """Tables and notes; pictures are in their files."""
    parts = asdict(record)
    return {name: parts[name] for name in ("tables", "notes", "devices")}


def _tell(progress: Progress) -> None:
    took = f" {progress.elapsed_s:.0f} s" if progress.elapsed_s else ""
    left = f"; {progress.left}" if progress.left else ""
    print_note(f"{progress.paper} {progress.part.name} ({progress.part.title}): {progress.state}{took}{left}")
