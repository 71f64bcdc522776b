"""`pipeloom planner`: the planner process, which the trainer starts."""

from __future__ import annotations

import multiprocessing
import os
import time

import typer

# Ranks have priority if cores are scarce: a late plan costs less than a late rank. A larger value starves the planner.
_NICENESS = 5
_GONE_S = 3.0
"""Until then, `end_with_starter` has seen that the trainer is gone."""


HELP = """\
Serve plans to a trainer until it stops. The trainer starts this itself; you rarely need to.

Reads the problem and each coming batch's metadata from the store, and writes verified plans. The store's secret
is in the environment variable PIPELOOM_STORE_SECRET.
"""


def planner(store: str = typer.Option(..., help="Address of the trainer's store, HOST:PORT.")) -> None:
    from pipeloom.errors import PlannerError
    from pipeloom.forks import end_with_starter
    from pipeloom.planner import serve
    from pipeloom.planner.process import STARTER, STORE_SECRET
    from pipeloom.runtime import TcpPlanStore

    # The store shows only at its next use, after a search, that the trainer is gone.
    starter = int(os.environ.get(STARTER, 0))
    end_with_starter(starter=starter)
    try:
        reached = TcpPlanStore.connect(store, os.environ.get(STORE_SECRET, ""))
    except PlannerError:
        if starter or multiprocessing.parent_process() is not None:
            # The trainer may have just been killed. Then this process ends here without a message.
            time.sleep(_GONE_S)
        raise
    # After connecting, so that a process with a wrong address keeps its priority.
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    try:
        serve(reached)
    except PlannerError as error:
        # The store ends with the trainer, so nobody needs plans any more.
        raise typer.Exit(0) from error
