"""`pipeloom solve`: search a schedule for an instance."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from pipeloom.cli.options import PARAMS_HELP, check_budget, check_method, check_seed, check_threads, read_params
from pipeloom.cli.output import (
    JSON_HELP,
    check_targets,
    compiled_kernels,
    figures_text,
    print_json,
    print_note,
    print_written,
    stderr,
)
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.heartbeat import doing
from pipeloom.io import SearchRecord, read_instance, schedule_document, write_schedule
from pipeloom.printing import print_line
from pipeloom.report import key_figures, make_track, share_text, time_text
from pipeloom.timeline import check

if TYPE_CHECKING:
    from pipeloom.search import Progress

HELP = """\
Search a schedule for an instance: short makespan, within every rank's memory.

Writes the best schedule found, with its start times, its peak memory and a lower bound, which gives an optimality
gap.
"""
EPILOG = (
    "Example: pipeloom solve tiny.json --budget 1 --out tiny.schedule.json. Ctrl-C ends the search early and writes "
    "the best schedule so far. Exit code 2: a file or value is wrong, or nothing satisfies the memory limits."
)


def solve(
    instance: Path = typer.Argument(..., metavar="INSTANCE", help="A pipeloom.instance/1 file."),
    budget: float = typer.Option(..., metavar="SECONDS", help="Search seconds, without loading."),
    out: Path = typer.Option(..., metavar="SCHEDULE", help="File for the pipeloom.schedule/1."),
    method: str = typer.Option("default", metavar="NAME", help="Search method; an unknown name prints a list."),
    seed: int = typer.Option(0, metavar="N", help="Seed of all random choices."),
    threads: int = typer.Option(0, metavar="N", help="Search threads; 0: half of the cores."),
    params: Path | None = typer.Option(None, metavar="FILE", help=PARAMS_HELP),
    json: bool = typer.Option(
        False, "--json", help=JSON_HELP + " It is the schedule in --out and the counts of moves."
    ),
) -> None:
    check_budget(budget)
    check_seed(seed)
    check_threads(threads)
    check_method("--method", method)
    check_targets(out)
    tuned = read_params(params)
    graph = read_instance(instance)
    from pipeloom.search import compile_kernels
    from pipeloom.search import solve as search

    with interruptible(budget) as interrupt, progress_display() as show:
        with compiled_kernels():
            compile_kernels(graph)  # no part of the budget
        doing(f"searching (budget {budget:g} s)")
        began_s = time.monotonic()
        try:
            solution = search(
                graph,
                budget=interrupt.budget,
                seed=seed,
                method=method,
                threads=threads,
                params=tuned,
                on_progress=show,
            )
        except InputError as error:
            # The search names its own arguments, which are options here.
            entity = "--threads" if error.entity == "threads" else f"{instance}: {error.entity}"
            raise InputError(entity, error.problem, error.remedy) from error
        except InfeasibleError as error:
            raise type(error)(f"{instance}: {error.verdict}: {error}") from error
    doing("checking and writing the schedule")
    # The independent checker verifies every result; a violation here is a defect of the search.
    if found := check(graph, solution.schedule, solution.timeline):
        raise RuntimeError(f"the search gave an infeasible schedule ({found[0]}); nothing is written")
    record = SearchRecord(solution.method, seed, budget, round(time.monotonic() - began_s, 6), solution.evaluations)
    answer = (graph, solution.schedule, solution.timeline, solution.lower_bound, record)
    write_schedule(out, *answer)
    if interrupt.stopped:
        print_note(f"interrupted: {out} has the best schedule so far")
    tried = {"starts": solution.starts, "moves": solution.moves}
    if json:
        document = schedule_document(*answer)
        counts = {what: {name: one._asdict() for name, one in of.items()} for what, of in tried.items()}
        print_json({**document, "search": {**document["search"], **counts}})
    else:
        track = make_track(graph.name, graph, solution.schedule, solution.timeline, solution.lower_bound)
        print_line(f"{figures_text(key_figures(track))}, {solution.evaluations} schedules tried")
        for what, of in tried.items():
            best_first = sorted(of.items(), key=lambda each: -each[1].improved)
            if parts := [f"{name} {one.tried} ({one.improved})" for name, one in best_first if one.tried]:
                print_line(f"{what} tried (improved): {', '.join(parts)}")
        print_written([out])


class Interrupt:
    """A budget in seconds that Ctrl-C ends: it runs the clock out, so that the search returns its best result."""

    def __init__(self, seconds: float) -> None:
        from pipeloom.search import Budget

        self.stopped = False
        self.budget = Budget(seconds=seconds, clock=lambda: math.inf if self.stopped else time.monotonic())


@contextmanager
def interruptible(seconds: float) -> Iterator[Interrupt]:
    """Handle Ctrl-C while a search runs. A second one ends the program."""
    interrupt = Interrupt(seconds)

    def stop(_number: int, _frame: FrameType | None) -> None:
        interrupt.stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread, as in some tests and notebooks
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_display() -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function that shows progress on standard error; None if that is not a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield None
        return
    with console.status("searching ...") as status:

        def show(state: Progress) -> None:
            gap = share_text(state.gap)
            status.update(
                f"{state.elapsed_s:.1f} s, {state.evaluations} schedules tried, best {time_text(state.best_ns)}, "
                f"at most {gap} above the optimum"
            )

        yield show
