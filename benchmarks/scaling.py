"""Search time over the number of microbatches: ours against the exact solvers (DIP Fig. 12).

Every solver gets the bare problem: first in, first out as its start, no bound, one thread. Its time is that to the
proof; ours is the time to the schedule that it ended with. Durations are rounded to whole milliseconds, without which
CP-SAT and Z3 are many times slower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import highspy  # noqa: F401  (before OR-Tools, which then gets a process of its own)
import numpy as np

from pipeloom.errors import InputError
from pipeloom.io import make_folder, write_text
from pipeloom.report import markdown_table
from pipeloom.search import Budget, Progress, Solution, compile_kernels, first_in_first_out, solve
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import simulate
from pipeloom_instances import family, generate
from pipeloom_lab.figures import Axis, Points, panel_figure
from pipeloom_lab.solvers import EXACT

TITLE = "Search time against exact solvers"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "search-time-over-microbatches.svg"
_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 16, 32, 64)
_LIMIT_S, _OURS_S, _MEMORY = 5.0, 2.0, 1.5
_GIVE_UP = 1
"""A solver that fails so often in a row gets no larger problem."""
_OURS = "default"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver did with one problem; ``seconds`` is None where it was too large for its licence."""

    seconds: float | None
    proved: bool
    makespan_ns: int | None


def run() -> str:
    """Measure, draw, and return the section as Markdown."""
    compile_kernels()
    for method in EXACT:
        exactly(problem("vlm-s", 1), method, 1.0)  # starts CP-SAT's process, loads the libraries
    return report({name: measure(name) for name in ("vlm-s", "t2v-s")})


def problem(name: str, num_microbatches: int) -> TaskGraph:
    """One instance of a family under tight memory, in milliseconds."""
    graph = generate(family(name, num_microbatches=num_microbatches, memory=_MEMORY), 0, f"{name} {num_microbatches}")
    whole = np.maximum(1, np.round(graph.duration_ns / 1e6).astype(np.int64)) * 1_000_000
    return replace(graph, duration_ns=whole)


def measure(
    name: str, sizes: tuple[int, ...] = _SIZES, limit_s: float = _LIMIT_S, ours_s: float = _OURS_S
) -> dict[str, dict[int, Answer]]:
    """Answers by method and number of microbatches."""
    answers: dict[str, dict[int, Answer]] = {method: {} for method in (_OURS, *EXACT)}
    for size in sizes:
        graph = problem(name, size)
        answers[_OURS][size] = ours(graph, ours_s)
        for method in EXACT:
            before = list(answers[method].values())
            if len(before) >= _GIVE_UP and not any(answer.proved for answer in before[-_GIVE_UP:]):
                continue
            answers[method][size] = exactly(graph, method, limit_s)
    return answers


def exactly(graph: TaskGraph, method: str, limit_s: float) -> Answer:
    """One exact solver on the bare problem; wall seconds, since CP-SAT has a process of its own."""
    hint = first_in_first_out(graph)
    begin = time.perf_counter()
    try:
        found = EXACT[method](graph, seconds=limit_s, hint=hint, bound_ns=0)
    except InputError as error:
        if error.entity != "instance":
            raise
        return Answer(None, False, None)
    seconds = time.perf_counter() - begin
    return Answer(seconds, found.proved, simulate(graph, found.schedule).makespan_ns)


def ours(graph: TaskGraph, limit_s: float) -> Answer:
    """The default: CPU seconds until it had what it ended with."""
    moments: list[tuple[float, int]] = []

    def note(state: Progress) -> None:
        if not moments or state.best_ns < moments[-1][1]:
            moments.append((state.elapsed_s, state.best_ns))

    found: Solution = solve(graph, budget=Budget(seconds=limit_s, clock="cpu"), seed=0, on_progress=note)
    return Answer(moments[-1][0], found.gap == 0, found.timeline.makespan_ns)


def report(measured: dict[str, dict[str, dict[int, Answer]]], limit_s: float = _LIMIT_S) -> str:
    """Table and figure of what `measure` gave for every family."""
    panels, crosses, rows = {}, {}, []
    for name, answers in measured.items():
        panels[name], crosses[name] = _lines(answers, limit_s)
        rows += [
            [f"{name}, {size}", str(problem(name, size).num_tasks), *_cells(answers, size)] for size in answers[_OURS]
        ]
    make_folder(FIGURE.parent)
    write_text(
        FIGURE,
        panel_figure(
            panels, x=Axis("microbatches", log=True), y=Axis("search time, s", log=True), columns=2, crosses=crosses
        ),
    )
    methods = list(next(iter(measured.values())))
    return "\n\n".join(
        (
            f"Seconds to the proof on one thread, at most {limit_s:g} s, with memory {_MEMORY:g}. *x*: not "
            "proved in time. *Size*: more than Gurobi's free license allows. Empty: not tried, after failures "
            "on smaller problems. For the default: seconds until its final schedule, then the distance of "
            "that schedule from the proved optimum in per cent.",
            markdown_table(["family, microbatches", "tasks", *methods], rows),
            f"![Search time over the number of microbatches](../figures/{FIGURE.name})",
        )
    )


def _lines(answers: dict[str, dict[int, Answer]], limit_s: float) -> tuple[dict[str, Points], dict[str, Points]]:
    lines: dict[str, Points] = {}
    crosses: dict[str, Points] = {}
    for method, by_size in answers.items():
        timed = {size: a.seconds for size, a in by_size.items() if a.seconds is not None}
        done = {size: s for size, s in timed.items() if method == _OURS or by_size[size].proved}
        lines[method] = list(done), list(done.values())
        late = [size for size in timed if size not in done]
        crosses[method] = late, [limit_s] * len(late)
    return lines, crosses


def _cells(answers: dict[str, dict[int, Answer]], size: int) -> list[str]:
    proved = [
        a.makespan_ns for m, by_size in answers.items() if (a := by_size.get(size)) and a.proved and a.makespan_ns
    ]
    cells = []
    for method, by_size in answers.items():
        answer = by_size.get(size)
        if answer is None:
            cells.append("")
        elif answer.seconds is None:
            cells.append("size")
        elif method == _OURS:
            assert answer.makespan_ns is not None
            above = f"{100 * (answer.makespan_ns / min(proved) - 1):.2f}" if proved else "?"
            cells.append(f"{answer.seconds:.2f} / {above}")
        else:
            cells.append(f"{answer.seconds:.2f}" if answer.proved else "x")
    return cells
