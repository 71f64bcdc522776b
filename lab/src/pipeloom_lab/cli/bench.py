"""`pipeloom bench`: methods of search over the public instance library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipeloom.cli.options import check_budget, check_method
from pipeloom.cli.output import JSON_HELP, note_compiling, print_json, print_note
from pipeloom.errors import InputError
from pipeloom.printing import print_text

if TYPE_CHECKING:
    from pipeloom_lab.library_runs import Run

HELP = """\
Run search methods over the instance library and print their gaps above the lower bounds.

The library's problems are made from their names, so nothing has to be downloaded. The table has a row for every
family and budget, a column for every method, and the median gap over the seeds in per cent.
"""
EPILOG = (
    "Example: pipeloom bench instances --family vlm-s --family t2v-s --method default --method mcts --budget 1. "
    "The table is Markdown, and goes to standard output; every run is one line on standard error."
)


def bench(
    what: str = typer.Argument(..., metavar="instances", help="What to run: the instance library."),
    family: list[str] = typer.Option(
        ["vlm-s"], metavar="NAME", help="A family of the library; may be given several times, or 'all'."
    ),
    method: list[str] = typer.Option(
        ["default"], metavar="NAME", help="A method of search; may be given several times."
    ),
    budget: list[float] = typer.Option(
        [1.0], metavar="SECONDS", help="CPU seconds on one thread; may be given several times."
    ),
    seeds: int = typer.Option(5, min=1, max=10000, metavar="N", help="Instances of each family: seeds 0 to N-1."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Run search methods over the instance library and print their gaps above the lower bounds."""
    if what != "instances":
        raise InputError("bench", f"{what!r} cannot be run", "use instances")
    if seeds < 1:
        raise InputError("--seeds", f"{seeds} is not at least 1")
    from pipeloom.search import compile_kernels
    from pipeloom_instances import LIBRARY
    from pipeloom_lab.library_runs import gap_table, run_library

    families = list(LIBRARY) if "all" in family else family
    if unknown := [name for name in families if name not in LIBRARY]:
        raise InputError("--family", f"{unknown[0]!r} is none of {', '.join(LIBRARY)}")
    for name in method:
        check_method("--method", name)
    for seconds in budget:
        check_budget(seconds)
    with note_compiling():
        for name in method:
            compile_kernels(name)
    runs = list(run_library(families, method, budgets_s=budget, seeds=range(seeds), on_run=_tell))
    if json:
        print_json([_document(run) for run in runs])
    else:
        print_text(gap_table(runs))


def _tell(run: Run) -> None:
    print_note(
        f"{run.instance}, {run.method}, {run.budget_s:g} s: {100 * run.gap:.2f} % above {run.bound_name}, "
        f"{run.evaluations} schedules tried"
    )


def _document(run: Run) -> dict[str, object]:
    return {
        "instance": run.instance,
        "method": run.method,
        "budget_s": run.budget_s,
        "makespan_s": run.makespan_ns / 1e9,
        "lower_bound_s": run.bound_ns / 1e9,
        "lower_bound": run.bound_name,
        "gap": run.gap,
        "evaluations": run.evaluations,
    }
