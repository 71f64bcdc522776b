"""Emulator: the numbers that it has to reach, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.build import Placement, clear_template_cache, layer_template
from pipeloom.emulator.fit import mean_error
from pipeloom.emulator.kernels import issue
from pipeloom.emulator.size import feature_row
from pipeloom.emulator.stage import Stage, StageCost, runs_of
from pipeloom.emulator.tape import NUM_DEVICES
from pipeloom.emulator.template import LayerTemplate
from pipeloom.iteration import Draw, EmulatedStep, Points, SweepEntry, draw_microbatches, emulate, sweep
from pipeloom.iteration.microbatches import pack_microbatches
from pipeloom.report import markdown_table
from pipeloom.runtime.measure.microbench import calibrate
from pipeloom.spec import Chunk, Sample, Workload
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import build_graph, with_microbatch
from pipeloom.taskgraph.chunk_costs import ChunkCosts
from pipeloom.timeline import checkpoint, resume, simulate

TITLE = "Emulator"
MICROBATCHES = 128
_TWELVE = {"vision": 12}
"""Images that go through DIP's encoders together, its own configuration (DIP Fig. 9), where it is compared."""


def _cpu_s(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def run() -> str:
    """All tables."""
    return "\n\n".join([_layers(), _speed(), _large(), _sweep(), _many(), _calibration()])


def _layers() -> str:
    placement = Placement(load_cluster("dip-h800-64"), Degrees(tensor=8))
    rows = []
    cases = (("qwen2-32b", "8192 tokens", Workload((8192,)), 10.5), ("vit-5b", "8 images", Workload((2704,) * 8), 6.75))
    for model, what, work, published in cases:
        layer = load_architecture(model).modules[0].flat_layers[1]
        cost = Stage(runs_of([layer_template(layer, placement)])).cost(work, ("F", "B"))
        emulated = sum(cost.duration_ps.values()) / 1e9
        rows.append([f"{model} layer, {what}", f"{published}", f"{emulated:.2f}", f"{emulated / published - 1:+.1%}"])
    return (
        "Forward and backward on H800 (data-sheet table) with tensor parallelism 8, against DIP section "
        "2.2:\n\n" + markdown_table(["layer", "published ms", "emulated ms", "difference"], rows)
    )


def _samples() -> list[list[Sample]]:
    return draw_microbatches(load_architecture("vlm-l"), "dip-vlm", MICROBATCHES, seed=0)


_DEGREES = Degrees(tensor=8, pipeline=8)


def _emulate(samples: list[list[Sample]]) -> EmulatedStep:
    return emulate("vlm-l", "dip-h800-64", _DEGREES, batch=samples, strategy="recompute", sub_microbatch=_TWELVE)


@contextmanager
def _without_reuse(counted: list[int]) -> Iterator[None]:
    """Evaluate and time every operator of every layer, pass, microbatch and tensor-parallel peer; count them."""

    def evaluate(template: LayerTemplate, workload: Workload) -> Any:
        operators = template._operators
        return operators.evaluate(np.array(feature_row(workload, operators.windows)))

    def cost(stage: Stage, workload: Workload, parts: Sequence[Any] | None = None) -> StageCost:
        chosen = stage.parts if parts is None else [part for part in parts if part in stage.parts]
        layers = [(run, run.layer.on(workload)) for run in stage.runs for _ in range(run.count)]
        duration = {}
        for part in chosen:
            leaves = [layer.leaves[run.strategy, part] for run, layer in layers if (run.strategy, part) in layer.leaves]
            peers = layers[0][0].layer.context.tensor
            counted[0] += peers * sum(len(leaf.device) for leaf in leaves)
            duration[part] = max(_pass_ps(leaves[:: 1 if part == "F" else -1]) for _ in range(peers))
        return StageCost(
            duration,
            sum(layer.activation_bytes[run.strategy] for run, layer in layers),
            sum(layer.weight_gradient_bytes[run.strategy] for run, layer in layers),
            sum(layer.host_bytes[run.strategy] for run, layer in layers),
        )

    chunk_costs, pair_costs = EmulatedCosts.chunk_costs, ChunkCosts.pair_costs

    def anew(costs: EmulatedCosts, chunk: Chunk, workload: Workload) -> Any:
        costs._known.clear()
        return chunk_costs(costs, chunk, workload)

    def one_by_one(costs: ChunkCosts, chunks: Sequence[int], *rest: Any) -> list[Any]:
        found = []
        for chunk in chunks:
            for known in (costs._costs, costs._pair_costs, costs._candidates):
                known.clear()
            found += pair_costs(costs, (chunk,), *rest)
        return found

    with ExitStack() as stack:
        for owner, name, other in (
            (LayerTemplate, "on", evaluate),
            (Stage, "cost", cost),
            (EmulatedCosts, "chunk_costs", anew),
            (ChunkCosts, "pair_costs", one_by_one),
        ):
            stack.enter_context(patch.object(owner, name, other))
        yield


def _pass_ps(leaves: Sequence[Any]) -> int:
    """Time the operators of a chain of layers on one idle device."""
    free, ready = np.zeros(NUM_DEVICES, np.int64), np.zeros(2, np.int64)
    for leaf in leaves:
        end = issue(leaf.device, leaf.predecessor_start, leaf.predecessor, leaf.duration_ps, free, ready)
        ready = np.array([ready[-1 - o] if o < 0 else end[o] for o in leaf.outputs.tolist()])
    return int(free.max())


def _speed() -> str:
    samples = _samples()
    steps = [_emulate(samples)]  # compiles the kernels

    def first() -> None:
        clear_template_cache()
        steps.append(_emulate(samples))

    whole = min(_cpu_s(first) for _ in range(5))
    known = min(_cpu_s(lambda: _emulate(samples)) for _ in range(3))
    step, counted = steps[-1], [0]
    with _without_reuse(counted):
        slow = _cpu_s(lambda: steps.append(_emulate(samples)))
    assert steps[-1].iteration_s == step.iteration_s
    saved = checkpoint(step.graph, step.schedule)
    again = min(_cpu_s(lambda: simulate(step.graph, step.schedule)) for _ in range(3))
    number = MICROBATCHES // 2
    longer = [_longer(sample) for sample in samples[number]]
    costs = EmulatedCosts("vlm-l", "dip-h800-64", _DEGREES, ("recompute",), split=False)
    model, usable = costs.model_spec, costs.cluster.device.usable_bytes
    found = []

    def change() -> None:
        packing = pack_microbatches(model, step.layout, [longer])
        one = build_graph(step.layout, packing, costs, capacity_bytes=usable)
        found.append(resume(saved, with_microbatch(step.graph, number, one)))

    replaced = _cpu_s(change)
    planned = EmulatedCosts("vlm-l", "dip-h800-64", _DEGREES)
    chunk = Chunk("lm", (0, 10), 0)
    planned.chunk_costs(chunk, Workload((8192,)))
    shapes = [Workload((n, 8192 - n)) for n in range(1000, 1400, 8)]
    shape = np.median([_cpu_s(partial(planned.chunk_costs, chunk, workload)) for workload in shapes])
    rows = [
        ["first emulation: tracing, shapes, graph, order, simulation", f"{whole * 1e3:.0f}", "1000"],
        ["repeated emulation, all layers known", f"{known * 1e3:.0f}", ""],
        ["simulating the same graph and order again", f"{again * 1e3:.2f}", ""],
        [f"emulation without reuse, {counted[0]:,} operators with their peers", f"{slow * 1e3:.0f}", ""],
        ["after one microbatch changed", f"{replaced * 1e3:.2f}", "10"],
        ["a new shape for the planner (4 strategies, 4 passes)", f"{shape * 1e3:.2f}", "1"],
    ]
    text = f"VLM-L, 8 ranks, {MICROBATCHES} different microbatches, {step.graph.num_tasks:,} tasks:\n\n"
    text += markdown_table(["measurement", "ms", "goal"], rows)
    return (
        f"{text}\n\n"
        f"Reuse makes the first emulation {slow / whole:.1f} times faster, and a repeated one {slow / known:.1f}. "
        "The factors compare processor times of one core. The first emulation traces all layers and computes all "
        "shapes, costs, the order of tasks and the timing; only the kernels are compiled before. Without reuse, every "
        "operator of every layer, pass, microbatch and tensor-parallel peer is evaluated and timed; layers are traced "
        f"once. After a change, {found[0].num_reused:,} tasks keep their times."
    )


def _longer(sample: Sample) -> Sample:
    """Return a sample with more text."""
    return Sample(sample.id, sample.text_tokens + 16, sample.image_tokens, sample.image_patches)


def _large() -> str:
    rows = []
    cases = (
        ("vlm-xl", "dip-h100-16k", Degrees(tensor=8, pipeline=16, data=128), 256, "0.36", "recompute"),
        ("vlm-xl", "dip-h100-16k", Degrees(tensor=8, pipeline=16, data=128), 256, "0.36", None),
        ("t2v-xl", "dip-h100-6k", Degrees(tensor=8, pipeline=8, data=96), 128, "0.39", "recompute"),
        ("t2v-xl", "dip-h100-6k", Degrees(tensor=8, pipeline=8, data=96), 128, "0.39", None),
    )
    for model, cluster, degrees, count, published, strategy in cases:
        found: list[EmulatedStep] = []

        def once(model=model, cluster=cluster, degrees=degrees, count=count, found=found, strategy=strategy) -> None:  # type: ignore[no-untyped-def]
            clear_template_cache()
            sizes = _TWELVE if model.startswith("vlm") else None
            found.append(emulate(model, cluster, degrees, batch=Draw(count), strategy=strategy, sub_microbatch=sizes))

        seconds = _cpu_s(once)
        rows.append(
            [
                f"{model} on {cluster}",
                f"{degrees.num_devices}",
                strategy or f"searched: {found[0].strategy}",
                f"{seconds:.2f}",
                f"{found[0].iteration_s:.1f}",
                f"{found[0].mfu:.3f}",
                published,
            ]
        )
    return (
        "Large clusters (DIP section 7.5). The order is the best of the planner's list schedules; DIP's figures are "
        "planned. *Searched* is the fastest of six memory strategies.\n\n"
        + markdown_table(
            ["model and cluster", "GPUs", "memory strategy", "emulation s", "iteration s", "MFU", "DIP's MFU"], rows
        )
    )


def _sweep() -> str:
    entries = []
    seconds = _cpu_s(lambda: entries.extend(sweep("vlm-m", "dip-h800-64", sub_microbatch=_TWELVE)))
    best = entries[0].iteration_s
    rows = []
    for entry in entries[:6]:
        d, r = entry.degrees, entry.result
        assert r is not None
        rows.append(
            [
                f"DP{d.data} TP{d.tensor} PP{d.pipeline}",
                f"{r.iteration_s:.2f}",
                f"{r.iteration_s / best - 1:+.1%}",
                f"{r.mfu:.3f}",
                r.strategy,
                f"{r.peak_bytes.max() / 1e9:.0f}",
            ]
        )
    return (
        f"Sweep of VLM-M on 64 H800 with 128 microbatches in all: {len(entries)} points in {seconds:.0f} "
        "s. The paper's best is DP8 TP2 PP4 with MFU 0.297. Sub-microbatches have twelve images, as in "
        "the paper:\n\n"
        + markdown_table(["degrees", "iteration s", "slower by", "MFU", "memory strategy", "peak GB"], rows)
    )


_MODELS = ("vlm-7b", "vlm-s", "vlm-m", "vlm-l")


def _sweeps() -> list[SweepEntry]:
    entries = []
    for model in _MODELS:
        for devices in (4, 8, 16, 32, 64, 128, 256):
            points = Points(num_devices=devices, strategies=("selective", "recompute"))
            entries += sweep(model, "dip-h100-16k", batch=Draw(32), points=points, sub_microbatch=_TWELVE)
    return entries


def _many() -> str:
    found: list[list[SweepEntry]] = []
    clear_template_cache()
    fast = _cpu_s(lambda: found.append(_sweeps()))
    clear_template_cache()
    counted = [0]
    with _without_reuse(counted):
        slow = _cpu_s(lambda: found.append(_sweeps()))
    times = [[each.iteration_s for each in entries] for entries in found]
    assert times[0] == times[1]
    run = sum(each.result is not None for each in found[0])
    return (
        f"Sweeps of {', '.join(_MODELS)} on 4 to 256 H100 with 32 microbatches and two memory strategies, "
        f"{len(found[0])} configurations, of "
        f"which {run} run: {fast:.0f} s with reuse, {slow:.0f} s without ({counted[0] / 1e6:.0f} million operators), "
        f"{slow / fast:.0f} times as long. All times are equal."
    )


def _calibration() -> str:
    found = calibrate("cpu")
    rows = [
        [row.name, f"{row.measured_s * 1e3:.2f}", f"{row.predicted_s * 1e3:.2f}", f"{row.error:+.1%}"]
        for row in found.layers
    ]
    return (
        "Calibration of one CPU thread. The layers below were not fitted. Their mean error is "
        f"{found.mean_layer_error:.1%}:\n\n"
        + markdown_table(["layer", "measured ms", "predicted ms", "error"], rows)
        + f"\n\n{found.links_note[:1].upper()}{found.links_note[1:]}: latency "
        f"{found.device.nvlink_latency_s * 1e6:.0f} us, {found.device.nvlink_bytes_per_s / 1e9:.1f} GB/s; mean error "
        f"{mean_error(found.links):.0%} on {len(found.links)} messages and collectives of sizes that were not fitted."
    )
