"""How near to the lower bound each method of search comes, and how fast list scheduling is."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pipeloom.compiled import kernel
from pipeloom.report import markdown_table
from pipeloom.search import Budget, compile_kernels, context, first_in_first_out, solve
from pipeloom.search.kernels.climb import evaluate, expand
from pipeloom.search.kernels.codes import NEVER, UNLIMITED
from pipeloom.search.kernels.decode import decode_limited, decode_unlimited
from pipeloom.search.lists import GroupPriorities
from pipeloom.search.packed import PackedGraph
from pipeloom.search.plain import minimum_memory
from pipeloom.search.scratch import Scratch
from pipeloom.search.starts.sorted_orders import FirstInFirstOut
from pipeloom.search.state import Search
from pipeloom.search.strategies import choose_on_rank
from pipeloom.taskgraph import TaskGraph
from pipeloom_instances import family, generate, instance
from pipeloom_lab.library_runs import Run, run_library
from pipeloom_lab.solvers.integer_program import program_on_rank

TITLE = "Search"
_SEEDS = 5
_GOALS = {
    "vlm-s": "0.1",
    "vlm-s-m1.5": "0.8",
    "vlm-s-ckpt-m1.5": "0.8",
    "vlm-s-k3-m2.5": "2.0",
    "vlm-s-ckpt-k3-m2.5": "2.0",
    "t2v-s": "0.5",
    "vlm-l-k2": "0.05",
    "vlm-l-k2-m1.5": "1.0",
    "vlm-l-ckpt-k2-m1.5": "1.0",
    "vlm-xl": "0.15",
}
"""Families and the gap in per cent to reach after one second."""
_ROLLOUTS = {"4 x 64": "vlm-s/0", "4 x 64, memory 1.5": "vlm-s-m1.5/0", "8 x 128": "vlm-l-k2/0", "16 x 256": "vlm-xl/0"}
_EXACT_S = 5.0


def run() -> str:
    """Measure, and return the section as Markdown."""
    compile_kernels()
    return "\n\n".join((_goals(), _kernel(), _strategies(), _small()))


def _goals() -> str:
    rows = []
    for kind, goal in _GOALS.items():
        runs = runs_of(kind)
        gaps = [100 * run.gap for run in runs]
        evaluations = statistics.median(run.evaluations for run in runs)
        rows.append([kind, goal, f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}", f"{evaluations:.0f}"])
    header = ["family", "goal", "median", "largest", "schedules tried"]
    text = (
        f"Gap to the lower bound in per cent. Default method, one second of CPU time on one thread, {_SEEDS} "
        "seeds. `pipeloom bench instances` repeats these runs:"
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def runs_of(kind: str) -> list[Run]:
    """One second of the default on every instance of a family."""
    return list(run_library([kind], ["default"], seeds=range(_SEEDS)))


@kernel
def one_by_one(p: PackedGraph, s: Scratch, choice: Any, repeats: int) -> None:
    """Run list scheduling of one order several times."""
    for _ in range(repeats):
        if choice[2] == UNLIMITED:
            decode_unlimited(p, s, choice[0], choice[1], NEVER)
        else:
            decode_limited(p, s, choice[0], choice[1], choice[2], choice[3], NEVER)


def _kernel() -> str:
    """Time list scheduling as called from Python, and as called from compiled code."""
    rows = []
    for name, which in _ROLLOUTS.items():
        graph = instance(which)
        search = Search(graph, context.begin(Budget(evaluations=1)))
        start = next(FirstInFirstOut.propose(search))
        expand(search.packed, search.scratch, start.order)
        repeats = max(2, 300_000 // graph.num_tasks)

        def from_python(search: Search = search, start: GroupPriorities = start, repeats: int = repeats) -> None:
            for _ in range(repeats):
                evaluate(search.packed, search.scratch, start.order, start.choice, NEVER)

        ways: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (from_python, ()),
            (one_by_one, (search.packed, search.scratch, start.choice, repeats)),
        ]
        row = [name, str(graph.num_tasks)]
        for way, arguments in ways:
            way(*arguments)
            times = []
            for _ in range(7):
                begin = time.process_time()
                way(*arguments)
                times.append(1e9 * (time.process_time() - begin) / (repeats * graph.num_tasks))
            row.append(f"{statistics.median(times):.0f} ({min(times):.0f})")
        rows.append(row)
    header = ["ranks x microbatches", "tasks", "called from Python", "in compiled code"]
    text = (
        "One run of list scheduling, in CPU nanoseconds per task: median (least) of seven measurements. "
        "A call from Python also lists the tasks in order. Local search calls it in compiled code:"
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _strategies() -> str:
    """One rank's strategies: our Lagrangian method and HiGHS, each with all that it has to prepare."""
    rows = []
    for name in ("vlm-s-strategies-m1.5/0", "vlm-s-strategies-m4/0"):
        graph = instance(name)
        schedule = first_in_first_out(graph.with_candidates(minimum_memory(graph)))
        choose_on_rank(graph, schedule, 0)
        for solver, choose in (("lagrangian", choose_on_rank), ("highs", program_on_rank)):
            times, gaps = [], []
            for rank in range(graph.num_ranks):
                begin = time.process_time()
                found = choose(graph, schedule, rank)
                times.append(1e3 * (time.process_time() - begin))
                gaps.append(100 * found.gap)
            pairs = len(found.pairs)
            rows.append([f"{name}, {solver}", str(pairs), f"{statistics.median(times):.1f}", f"{max(gaps):.2f}"])
    header = ["instance, solver", "pairs per rank", "ms", "largest gap, %"]
    text = (
        "Choice of memory strategies for one rank with nine candidates per pair. CPU time of the whole call, medians "
        "of the ranks:"
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _small() -> str:
    """Default against CP-SAT on small problems, with times in milliseconds so that CP-SAT can prove them."""
    rows = []
    for seed, graph in _small_problems():
        ours = solve(graph, budget=Budget(seconds=1.0, clock="cpu"), seed=seed)
        exact = solve(graph, budget=Budget(seconds=_EXACT_S), seed=seed, method="cp-sat")
        proved = exact.timeline.makespan_ns <= exact.lower_bound.ns
        above = ours.timeline.makespan_ns / exact.timeline.makespan_ns - 1
        rows.append([str(seed), str(graph.num_tasks), "yes" if proved else "no", f"{100 * above:.2f}"])
    header = ["seed", "tasks", "proved by CP-SAT", "default above CP-SAT, %"]
    text = f"Small problems under tight memory. The default method has one CPU second, CP-SAT {_EXACT_S:g} s:"
    return f"{text}\n\n{markdown_table(header, rows)}"


def _small_problems() -> list[tuple[int, TaskGraph]]:
    """The first ten of at most forty tasks."""
    all_sizes = ((seed, _small_problem(seed)) for seed in itertools.count())
    return list(itertools.islice((entry for entry in all_sizes if entry[1].num_tasks <= 40), 10))


def _small_problem(seed: int) -> TaskGraph:
    of = family("vlm-s", num_ranks=2, num_microbatches=4, memory=1.0)
    graph = generate(of, seed, f"small-{seed}")
    whole = np.maximum(1, np.round(graph.duration_ns / 1e7).astype(np.int64)) * 10_000_000
    return replace(graph, duration_ns=whole)
