"""Fig. 13: how long it takes to generate a pipeline, against integer programs for the schedule or for everything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipeloom.layout.cooptimize import LayerChain, cooptimize, graph_of
from pipeloom.layout.cooptimize.cuts import equal_cuts
from pipeloom.layout.cooptimize.standard import stages
from pipeloom.search import Budget, gpipe
from pipeloom.taskgraph import IntArray
from pipeloom.timeline import simulate
from pipeloom_lab.adaptis import tune_phases
from pipeloom_lab.figures import Axis, line_figure
from pipeloom_lab.reproduce.adaptis.setups import GENERATOR, PaperSetup, chains, device
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome
from pipeloom_lab.reproduce.texts import make_note, make_table
from pipeloom_lab.solvers.linear import milp
from pipeloom_lab.solvers.whole_program import whole_program

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
            found = cooptimize(chain, budget=Budget(evaluations=_TRIED), seed=options.seeds[0])
            spent = time.process_time() - begin
            lines[f"{label}, ours"].add(count, spent)
            begin = time.process_time()
            theirs = tune_phases(chain, budget=Budget(seconds=options.solver_s, clock="cpu"))
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
        setting = f"S, P = {ranks}, {count} microbatch{'es' if count > 1 else ''}"
        rows.append((setting, f"{took:.2f} s", "optimal" if found.proved else "cut"))
        if not found.proved:
            break
        solved.add(count, max(took, 1e-3))
    return solved, rows


SHARE = 0.25
"""Of `Options.solver_s` that each program here gets, since there are many of them."""
COUNTS = (1, 2, 3, 4, 6, 8)
"""Microbatches that a program is tried with, until it is cut."""
BLOCKS = (4, 6, 8)
"""Blocks of layers of the small model that the whole program is also tried with: there it ends at times."""
_TRIED_BESIDE = 1000
"""Placements that ours tries, to compare with what a program has found."""
_WHOLE = "partition and placement too"

Solve = Callable[[LayerChain, float], tuple[int, int, bool]]
"""A chain and seconds: what was found, what was proved to be a bound, and whether that is the best."""


def figure_13_programs(options: Options) -> Outcome:
    """Put ever more microbatches to both programs, on all three sizes, until each is cut."""
    limit, lines = SHARE * options.solver_s, dict[str, Line]()
    tables = []
    for title, note, solve in (("the schedule alone", "schedule", _schedule), (_WHOLE, "whole", _whole)):
        rows, ends = list[tuple[str, ...]](), list[tuple[str, ...]]()
        cases = {label: (model, ranks, 0) for label, (model, ranks) in MODELS.items()}
        if title == _WHOLE:
            cases |= {f"S in {blocks} blocks": (MODELS["S"][0], 2, blocks) for blocks in BLOCKS}
        for label, setting in cases.items():
            solved, more = _until_cut(label, setting, solve, limit, options.seeds[0])
            rows += more
            ends.append((label, more[-1][1], more[-1][3], more[-1][4]))
            if solved.x:
                lines[f"{label}, {title}"] = solved
            if len(solved.x) >= ENOUGH:
                beyond = lines[f"{label}, {title}, extrapolated"] = continued(solved)
                rows += [
                    (label, f"{x:g}", "", f"{t:.2g} s", "extrapolated", "", "") for x, t in zip(*beyond, strict=True)
                ]
        tables.append(make_table("adaptis/figure-13-programs-ends", ends, title=title))
        tables.append(
            make_table(
                "adaptis/figure-13-programs",
                rows,
                title=title,
                note=make_note(f"adaptis/figure-13-{note}", limit=limit),
            )
        )
    svg = line_figure(lines, x=Axis("microbatches", log=True), y=Axis("seconds", log=True))
    return Outcome(tuple(tables), (Figure("figure-13-programs", "Integer programs", svg),), devices=device())


def blocks_of(chain: LayerChain, count: int) -> LayerChain:
    """Put neighbouring layers together into so many blocks of equally many."""
    starts = np.array(equal_cuts(chain, count)[:-1])

    def summed(table: IntArray) -> IntArray:
        return np.add.reduceat(table, starts, axis=0)

    return replace(
        chain,
        layer_names=tuple(f"block {i}" for i in range(count)),
        forward_ns=summed(chain.forward_ns),
        backward_ns=summed(chain.backward_ns),
        weight_ns=summed(chain.weight_ns),
        activation_bytes=summed(chain.activation_bytes),
        gradient_bytes=summed(chain.gradient_bytes),
        static_bytes=summed(chain.static_bytes),
        strategies=(("keep",),) * count,
    )


def _until_cut(
    label: str, setting: tuple[str, int, int], solve: Solve, limit: float, seed: int
) -> tuple[Line, list[tuple[str, ...]]]:
    """Seconds by microbatches of what was solved, and a row for each try."""
    model, ranks, blocks = setting
    solved = Line([], [])
    rows: list[tuple[str, ...]] = []
    for count in COUNTS:
        chain = chains(PaperSetup(model, ranks, 2, count, 4096))[0].with_capacity(None)
        chain = blocks_of(chain, blocks) if blocks else chain
        begin = time.monotonic()
        found, bound, proved = solve(chain, limit)
        took = time.monotonic() - begin
        ours = cooptimize(chain, budget=Budget(evaluations=_TRIED_BESIDE), seed=seed).timeline.makespan_ns
        rows.append(
            (
                label,
                str(count),
                f"{chain.num_layers}, {ranks}",
                f"{took:.2f} s",
                "optimal" if proved else "cut",
                "" if proved else f"{100 * (found / bound - 1):.1f} %" if bound else "no bound",
                f"{100 * (found / ours - 1):+.1f} %",
            )
        )
        if not proved:
            break
        solved.add(count, max(took, 1e-3))
    return solved, rows


def _schedule(chain: LayerChain, limit: float) -> tuple[int, int, bool]:
    graph = graph_of(chain, stages(chain))
    found = milp(graph, seconds=limit, hint=gpipe(graph), bound_ns=0)
    return simulate(graph, found.schedule).makespan_ns, found.bound_ns, found.proved


def _whole(chain: LayerChain, limit: float) -> tuple[int, int, bool]:
    found = whole_program(chain, seconds=limit)
    return found.makespan_ns, found.bound_ns, found.proved
