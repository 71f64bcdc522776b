"""Why the problem is there: Table 1, section 2.2, Fig. 4."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeloom.compare.baseline import by_time, fixed_system, mfu
from pipeloom.compare.baselines.megatron import megatron_1f1b
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, draw_iteration, model_flops, put_on_cluster
from pipeloom.cost import StrategyCost
from pipeloom.layout import chain_of_stages
from pipeloom.search import Budget, one_f_one_b
from pipeloom.spec import Chunk
from pipeloom.spec.batch import Sample, Workload
from pipeloom.spec.datasets import draw_samples
from pipeloom.spec.parallelism import Degrees
from pipeloom_lab.figures import Axis, line_figure, panel_figure
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import SETUPS, bounded_microbatches, device, device_text, images_of, mean
from pipeloom_lab.reproduce.part import Figure, Options, Outcome
from pipeloom_lab.reproduce.texts import make_table

LM_MICROBATCHES = 36
"""Of 8192 tokens for the language model; the others get as many as have its operations."""


def models_of_table_1() -> tuple[ModelOnCluster, Microbatches, ModelOnCluster]:
    """Return a language model, its microbatches, and a vision-language model, on 8 H800."""
    degrees = Degrees(tensor=2, pipeline=4)
    language, both = (put_on_cluster(name, "dip-h800-64", degrees) for name in ("llama2-7b", "vlm-7b"))
    return language, [[Sample(f"{m}", 8192)] for m in range(LM_MICROBATCHES)], both


def table_1(options: Options) -> Outcome:
    """A language model against a vision-language model with static and dynamic data, equal operations."""
    language, texts, both = models_of_table_1()
    target = model_flops(language, texts)
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    counts = []
    for seed in options.seeds:
        drawn = up_to(both, draw_iteration(both, 3 * LM_MICROBATCHES, 10_000 * (1 + seed)), target)
        counts.append(images_of(drawn))
        images = round(counts[-1])
        static = _bounded(both, images, images, seed, target)
        for name, setting, groups in (
            ("LM 7B", language, texts),
            (f"ViT 2B + LM 5B, static data ({images} images each)", both, static),
            ("ViT 2B + LM 5B, dynamic data", both, drawn),
            ("ViT 2B + LM 5B, static data, 2 images a microbatch", both, _bounded(both, 2, 2, seed, target)),
            ("ViT 2B + LM 5B, dynamic data, 0 to 8 images", both, _bounded(both, 0, 8, seed, target)),
        ):
            found = runs.run(megatron_1f1b(setting, [groups]), groups, Budget(evaluations=1), seed)
            even = runs.run(megatron_1f1b(setting, [groups], "time"), groups, Budget(evaluations=1), seed)
            assert found is not None, name
            assert even is not None, name
            label = name.split(" (")[0]
            flops = model_flops(setting, groups)
            rows.setdefault(label, []).append(
                (found.iteration_s, flops, mfu(setting, groups, setting.iteration_s(found)), even.iteration_s)
            )
    static_paper, dynamic_paper = ("4.567", "0.351", "12.5 %"), ("6.789", "0.239", "40.3 %")
    paper = (("4.068", "0.400", ""), static_paper, dynamic_paper, static_paper, dynamic_paper)
    base = mean(s / f for s, f, *_ in rows["LM 7B"])
    table = []
    for (name, values), (paper_s, paper_mfu, paper_over) in zip(rows.items(), paper, strict=True):
        per_flop = mean(s / f for s, f, *_ in values)
        lost = 1 - base / per_flop
        cut = 1 - mean(e / f for _, f, _, e in rows["LM 7B"]) / mean(e / f for _, f, _, e in values)
        table.append(
            (
                name,
                f"{mean(s for s, *_ in values):.3f}",
                f"{mean(f for _, f, *_ in values) / 1e15:.1f}",
                f"{mean(u for _, _, u, _ in values):.3f}",
                f"{lost * 100:.1f} %",
                f"{cut * 100:.1f} %",
                paper_s,
                paper_mfu,
                paper_over,
            )
        )
    return Outcome((make_table("dip/table-1", table, mean=mean(counts)),), devices=(device_text(both),))


def _bounded(setting: ModelOnCluster, low: int, high: int, seed: int, flops: float) -> Microbatches:
    return up_to(setting, bounded_microbatches(3 * LM_MICROBATCHES, low, high, seed), flops)


def up_to(setting: ModelOnCluster, groups: Microbatches, flops: float) -> Microbatches:
    """As many of the microbatches as together have about so many operations."""
    each = [model_flops(setting, [group]) for group in groups]
    total = np.cumsum(each)
    return groups[: int(np.argmin(abs(total - flops))) + 1]


def section_2_2(_options: Options) -> Outcome:
    """Even the best cut of a ViT and a language model leaves stages uneven (16.7 %, 22.8 %)."""
    setting = put_on_cluster("vlm-m", "adaptis-h800-128", Degrees(tensor=8, pipeline=16), update=False)
    groups = bounded_microbatches(64, 8, 8, 0)
    layout = chain_of_stages(setting.model, setting.num_ranks, 1, by_time(setting, [groups]))
    one = fixed_system("1F1B by time", setting, layout, one_f_one_b)
    found = runs.run(one, groups, Budget(evaluations=1), 0)
    assert found is not None
    stage = [0.0] * setting.num_ranks
    for task in range(found.graph.num_tasks):
        if found.graph.microbatch[task] == 0:
            stage[int(found.graph.rank[task])] += float(found.timeline.end_ns[task] - found.timeline.start_ns[task])
    vision = setting.costs.chunk_costs(Chunk("vision", (1, 1), 0), Workload((2704,) * 8))[0]
    language = setting.costs.chunk_costs(Chunk("lm", (1, 1), 0), Workload((8192,)))[0]
    count, ranks = len(groups), setting.num_ranks
    even = (count + ranks - 1) * mean(stage)
    idle = 1 - count * sum(stage) / (ranks * found.timeline.makespan_ns)
    rows = (
        ("layer of the ViT, 8 images, ms", f"{_ms(vision):.2f}", "6.75"),
        ("layer of the language model, 8192 tokens, ms", f"{_ms(language):.2f}", "10.5"),
        ("fastest stage, ms", f"{min(stage) / 1e6:.1f}", "63"),
        ("slowest stage, ms", f"{max(stage) / 1e6:.1f}", "73.5"),
        ("variation", f"{(max(stage) / min(stage) - 1) * 100:.1f} %", "16.7 %"),
        ("idle share of all ranks under 1F1B", f"{idle * 100:.1f} %", "22.8 % more bubbles"),
        ("1F1B slower than with even stages by", f"{(found.timeline.makespan_ns / even - 1) * 100:.1f} %", ""),
    )
    table = make_table("dip/section-2-2", rows)
    return Outcome((table,), devices=(device_text(setting),))


def _ms(cost: StrategyCost) -> float:
    return (cost.forward_s + cost.backward_s) * 1e3


def figure_4(options: Options) -> Outcome:
    """How data differ: tokens per image and second, and the work of 100 packed batches."""
    draws, seed = 20_000, options.seeds[0]
    edges = np.geomspace(0.3, 4000, 41)
    middle = np.sqrt(edges[1:] * edges[:-1]).tolist()
    panels: dict[str, dict[str, tuple[list[float], list[float]]]]
    panels = {"text tokens per image": {}, "text tokens per second": {}}
    ratios = []
    for name in ("obelics", "laion-2b", "scienceqa"):
        ratio = [s.text_tokens / len(s.image_tokens) for s in draw_samples(name, draws, seed) if s.image_tokens]
        ratios.append((name, "image", *_spread(ratio)))
        panels["text tokens per image"][name] = middle, (np.histogram(ratio, edges)[0] / len(ratio)).tolist()
    for name in ("sharegpt4video", "internvid", "mmtrail-2m"):
        ratio = [s.text_tokens / s.video_seconds[0] for s in draw_samples(name, draws, seed) if s.video_seconds]
        ratios.append((name, "second", *_spread(ratio)))
        panels["text tokens per second"][name] = middle, (np.histogram(ratio, edges)[0] / len(ratio)).tolist()
    shares = panel_figure(panels, x=Axis("tokens", log=True), y=Axis("share of samples"), columns=2, style="plain")
    rows, lines, spread = [], {}, dict[str, float]()
    for label, paper in (("VLM-S", ""), ("T2V-S", "4.15")):
        setting = SETUPS[label].setting
        spreads = []
        for each in options.seeds:
            flops = sorted(model_flops(setting, [group]) / 1e12 for group in draw_iteration(setting, 100, each))
            spreads.append(flops[-1] / flops[0])
            if each == seed:
                lines[label] = [float(i + 1) for i in range(100)], flops
        spread[label] = mean(spreads)
        rows.append(
            (
                label,
                f"{lines[label][1][0]:.0f}",
                f"{lines[label][1][-1]:.0f}",
                f"{spreads[0]:.2f}",
                f"{mean(spreads):.2f}",
                paper,
            )
        )
    reached = "" if spread["T2V-S"] > 4.0 else " The paper's spread of T2V is not reproduced: it is narrower here."
    work = line_figure(
        lines, x=Axis("batch, by work"), y=Axis("TFLOPs", low=0.0), title="100 packed batches", style="plain"
    )
    drawn = make_table("dip/figure-4-tokens", ratios, draws=draws)
    return Outcome(
        (make_table("dip/figure-4-work", rows, reached=reached), drawn),
        (
            Figure("figure-4ab", "Tokens per image and per second", shares),
            Figure("figure-4cd", "Work of batches", work),
        ),
        devices=device(*(SETUPS[label] for label in ("VLM-S", "T2V-S"))),
    )


def _spread(values: Sequence[float]) -> tuple[str, str, str]:
    return f"{min(values):.1f}", f"{mean(values):.1f}", f"{max(values):.0f}"
