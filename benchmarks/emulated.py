"""Sleeping chunks on gloo ranks: does a plan take as long as was planned, when only computation is emulated?"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.planning import _batch, _problem
from pipeloom.arrange import ModulePlacement, separate
from pipeloom.packing import pack
from pipeloom.plan import ExecutionPlan, boundary_shapes, lower
from pipeloom.report import markdown_table
from pipeloom.runtime import TorchTransport, emulate, launch, step_durations
from pipeloom.search import Evaluations, solve
from pipeloom.spec import ClusterSpec
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import simulate

TITLE = "Emulated ranks: planned against measured"
_NUM_PLANS = 8
_MEAN_MS = 40

Problem = tuple[ExecutionPlan, dict[tuple[str, str, int, int], int], int]


def run() -> str:
    """Measure, and return the section as Markdown."""
    rows = []
    for num_ranks in (4, 8):
        problems = [_problem_of(num_ranks, seed) for seed in range(_NUM_PLANS)]
        by_rank = launch(_measure, num_ranks, problems)
        errors = []
        for i, (plan, _, planned) in enumerate(problems):
            assert plan.num_ranks == num_ranks
            spans = [spans_of_rank[i] for spans_of_rank in by_rank]
            measured = max(end for _, end in spans) - min(start for start, _ in spans)
            errors.append(measured / planned - 1.0)
        planned_s = statistics.mean(planned for _, _, planned in problems) / 1e9
        sizes = sorted(map(abs, errors))
        rows.append([
            str(num_ranks), str(len(problems)), f"{planned_s:.2f}", f"{statistics.median(errors):+.2%}",
            f"{sizes[min(len(sizes) - 1, round(0.95 * (len(sizes) - 1)))]:.2%}",
        ])  # fmt: skip
    text = (
        f"Computation is replaced by sleeping, {_MEAN_MS} ms a task on average; messages are real, 8 bytes each, on "
        "gloo. A plan of its own for every batch; times of the host's clock."
    )
    header = ["ranks", "plans", "planned, s", "median error", "95th percentile of its size"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _problem_of(num_ranks: int, seed: int) -> Problem:
    """A plan searched for a random batch, its tasks' durations, and its planned time."""
    model, costs, packing = _problem()
    # No planned time for messages: those of this machine are what is measured.
    costs = replace(costs, cluster=ClusterSpec(link_bytes_per_s=1e15, link_latency_s=0.0))
    layout = separate(
        model, num_ranks, {"vision": ModulePlacement(1, 12), "lm": ModulePlacement(1)}, lambda *_: 1.0
    )
    packed = pack(_batch(random.Random(seed).randint(num_ranks, 2 * num_ranks)), model, layout, packing)
    graph = build_graph(layout, packed, costs)
    spread = np.random.default_rng(seed).uniform(0.5, 1.5, graph.num_tasks)
    durations = (spread * _MEAN_MS * 1e6).astype(np.int64)
    graph = replace(graph, duration_ns=durations)
    schedule = solve(graph, budget=Evaluations(50), seed=seed).schedule
    timeline = simulate(graph, schedule)
    plan = lower(graph, schedule, timeline, layout, packed, boundary_shapes(model, layout), seed)
    return plan, step_durations(graph, layout.chunk_names), timeline.makespan_ns


def _measure(problems: list[Problem]) -> list[tuple[int, int]]:
    """On one rank: start and end of every plan."""
    torch.set_num_threads(1)
    spans = []
    for plan, durations, _ in problems:
        dist.barrier()
        times = emulate(plan, dist.get_rank(), durations, TorchTransport(), clock="sleep")
        spans.append((times[0].start_ns, times[-1].end_ns))
    return spans
