"""`pipeloom bench`: run search methods on the public instance library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipeloom.cli.options import check_budget, check_method
from pipeloom.cli.output import JSON_HELP, compiled_kernels, print_json, print_note
from pipeloom.errors import InputError
from pipeloom.printing import print_text

if TYPE_CHECKING:
    from pipeloom_lab.library_runs import Run

HELP = """\
Run search methods on the instance library and print their optimality gaps.

Instances are generated from their names, so nothing is downloaded. The table has a row for each family and budget, and
a column for each method. Its entries are median gaps over the seeds in percent.
"""
EPILOG = (
    "Example: pipeloom bench instances --family vlm-s --family t2v-s --method default --method mcts --budget 1. "
    "The table is Markdown on standard output. Each run prints a line on standard error."
)


def bench(
    what: str = typer.Argument(..., metavar="instances", help="Must be 'instances'."),
    family: list[str] = typer.Option(
        ["vlm-s"], metavar="NAME", help="A family of the library, or 'all'; can be repeated."
    ),
    method: list[str] = typer.Option(["default"], metavar="NAME", help="A search method; can be repeated."),
    budget: list[float] = typer.Option([1.0], metavar="SECONDS", help="CPU seconds on one thread; can be repeated."),
    seeds: int = typer.Option(5, min=1, max=10000, metavar="N", help="Instances of each family: seeds 0 to N-1."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Run search methods on the instance library and print their optimality gaps."""
    if what != "instances":
        raise InputError("bench", f"{what!r} cannot be run", "use instances")
    if seeds < 1:
        raise InputError("--seeds", f"{seeds} is not at least 1")
    from pipeloom_instances import LIBRARY
    from pipeloom_lab.library_runs import gap_table, run_library
    from pipeloom_lab.solvers import compile_methods

    families = list(LIBRARY) if "all" in family else family
    if unknown := [name for name in families if name not in LIBRARY]:
        raise InputError("--family", f"{unknown[0]!r} is none of {', '.join(LIBRARY)}")
    for name in method:
        check_method("--method", name)
    for seconds in budget:
        check_budget(seconds)
    with compiled_kernels():
        compile_methods(method)
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
