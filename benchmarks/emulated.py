"""Emulated gloo ranks: is a plan executed as planned, and does it take as long, when only computation is emulated?"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.planning import _batch, _problem
from pipeloom.arrange import ModulePlacement, separate
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.packing import pack
from pipeloom.plan import ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.planner.case import draw_groups, graph_of, make_case, pack_groups
from pipeloom.report import markdown_table
from pipeloom.runtime import TorchTransport, emulate, launch, step_durations
from pipeloom.search import Evaluations, solve
from pipeloom.spec import ClusterSpec
from pipeloom.spec.hardware import Degrees
from pipeloom.taskgraph import TaskGraph, build_graph
from pipeloom.timeline import simulate

TITLE = "Emulated ranks: planned against measured"
_MEAN_MS = 40


@dataclass(frozen=True)
class Emulation:
    """A plan, how long each of its steps is to take, and how long all of it, planned; messages take no time."""

    plan: ExecutionPlan
    durations_ns: dict[tuple[str, str, int, int], int]
    planned_ns: int


def run(num_plans: int = 20, microbatches: int = 24) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    num_plans : int
        Random plans for each number of ranks.
    microbatches : int
        Of the VLM-M iteration.
    """
    return f"{_random_plans(num_plans)}\n\n{_large_model(microbatches)}"


def _random_plans(num_plans: int) -> str:
    rows = []
    for num_ranks in (4, 8):
        emulations = [_random_emulation(num_ranks, seed) for seed in range(num_plans)]
        spans = launch(_spans, num_ranks, emulations, "sleep")
        errors = [_measured_ns(spans, i) / each.planned_ns - 1.0 for i, each in enumerate(emulations)]
        sizes = sorted(map(abs, errors))
        rows.append([
            str(num_ranks), str(num_plans), f"{statistics.mean(e.planned_ns for e in emulations) / 1e9:.2f}",
            f"{statistics.median(errors):+.2%}", f"{sizes[round(0.95 * (len(sizes) - 1))]:.2%}", "2 %, 5 %",
        ])  # fmt: skip
    text = (
        f"Computation is replaced by sleeping, {_MEAN_MS} ms a task on average; messages are real, 8 bytes each, on "
        "gloo. A plan of its own for every batch; times of the host's clock."
    )
    header = ["ranks", "plans", "planned, s", "median error", "95th percentile of its size", "to reach"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _large_model(microbatches: int) -> str:
    rows = []
    for num_ranks in (4, 8, 16):
        emulation, num_tasks = _vlm_m(num_ranks, microbatches)
        begin = time.perf_counter()
        ends = launch(_spans, num_ranks, [emulation], "virtual")
        took = time.perf_counter() - begin
        virtual = max(end for [(_, end)] in ends)
        measured = _measured_ns(launch(_spans, num_ranks, [emulation], "sleep"), 0)
        rows.append([
            str(num_ranks), str(num_tasks), str(sum(map(len, emulation.plan.ranks))),
            f"{emulation.planned_ns / 1e9:.6f}", f"{virtual / 1e9:.6f}", f"{took:.1f}", f"{measured / 1e9:.3f}",
            f"{measured / emulation.planned_ns - 1:+.2%}",
        ])  # fmt: skip
    text = (
        f"One pipeline of VLM-M on 64 H800s (costs emulated, tensor parallelism 2, {microbatches} microbatches of real "
        "shapes), every rank a process of this machine. On the virtual clock messages carry time and nothing waits: "
        "the time must be the planned one exactly; the seconds beside it are those of starting the ranks and running "
        "it. Sleeping ranks wait as long as each task is planned to take."
    )
    header = [
        "ranks",
        "tasks",
        "actions",
        "planned, s",
        "virtual clock, s",
        "took, s",
        "sleeping, s",
        "error",
    ]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _random_emulation(num_ranks: int, seed: int) -> Emulation:
    """A plan searched for a random batch, whose tasks take random times."""
    model, costs, packing = _problem()
    # No planned time for messages: those of this machine are what is measured.
    costs = replace(costs, cluster=ClusterSpec(link_bytes_per_s=1e15, link_latency_s=0.0))
    layout = separate(
        model, num_ranks, {"vision": ModulePlacement(1, 12), "lm": ModulePlacement(1)}, lambda *_: 1.0
    )
    packed = pack(_batch(random.Random(seed).randint(num_ranks, 2 * num_ranks)), model, layout, packing)
    graph = build_graph(layout, packed, costs)
    spread = np.random.default_rng(seed).uniform(0.5, 1.5, graph.num_tasks)
    graph = replace(graph, duration_ns=(spread * _MEAN_MS * 1e6).astype(np.int64))
    solution = solve(graph, budget=Evaluations(50), seed=seed)
    shapes = boundary_shapes(model, layout)
    plan = lower(graph, solution.schedule, solution.timeline, layout, packed, shapes, seed)
    return Emulation(plan, step_durations(graph, layout.chunk_names), solution.timeline.makespan_ns)


def _vlm_m(num_ranks: int, microbatches: int) -> tuple[Emulation, int]:
    """VLM-M on so many pipeline ranks, with real shapes and emulated costs."""
    degrees = Degrees(data=32 // num_ranks, tensor=2, pipeline=num_ranks)
    case = make_case("vlm-m", "dip-h800-64", degrees, update=False)
    costs = EmulatedCosts(case.architecture, case.machine, degrees, ("full",))
    placements = {m.name: ModulePlacement(1, 12 if m.reads == "images" else None) for m in case.model.modules}
    layout = separate(case.model, num_ranks, placements, lambda *_: 1.0)
    groups = draw_groups(case, microbatches, seed=0)
    graph = _without_delays(graph_of(case, layout, groups, "vlm-m", costs))
    solution = solve(graph, budget=Evaluations(50), seed=0)
    packing, shapes = pack_groups(case, layout, groups), boundary_shapes(case.model, layout)
    plan = lower(
        graph, solution.schedule, solution.timeline, layout, packing, shapes, default_strategy="full"
    )
    verify(plan, layout, packing)
    chosen = graph.with_candidates(solution.schedule.candidate)
    planned_ns = simulate(graph, solution.schedule).makespan_ns
    return Emulation(plan, step_durations(chosen, layout.chunk_names), planned_ns), graph.num_tasks


def _without_delays(graph: TaskGraph) -> TaskGraph:
    return replace(
        graph, edge_delay_ns=np.zeros_like(graph.edge_delay_ns), capacity_bytes=None,
        predecessor_delay_ns=np.zeros_like(graph.predecessor_delay_ns),
        successor_delay_ns=np.zeros_like(graph.successor_delay_ns),
    )  # fmt: skip


def _measured_ns(spans: Sequence[Sequence[tuple[int, int]]], number: int) -> int:
    """From the first start to the last end over all ranks."""
    mine = [rank[number] for rank in spans]
    return max(end for _, end in mine) - min(start for start, _ in mine)


def _spans(emulations: list[Emulation], clock: str) -> list[tuple[int, int]]:
    """On one rank: start and end of every plan."""
    torch.set_num_threads(1)
    spans = []
    for emulation in emulations:
        dist.barrier()
        times = emulate(
            emulation.plan, dist.get_rank(), emulation.durations_ns, TorchTransport(),
            clock="sleep" if clock == "sleep" else "virtual",
        )  # fmt: skip
        spans.append((times[0].start_ns, times[-1].end_ns))
    return spans
