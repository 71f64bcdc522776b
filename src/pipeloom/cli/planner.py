"""`pipeloom planner`: the planner service as a process; the trainer starts it."""

from __future__ import annotations

import os

import typer

# Where cores are short, ranks go first: a late plan costs less than a late rank. But not so far back that plans starve.
_NICENESS = 5


HELP = """\
Serve plans to a trainer until it says stop. The trainer starts this itself; you rarely need to.

Reads the problem and each coming batch's metadata from the store, and puts a verified plan back. The store's secret
comes in the environment, as PIPELOOM_STORE_SECRET.
"""


def planner(store: str = typer.Option(..., help="Address of the trainer's store, HOST:PORT.")) -> None:
    """Serve plans to a trainer until it says stop. The trainer starts this itself; you rarely need to."""
    from pipeloom.errors import PlannerError
    from pipeloom.planner import serve
    from pipeloom.planner.process import STARTER, STORE_SECRET
    from pipeloom.runtime import TcpPlanStore
    from pipeloom.runtime.launch.processes import end_with_starter

    # The store tells that the trainer is gone only when it is asked, after a search.
    end_with_starter(starter=int(os.environ.get(STARTER, 0)))
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    reached = TcpPlanStore.connect(store, os.environ.get(STORE_SECRET, ""))
    try:
        serve(reached)
    except PlannerError as error:
        # The store lives with the trainer: when it is gone, so is whoever wanted plans.
        raise typer.Exit(0) from error
