"""Fig. 13: how long it takes to generate a pipeline, against integer programming."""

from __future__ import annotations

import time

import numpy as np

from pipeloom.layout.cooptimise import cooptimise, graph_of
from pipeloom.layout.cooptimise.standard import stages
from pipeloom.report.figures import Axis, line_figure
from pipeloom.search import Deadline, Evaluations, gpipe
from pipeloom_lab.adaptis import tune_phases
from pipeloom_lab.reproduce.adaptis.setups import GENERATOR, PaperSetup, chains, device
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome
from pipeloom_lab.reproduce.texts import make_table
from pipeloom_lab.solvers.milp import milp

_COUNTS = (4, 8, 16, 32, 64, 128, 256)
_SMALL = {2: (1, 2, 3, 4, 5, 6, 7, 8), 4: (1, 2, 3, 4)}
"""Ranks, and the microbatches that the integer program is tried with, until it is cut."""
_BEYOND = (8, 16, 32)
"""Microbatches to which its times are continued."""
MODELS = {"S": ("nemotron-h-small", 4), "M": ("nemotron-h-medium", 8), "L": ("nemotron-h-large", 8)}
ENOUGH = 3
"""Sizes that a fit asks for."""
_TRIED = 4000


def figure_13(options: Options) -> Outcome:
    """Processor time of our search by microbatches, and of an integer program for the order alone."""
    lines = {f"{label}, {name}": Line([], []) for label in MODELS for name in ("ours", GENERATOR)}
    rows = []
    for label, (model, depth) in MODELS.items():
        for count in _COUNTS:
            chain = chains(PaperSetup(model, depth, 2, count, 4096))[1]
            begin = time.process_time()
            found = cooptimise(chain, budget=Evaluations(_TRIED), seed=options.seeds[0])
            spent = time.process_time() - begin
            lines[f"{label}, ours"].add(count, spent)
            begin = time.process_time()
            theirs = tune_phases(chain, budget=Deadline(options.solver_s, "cpu"))
            took = time.process_time() - begin
            lines[f"{label}, {GENERATOR}"].add(count, took)
            rows.append(
                (
                    f"{label}, {count} microbatches",
                    f"{spent:.1f} s",
                    f"{100 * found.gap:.1f} %",
                    f"{took:.1f} s",
                    f"{100 * theirs.gap:.1f} %",
                )
            )
    solver_rows: list[tuple[str, ...]] = []
    for ranks, counts in _SMALL.items():
        solved, more = _solver(options, ranks, counts)
        solver_rows += more
        if solved.x:
            lines[f"S, P = {ranks}, solver"] = solved
        if len(solved.x) >= ENOUGH:
            beyond = lines[f"S, P = {ranks}, solver, extrapolated"] = continued(solved)
            solver_rows += [
                (f"S, P = {ranks}, {x:g} microbatches", f"{t:.2g} s", "extrapolated")
                for x, t in zip(*beyond, strict=True)
            ]
    svg = line_figure(lines, x=Axis("microbatches", log=True), y=Axis("processor seconds", log=True))
    return Outcome(
        (
            make_table("adaptis/figure-13-search", rows, tried=_TRIED, solver_s=options.solver_s, generator=GENERATOR),
            make_table("adaptis/figure-13-program", solver_rows, solver_s=options.solver_s, enough=ENOUGH),
        ),
        (Figure("figure-13", "Generation time", svg),),
        devices=device(),
    )


def continued(solved: Line) -> Line:
    """Continue times over microbatches by an exponential fit, to sizes beyond those that were solved."""
    slope, offset = np.polyfit(solved.x, np.log(solved.y), 1)
    beyond = [float(x) for x in _BEYOND if x > solved.x[-1]]
    return Line(beyond, [float(np.exp(slope * x + offset)) for x in beyond])


def _solver(options: Options, ranks: int, counts: tuple[int, ...]) -> tuple[Line, list[tuple[str, ...]]]:
    solved, rows = Line([], []), list[tuple[str, ...]]()
    for count in counts:
        chain = chains(PaperSetup("nemotron-h-small", ranks, 2, count, 4096))[0]
        graph = graph_of(chain.with_capacity(None), stages(chain))
        # Neither our bound nor a good schedule is lent to it: it has to find and prove its own.
        begin = time.process_time()
        found = milp(graph, seconds=options.solver_s, hint=gpipe(graph), bound_ns=0)
        took = time.process_time() - begin
        case = f"S, P = {ranks}, {count} microbatch{'es' if count > 1 else ''}"
        rows.append((case, f"{took:.2f} s", "optimal" if found.proved else "cut"))
        if not found.proved:
            break
        solved.add(count, max(took, 1e-3))
    return solved, rows
