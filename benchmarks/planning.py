"""How long the planner takes for one batch, step by step, and how large its plans are."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from pipeloom.cost import LayerFit, Profile, ProfileCosts
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import boundary_shapes, lower, to_msgpack, verify
from pipeloom.planner import PlanningProblem
from pipeloom.planner.client import fallback_plan
from pipeloom.report import markdown_table
from pipeloom.search import Budget, compile_kernels, first_in_first_out, solve
from pipeloom.spec import Batch, LayerSpec, ModelSpec, ModuleSpec, Sample, TensorShape
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import simulate

TITLE = "Planning one batch"
_REPEATS = 7
_CASES = {"4 ranks, 8 microbatches": (4, 8), "4 ranks, 64 microbatches": (4, 64), "8 ranks, 64 microbatches": (8, 64)}


def run() -> str:
    """Measure, and return the section as Markdown."""
    compile_kernels()
    rows = []
    for name, (ranks, microbatches) in _CASES.items():
        rows.append([name, *_measure(ranks, microbatches)])
    header = [
        "workload",
        "tasks",
        "pack",
        "build",
        "static schedule",
        "search, per evaluation",
        "lower",
        "verify",
        "fallback",
        "actions",
        "plan size",
    ]
    text = (
        "CPU milliseconds, medians of seven runs. The model has a vision encoder in sub-microbatches "
        "of twelve images and a language model in two segments. *Fallback* is all the work of rank 0 "
        "if no plan arrives in time: pack, build, one static order, lower and verify."
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _measure(ranks: int, microbatches: int) -> list[str]:
    model, costs, packing = _problem()
    placements = {"vision": ModulePlacement(1, 12), "lm": ModulePlacement(2)}
    layout = separate(model, ranks, placements, lambda *_: 1.0)
    batch = _batch(microbatches)
    packed, pack_ms = _timed(lambda: pack(batch, model, layout, packing))
    graph, build_ms = _timed(lambda: build_graph(layout, packed, costs))
    _, static_ms = _timed(lambda: first_in_first_out(graph))
    solution, search_ms = _timed(lambda: solve(graph, budget=Budget(evaluations=400), seed=0))
    schedule = solution.schedule
    timeline = simulate(graph, schedule)
    plan, lower_ms = _timed(lambda: lower(graph, schedule, timeline, layout, packed, boundary_shapes(model, layout)))
    _, verify_ms = _timed(lambda: verify(plan, layout, packed))
    problem = PlanningProblem(model, layout, costs, packing)
    _, fallback_ms = _timed(lambda: fallback_plan(problem, batch))
    actions = sum(len(rank) for rank in plan.ranks)
    size = f"{len(to_msgpack(plan)) / 1e3:.0f} kB"
    times = [pack_ms, build_ms, static_ms, search_ms / 400, lower_ms, verify_ms, fallback_ms]
    return [str(graph.num_tasks), *(f"{ms:.2f}" if ms >= 0.1 else f"{ms:.3f}" for ms in times), str(actions), size]


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    times, result = [], None
    for _ in range(_REPEATS):
        begin = time.process_time()
        result = call()
        times.append(time.process_time() - begin)
    return result, statistics.median(times) * 1e3


def _problem() -> tuple[ModelSpec, ProfileCosts, PackingSpec]:
    patches, tokens = TensorShape(("tokens", 1280), "bfloat16"), TensorShape(("tokens", 4096), "bfloat16")
    model = ModelSpec(
        "vlm",
        (
            ModuleSpec("vision", "images", (LayerSpec("block", patches, 32),)),
            ModuleSpec("lm", "sequence", (LayerSpec("block", tokens, 32),), after=("vision",)),
        ),
    )
    fits = {
        "vision/block": LayerFit((1e-5, 0, 1e-7, 1e-12), (2e-5, 0, 2e-7, 2e-12), (0, 0, 4e4, 0)),
        "lm/block": LayerFit((1e-5, 0, 4e-7, 1e-12), (2e-5, 0, 8e-7, 2e-12), (0, 0, 1.4e5, 0)),
    }
    return model, ProfileCosts(model, Profile("invented", fits)), PackingSpec(8192)


def _batch(microbatches: int) -> Batch:
    """Documents that fill so many microbatches, with zero to 40 images of 169 tokens each."""
    rng, samples = random.Random(0), []
    for i in range(microbatches):
        images = rng.choice([0, 2, 5, 10, 20, 40])
        samples.append(Sample(f"s{i}", 8100 - 169 * images, (169,) * images, (2704,) * images))
    return Batch(tuple(samples))
