"""`pipeloom reproduce`: a paper's evaluation, again, from seeds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.output import JSON_HELP, print_json, print_note
from pipeloom.errors import InputError

if TYPE_CHECKING:
    from pipeloom.lab.reproduce import Progress

EPILOG = (
    "Examples: pipeloom reproduce dip --list; pipeloom reproduce dip table-5 --seeds 1; "
    "pipeloom reproduce pipetune --out docs/results."
)


def reproduce(
    paper: str = typer.Argument(..., metavar="PAPER", help="dip, pipetune or adaptis."),
    part: list[str] = typer.Argument(None, metavar="[PART]...", help="Some of its tables and figures; default: all."),
    show: bool = typer.Option(False, "--list", help="Name the parts and leave."),
    seeds: int | None = typer.Option(None, metavar="N", help="Seeds 0 to N-1; default: 0 to 2."),
    iterations: int | None = typer.Option(
        None, metavar="N", help="Batches for every mean, where the paper has more; default: 10."
    ),
    search: float | None = typer.Option(
        None, metavar="SECONDS", help="Processor seconds of our search (dip: our planning) for one batch; default: 1."
    ),
    solver: float | None = typer.Option(
        None, metavar="SECONDS", help="Seconds after which an exact solver is cut; default: 60."
    ),
    full: bool = typer.Option(False, "--full", help="All defaults as large as in the paper; may take days."),
    out: Path = typer.Option(Path("docs/results"), metavar="FOLDER", help="Where the page and the pictures go."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Run a paper's evaluation again and write its tables and figures.

    Leaves FOLDER/PAPER.md and FOLDER/PAPER/*.svg. Every section is written as soon as it is there; those that are not
    run stay. The paper's own numbers stand beside ours, and enter no computation.
    """
    from pipeloom.lab.reproduce import Options, full_of, parts_of, reproduce

    parts = parts_of(paper)
    if show:
        for one in parts:
            typer.echo(f"{one.name:24} {one.title} ({one.source})")
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
    options = replace(full_of(paper) if full else Options(), **known)
    page, outcomes = reproduce(paper, part or (), options, out, _tell)
    if json:
        print_json({"page": str(page), "parts": {name: _document(asdict(o)) for name, o in outcomes.items()}})
    else:
        typer.echo(f"wrote {page}")


def _document(outcome: dict[str, object]) -> dict[str, object]:
    """Tables and notes; pictures are in their files."""
    return {name: outcome[name] for name in ("tables", "notes", "devices")}


def _tell(progress: Progress) -> None:
    state = "..." if progress.elapsed_s is None else f"done in {progress.elapsed_s:.0f} s"
    print_note(f"{progress.part.name}: {progress.part.title} {state}")
