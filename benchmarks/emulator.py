"""Emulator: the numbers that it has to reach, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.build import Placement, clear_template_cache, layer_template
from pipeloom.emulator.expand import expand
from pipeloom.emulator.fit import mean_error
from pipeloom.emulator.kernels import issue
from pipeloom.emulator.pipeline import PipelineModel, Work, work_of
from pipeloom.emulator.result import EmulatedStep
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.step import Step
from pipeloom.emulator.sweep import Draw, draw_microbatches, emulate, sweep
from pipeloom.report import markdown_table
from pipeloom.runtime.measure.microbench import calibrate
from pipeloom.spec import Chunk, Sample, Workload
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.parallelism import Degrees

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
    return "\n\n".join([_layers(), _speed(), _large(), _sweep(), _calibration()])


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


def _iteration(samples: list[list[Sample]]) -> tuple[PipelineModel, list[Work]]:
    architecture = load_architecture("vlm-l")
    works: list[Work] = [work_of(architecture, group, _TWELVE) for group in samples]
    placement = Placement(load_cluster("dip-h800-64"), Degrees(tensor=8, pipeline=8))
    return PipelineModel(architecture, placement, works[0]), works


def _without_reuse(step: Step) -> float:
    """Emulate an iteration operator by operator, and check that nothing changes; seconds."""
    begin = time.process_time()
    flat = expand(step.session.as_subgraph())
    state = np.zeros(flat.num_devices, np.int64)
    issue(flat.device, flat.predecessor_start, flat.predecessor, flat.duration_ps, state, np.zeros(1, np.int64))
    seconds = time.process_time() - begin
    assert (state[: step.session.num_devices] == step.session.run()).all()
    return seconds


def _speed() -> str:
    samples = _samples()
    steps: list[Step] = []
    Step(*_iteration(samples), "recompute", in_flight=24).run()  # compile the kernels

    def emulate_all() -> None:
        steps.append(Step(*_iteration(samples), "recompute", in_flight=24))
        steps[-1].run()

    times = []
    for _ in range(5):
        clear_template_cache()
        times.append(_cpu_s(emulate_all))
    whole = min(times)
    step = steps[-1]

    def again() -> None:
        step.session._clean = 0  # the same calls once more, from the first
        step.session.run()

    reused = min(_cpu_s(again) for _ in range(3))
    slow = _without_reuse(step)
    number = MICROBATCHES // 2
    change = {
        name: tuple(Workload((*w.lengths[1:], w.lengths[0] + 16)) for w in parts)
        for name, parts in step.microbatches[number].items()
    }

    def replace() -> None:
        step.replace_microbatch(number, change)
        step.session.run()

    replaced = _cpu_s(replace)
    costs = EmulatedCosts("vlm-l", "dip-h800-64", Degrees(tensor=8, pipeline=8))
    chunk = Chunk("lm", (0, 10), 0)
    costs.chunk_costs(chunk, Workload((8192,)))
    shapes = [Workload((n, 8192 - n)) for n in range(1000, 1400, 8)]
    shape = np.median([_cpu_s(partial(costs.chunk_costs, chunk, workload)) for workload in shapes])
    rows = [
        ["first emulation: tracing, shapes, schedule, timing", f"{whole * 1e3:.0f}", "1000"],
        ["repeated emulation, all subgraphs known", f"{reused * 1e3:.2f}", ""],
        [f"emulation without reuse, {step.num_operators:,} operators with their peers", f"{slow * 1e3:.0f}", ""],
        ["after one microbatch changed", f"{replaced * 1e3:.2f}", "10"],
        ["a new shape for the planner (4 strategies, 4 passes)", f"{shape * 1e3:.2f}", "1"],
    ]
    text = f"VLM-L, 8 ranks, {MICROBATCHES} different microbatches, {len(step.session.calls):,} subgraph calls:\n\n"
    text += markdown_table(["measurement", "ms", "goal"], rows)
    return (
        f"{text}\n\n"
        f"Reuse makes the first emulation {slow / whole:.0f} times faster and a repeated one {slow / reused:.0f} "
        "times. The factors compare processor times of one core. The first emulation traces all layers "
        "and computes all shapes, costs, the order of tasks and the timing; only the kernels are compiled "
        "before. Without reuse, every operator of every pass is written out and timed. Operator durations "
        "and the order are known there, so the factors are lower bounds."
    )


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
            found.append(emulate(model, cluster, degrees, batch=Draw(count), strategy=strategy, sub_microbatch=_TWELVE))

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
        "Large clusters (DIP section 7.5). The emulator uses its own static order; DIP's figures are "
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
                f"{max(r.peak_bytes) / 1e9:.0f}",
            ]
        )
    return (
        f"Sweep of VLM-M on 64 H800 with 128 microbatches in all: {len(entries)} points in {seconds:.0f} "
        "s. The paper's best is DP8 TP2 PP4 with MFU 0.297. Sub-microbatches have twelve images, as in "
        "the paper:\n\n"
        + markdown_table(["degrees", "iteration s", "slower by", "MFU", "memory strategy", "peak GB"], rows)
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
