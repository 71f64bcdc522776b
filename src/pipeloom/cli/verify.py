"""`pipeloom verify`: the plan verifier over files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer

from pipeloom.cli.output import JSON_HELP, print_json
from pipeloom.errors import PlanError
from pipeloom.io import read_layout, read_plan
from pipeloom.plan import verify as verify_plan
from pipeloom.printing import print_line, print_text

HELP = """\
Prove that an execution plan is complete and free of deadlock, or show where it stops.

Checks the steps of each rank, then runs the plan dry under NCCL's matching rules (tags are ignored, and there is
one queue for each pair of ranks), which are stricter than gloo's.
"""
EPILOG = (
    "Example: pipeloom verify runs/digits_vlm/plans/00017.plan. Exit code 0: proved; 1: the plan is incomplete or "
    "would stop, with the grid of ranks and steps; 2: a file is wrong."
)


def verify(
    plan: Path = typer.Argument(..., metavar="PLAN", help="An execution plan in its text form, pipeloom.plan/2."),
    layout: Path | None = typer.Option(
        None, metavar="FILE", help="A pipeloom.layout/1; also check the plan's chunks, ranks and backwards."
    ),
    single_communicator: bool = typer.Option(
        False, "--serial", help="Also verify it for a single communicator, where the messages of a rank are sequential."
    ),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    made = read_plan(plan)
    shape = None if layout is None else read_layout(layout)
    actions = [action for rank in made.ranks for action in rank]
    counted = Counter("messages" if action.verb.is_send else action.verb for action in actions)
    document: dict[str, object] = {
        "verified": True,
        "problem": None,
        "num_ranks": made.num_ranks,
        "iteration": made.iteration,
        "layout": made.layout,
        "num_actions": len(actions),
        "num_messages": counted["messages"],
    }
    try:
        unchecked = verify_plan(made, shape, single_communicator=single_communicator)
    except PlanError as error:
        if json:
            print_json(document | {"verified": False, "problem": str(error)})
        else:
            print_text(f"refuted: {error}")
        raise typer.Exit(1) from error
    if json:
        print_json(document | {"not_checked": list(unchecked)})
    else:
        print_line(
            f"verified: {made.num_ranks} ranks, {len(actions)} actions, {counted['messages']} messages; complete and "
            f"free of deadlock under NCCL's and gloo's rules{', and rank by rank' if single_communicator else ''}"
        )
        for each in unchecked:
            print_line(f"not checked: {each}")
