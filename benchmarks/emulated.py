"""Emulated gloo ranks: is a plan executed as planned, and does it take as long, when only computation is emulated?"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.planning import _batch, _problem
from pipeloom.compare.model_on_cluster import draw_iteration, graph_of, pack_microbatches, put_on_cluster
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.io import make_folder, write_text
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import pack
from pipeloom.plan import boundary_shapes, lower, verify
from pipeloom.report import markdown_table
from pipeloom.runtime import step_durations
from pipeloom.runtime.measure.emulation import Emulation, Execution, replayed_ns, run_on_ranks, without_delays
from pipeloom.search import Budget, solve
from pipeloom.spec import RankSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import TaskGraph, build_graph
from pipeloom.timeline import Schedule, simulate
from pipeloom_lab.figures import Axis, Mark, Points, scatter_figure

TITLE = "Emulated ranks: planned against measured"
_MEAN_MS = 40
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "measured-over-planned.svg"


@dataclass(frozen=True)
class PlannedRun:
    """An emulation with what it was planned from, which stays with the launching process."""

    emulation: Emulation
    graph: TaskGraph
    schedule: Schedule
    chunk_names: tuple[str, ...]
    planned_ns: int

    def replayed_ns(self, found: Execution) -> int:
        """What the plan comes to where every step takes as long as it was really slept for."""
        return replayed_ns(self.graph, self.schedule, self.chunk_names, found.steps_ns)


def run(num_plans: int = 20, microbatches: int = 24) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    num_plans : int
        Random plans for each number of ranks.
    microbatches : int
        Of the VLM-M iteration.
    """
    points: dict[str, Points] = {}
    text = f"{_random_plans(num_plans, points)}\n\n{_large_model(microbatches, points)}"
    make_folder(FIGURE.parent)
    write_text(
        FIGURE,
        scatter_figure(
            points,
            x=Axis("planned, s", log=True),
            y=Axis("measured over planned, %"),
            title="Sleeping ranks: how much longer than planned",
            marks=(Mark(2.0, "2 %"), Mark(-2.0, "-2 %")),
        ),
    )
    return f"{text}\n\n![Measured over planned](figures/{FIGURE.name})"


