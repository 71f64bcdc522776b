"""Data, balance, tuning time, and what one layer takes: Figs. 5, 8 and 10."""

from __future__ import annotations

import time

import numpy as np

from pipeloom.packing import PackingSpec, Policy, group, height_bound
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.datasets import draw_samples
from pipeloom.tuning import TuningSpec, batch_sizes, compile_kernels, tune
from pipeloom_lab.figures import Axis, line_figure
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome
from pipeloom_lab.reproduce.pipetune import setups
from pipeloom_lab.reproduce.texts import make_table

_DRAWN = 20_000
_THEIRS = "PipeTune's way"


def figure_5(options: Options) -> Outcome:
    """Sequence lengths of the three mixtures."""
    rows, lines = [], {}
    edges = np.geomspace(8, 16384, 45)
    for mixture in setups.MIXTURES:
        samples = draw_samples(mixture, _DRAWN, options.seeds[0])
        lengths = np.array([sample.sequence_tokens for sample in samples])
        share, _ = np.histogram(np.clip(lengths, edges[0], edges[-1]), edges)
        lines[setups.NAMES[mixture]] = (np.sqrt(edges[1:] * edges[:-1]).tolist(), (100 * share / _DRAWN).tolist())
        images = np.mean([len(sample.image_tokens) for sample in samples])
        quantiles = np.quantile(lengths, (0.5, 0.99)).astype(int)
        rows.append(
            (
                setups.NAMES[mixture],
                f"{lengths.mean():.0f}",
                *(str(q) for q in quantiles),
                f"{lengths.std():.0f}",
                f"{images:.2f}",
                f"{(lengths > setups.ON_A['13b'].context).mean():.2%}",
            )
        )
    figure = Figure(
        "figure-5",
        "Share of the samples by length",
        line_figure(lines, x=Axis("tokens of a sample", log=True), y=Axis("per cent", low=0), style="plain"),
    )
    return Outcome((make_table("pipetune/figure-5", rows),), (figure,))


def figure_8(options: Options) -> Outcome:
    """Tuning time over the global batch size."""
    setup = setups.ON_A["13b"]
    setting = setups.emulated(setup)
    compile_kernels()
    sizes = [128, 256, 512, 1024, 4096, 16384]
    paper = {128: "below 0.2 s", 1024: "below 1.5 s"}
    repeats = max(3, min(options.iterations, 10))
    rows = []
    lines = {name: Line([], []) for name in ("ours", _THEIRS)}
    for size in sizes:
        times: dict[str, list[float]] = {}
        for k in range(repeats if size <= 1024 else 3):
            batch = setups.batch_of(setup, "datamix2", options.seeds[0] * 10_000 + k, size)
            for name, spec in (("ours", TuningSpec()), (_THEIRS, setups.steps_of(setup)[setups.PIPETUNE])):
                if name != "ours" and size > 1024:
                    continue
                begin = time.thread_time()
                tune(setting.pipeline, batch, setting.token_budget, spec, k)
                times.setdefault(name, []).append(1000 * (time.thread_time() - begin))
        cells = {name: float(np.median(values)) for name, values in times.items()}
        for name, value in cells.items():
            lines[name].add(size, value)
        theirs = f"{cells[_THEIRS]:.1f}" if _THEIRS in cells else ""
        rows.append(
            (str(size), f"{cells['ours']:.1f}", f"{1000 * cells['ours'] / size:.0f}", theirs, paper.get(size, ""))
        )
    svg = line_figure(lines, x=Axis("samples of a global batch", log=True), y=Axis("milliseconds", log=True))
    figure = Figure("figure-8", "Tuning time", svg)
    return Outcome((make_table("pipetune/figure-8", rows),), (figure,), devices=(setting.device,))


def figure_10(options: Options) -> Outcome:
    """One LLaMA-7B layer with tensor parallelism 4: time, and time per token, by length."""
    del options
    setup = setups.ON_A["7b"]
    setting = setups.emulated(setup)
    chunk = Chunk("lm", (1, 1), 0)
    lengths = [2**k for k in range(6, 15)]
    costs = [setting.costs.chunk_costs(chunk, Workload((n,)))[0] for n in lengths]
    total = [1e3 * (cost.forward_s + cost.backward_s) for cost in costs]
    each = [1e3 * ms / n for ms, n in zip(total, lengths, strict=True)]
    table = tuple((str(n), f"{ms:.3f}", f"{us:.3f}") for n, ms, us in zip(lengths, total, each, strict=True))
    svg = line_figure({"per token": (lengths, each)}, x=Axis("tokens", log=True), y=Axis("us a token", log=True))
    return Outcome(
        (make_table("pipetune/figure-10", table),),
        (Figure("figure-10", "Time per token", svg),),
        devices=(setting.device,),
    )


def packing(options: Options) -> Outcome:
    """Packing by itself: how far the heaviest microbatch is above the lower bound."""
    setup = setups.ON_A["13b"]
    setting = setups.emulated(setup)
    policies: tuple[Policy, ...] = ("random", "algorithm1", "algorithm1_opened", "balanced")
    rows = []
    for mixture in setups.MIXTURES:
        for contexts in (1, 2, 4):
            gaps: dict[str, list[float]] = {}
            for seed, batch in setups.batches(setup, mixture, options):
                loads = batch_sizes(setting.pipeline, batch).loads
                for policy in policies:
                    spec = PackingSpec(contexts * setup.context, policy, seed=seed)
                    groups = group(loads, spec, batch.iteration)
                    heaviest = max(float(loads.backbone[list(members)].sum()) for members in groups)
                    gaps.setdefault(policy, []).append(heaviest / height_bound(loads.backbone, len(groups)) - 1)
            cells = (f"{100 * float(np.mean(gaps[p])):.2f} / {100 * max(gaps[p]):.2f} %" for p in policies)
            rows.append((setups.NAMES[mixture], str(contexts), *cells))
    return Outcome((make_table("pipetune/packing", rows),), devices=(setting.device,))
