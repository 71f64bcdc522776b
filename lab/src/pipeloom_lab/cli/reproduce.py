"""`pipeloom reproduce`: reproduce a paper's evaluation from seeds."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.output import JSON_HELP, print_json, print_note, print_written
from pipeloom.errors import InputError
from pipeloom.heartbeat import doing
from pipeloom.limits import MAX_COUNT, MAX_THREADS, MAX_WAIT_S
from pipeloom.printing import print_line

if TYPE_CHECKING:
    from pipeloom_lab.reproduce import Progress, Record

HELP = """\
Reproduce the tables and figures of a paper's evaluation and write the result pages.

Writes FOLDER/PAPER/PART.json with its images, FOLDER/PAPER.md, and FOLDER/index.md, which compares every claim of the
papers with the results. Each part is recorded when it ends. After an interruption, the same command continues with
the missing parts. The paper's own numbers are only shown for comparison.
"""
EPILOG = (
    "Examples: pipeloom reproduce dip --list; pipeloom reproduce dip table-5 --seeds 1; "
    "pipeloom reproduce all --out docs/results."
)


def reproduce(
    paper: str = typer.Argument(..., metavar="PAPER", help="dip, pipetune, adaptis, or all."),
    part: list[str] = typer.Argument(None, metavar="[PART]...", help="Tables and figures to reproduce; default: all."),
    show: bool = typer.Option(False, "--list", help="List the parts and exit."),
    seeds: int | None = typer.Option(
        None, min=1, max=10000, metavar="N", help="Number of seeds: 0 to N-1; default: 3."
    ),
    iterations: int | None = typer.Option(
        None, min=1, max=MAX_COUNT, metavar="N", help="Batches per mean, if the paper has more; default: 10."
    ),
    search: float | None = typer.Option(
        None,
        min=0.0,
        max=MAX_WAIT_S,
        metavar="SECONDS",
        help="CPU seconds of Pipeloom's search per batch (dip: with fixed microbatches); default: 1.",
    ),
    solver: float | None = typer.Option(
        None, min=0.0, max=MAX_WAIT_S, metavar="SECONDS", help="Time limit of an exact solver; default: 60."
    ),
    full: bool = typer.Option(False, "--full", help="Use the paper's sizes as defaults; can take days."),
    processes: int | None = typer.Option(
        None,
        min=1,
        max=MAX_THREADS,
        metavar="N",
        help="Parts to run at once; parts that measure time run alone; default: one per core.",
    ),
    again: bool = typer.Option(
        False, "--again", help="Repeat parts that this source has already recorded with these options."
    ),
    pages: bool = typer.Option(False, "--pages", help="Write the pages anew from what is recorded, and run nothing."),
    out: Path = typer.Option(Path("docs/results"), metavar="FOLDER", help="Output folder for data, pages and images."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Reproduce the tables and figures of a paper's evaluation and write the result pages."""
    from pipeloom_lab.reproduce import PAPERS, Options, full_of, parts_of, reproduce, write_pages

    papers = list(PAPERS) if paper == "all" else [paper]
    if paper == "all" and part:
        raise InputError("PART", f"{part[0]!r} is of one paper", f"say which: {', '.join(PAPERS)}")
    if show:
        for each in papers:
            for one in parts_of(each):
                print_line(f"{one.name:24} {one.title} ({one.source})")
        return
    page = out / ("index.md" if paper == "all" else f"{paper}.md")
    if pages:
        if part:
            raise InputError("--pages", f"writes no {part[0]!r} alone", "name the paper only")
        for each in papers:
            parts_of(each)
            write_pages(out, each)
        print_written([page])
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
    if progress.state == "begins":
        doing(f"running {progress.paper} {progress.part.name}")
    print_note(f"{progress.paper} {progress.part.name} ({progress.part.title}): {progress.state}{took}{left}")