def _random_plans(num_plans: int, points: dict[str, Points]) -> str:
    """Table of random plans; adds their points to the figure's."""
    rows = []
    for num_ranks in (4, 8):
        plans = [_random_emulation(num_ranks, seed) for seed in range(num_plans)]
        slept = run_on_ranks([each.emulation for each in plans], num_ranks, "sleep")
        errors = [found.total_ns / each.planned_ns - 1.0 for each, found in zip(plans, slept, strict=True)]
        late = [each.replayed_ns(found) / each.planned_ns - 1.0 for each, found in zip(plans, slept, strict=True)]
        sizes = sorted(map(abs, errors))
        points[f"{num_ranks} ranks"] = ([each.planned_ns / 1e9 for each in plans], [100 * error for error in errors])
        rows.append(
            [
                str(num_ranks),
                str(num_plans),
                f"{statistics.mean(each.planned_ns for each in plans) / 1e9:.2f}",
                f"{statistics.median(errors):+.2%}",
                f"{sizes[round(0.95 * (len(sizes) - 1))]:.2%}",
                "2 %, 5 %",
                f"{statistics.median(late):+.2%}",
            ]
        )
    text = (
        f"Ranks sleep in place of computing, {_MEAN_MS} ms per task on average. Messages are real, 8 bytes "
        "each, on gloo. Every batch has its own plan. Times are wall-clock times. *Woken late* is the "
        "machine's share of the error: the median increase from late wake-ups alone."
    )
    header = [
        "ranks",
        "plans",
        "planned, s",
        "median error",
        "95th percentile of the absolute error",
        "goal",
        "woken late",
    ]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _large_model(microbatches: int, points: dict[str, Points]) -> str:
    """Table of one VLM-M pipeline; adds its points to the figure's."""
    rows = []
    seconds: list[float] = []
    errors: list[float] = []
    for num_ranks in (4, 8, 16):
        planned = _vlm_m(num_ranks, microbatches)
        emulation = planned.emulation
        begin = time.perf_counter()
        [virtual] = run_on_ranks([emulation], num_ranks, "virtual")
        took = time.perf_counter() - begin
        [slept] = run_on_ranks([emulation], num_ranks, "sleep")
        seconds.append(planned.planned_ns / 1e9)
        errors.append(100 * (slept.total_ns / planned.planned_ns - 1))
        rows.append(
            [
                str(num_ranks),
                str(planned.graph.num_tasks),
                str(sum(map(len, emulation.plan.ranks))),
                f"{planned.planned_ns / 1e9:.6f}",
                f"{virtual.end_ns / 1e9:.6f}",
                f"{took:.1f}",
                f"{slept.total_ns / 1e9:.3f}",
                f"{slept.total_ns / planned.planned_ns - 1:+.2%}",
                f"{planned.replayed_ns(slept) / planned.planned_ns - 1:+.2%}",
            ]
        )
    points["VLM-M"] = (seconds, errors)
    text = (
        f"One pipeline of VLM-M on 64 H800s (emulated costs, tensor parallelism 2, {microbatches} microbatches "
        "of real shapes). Every rank is a process on this machine. On the virtual clock, messages carry "
        "time and no rank waits, so the time must equal the planned time exactly. *Took* is the wall "
        "time to start the ranks and run the plan. Sleeping ranks sleep for the planned time of each "
        "task."
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
        "woken late",
    ]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _random_emulation(num_ranks: int, seed: int) -> PlannedRun:
    """A plan searched for a random batch, whose tasks take random times."""
    model, costs, packing = _problem()
    # No planned time for messages: those of this machine are what is measured.
    costs = replace(costs, rank=RankSpec(link_bytes_per_s=1e15, link_latency_s=0.0))
    layout = separate(model, num_ranks, {"vision": ModulePlacement(1, 12), "lm": ModulePlacement(1)}, lambda *_: 1.0)
    packed = pack(_batch(random.Random(seed).randint(num_ranks, 2 * num_ranks)), model, layout, packing)
    graph = build_graph(layout, packed, costs)
    spread = np.random.default_rng(seed).uniform(0.5, 1.5, graph.num_tasks)
    graph = replace(graph, duration_ns=(spread * _MEAN_MS * 1e6).astype(np.int64))
    solution = solve(graph, budget=Budget(evaluations=50), seed=seed)
    shapes = boundary_shapes(model, layout)
    plan = lower(graph, solution.schedule, solution.timeline, layout, packed, shapes)
    emulation = Emulation(plan, step_durations(graph, layout.chunk_names))
    return PlannedRun(emulation, graph, solution.schedule, layout.chunk_names, solution.timeline.makespan_ns)


def _vlm_m(num_ranks: int, microbatches: int) -> PlannedRun:
    """VLM-M on so many pipeline ranks, with real shapes and emulated costs."""
    degrees = Degrees(data=32 // num_ranks, tensor=2, pipeline=num_ranks)
    setting = put_on_cluster("vlm-m", "dip-h800-64", degrees, update=False)
    costs = EmulatedCosts(setting.architecture, setting.cluster, degrees, ("recompute",), split=False)
    placements = {m.name: ModulePlacement(1, 12 if m.reads == "images" else None) for m in setting.model.modules}
    layout = separate(setting.model, num_ranks, placements, lambda *_: 1.0)
    groups = draw_iteration(setting, microbatches, seed=0)
    graph = without_delays(graph_of(setting, layout, groups, "vlm-m", costs))
    solution = solve(graph, budget=Budget(evaluations=50), seed=0)
    packing, shapes = pack_microbatches(setting, layout, groups), boundary_shapes(setting.model, layout)
    plan = lower(graph, solution.schedule, solution.timeline, layout, packing, shapes)
    verify(plan, layout, packing)
    chosen = graph.with_candidates(solution.schedule.candidate)
    planned_ns = simulate(graph, solution.schedule).makespan_ns
    emulation = Emulation(plan, step_durations(chosen, layout.chunk_names))
    schedule = replace(solution.schedule, candidate=None)
    return PlannedRun(emulation, chosen, schedule, layout.chunk_names, planned_ns)
