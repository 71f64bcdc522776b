"""End-to-end comparisons: Table 4, Fig. 8a, Fig. 8b, and the published searches."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import numpy as np

from pipeloom.planner.case import Groups
from pipeloom.planner.systems import fsdp_time
from pipeloom.report.figures import Axis, bar_figure, line_figure
from pipeloom.reproduce.dip import runs
from pipeloom.reproduce.dip.setups import SETUPS, Setup, device, gain, mean, seconds_text
from pipeloom.reproduce.part import Figure, Options, Outcome, Table
from pipeloom.spec import Sample


def figure_8a(options: Options) -> Outcome:
    """Five models on mixed data under every system."""
    names = [*runs.BASELINES, runs.PUBLISHED, runs.OURS_SAME, runs.OURS]
    batches = runs.iterations(options)
    rows, relative, notes = [], {name: list[float | None]() for name in names}, []
    paper = {"VLM": "15.6 to 76.2 % over three", "T2V": "36.6 to 97.3 % over two"}
    summary = []
    for label, setup in SETUPS.items():
        averages: dict[str, float | None] = {}
        for name in (name for name in names if runs.suits(name, setup)):
            found = runs.seconds_of(setup, name, batches, options.search_s)
            averages[name] = None if found is None else mean(found)
        ours = averages[runs.OURS]
        assert ours is not None
        for name in names:
            value = averages.get(name)
            relative[name].append(None if value is None else 1 / value * ours)
            if name in averages:
                against = "" if value is None or name == runs.OURS else gain(value, ours)
                rows.append((label, name, seconds_text(value), against))
        fitting = {n: v for n, v in averages.items() if n in runs.BASELINES and v is not None}
        best = min(fitting, key=lambda n: fitting[n])
        plain = averages[runs.MEGATRON]
        over = "out of memory" if plain is None else gain(plain, ours)
        published = averages[runs.PUBLISHED]
        summary.append(
            (label, setup.layouts[0].name, over, best, gain(fitting[best], ours),
             "" if published is None else gain(published, ours), paper[label[:3]])
        )  # fmt: skip
        notes.append(
            f"{label}: layout `{setup.layouts[0].name}`, of {len(setup.layouts)} tried on "
            f"{len(setup.typical)} other iterations; what each would have cost is in the part `layouts`."
        )
    bars = bar_figure(
        list(SETUPS),
        relative,
        y=Axis("throughput, ours = 1"),
        title="Throughput on mixed data, relative to ours",
    )
    return Outcome(
        (
            Table(
                "Gain of ours",
                ("model", "our layout", "over Megatron-LM interleaved by parameters", "best baseline",
                 "over the best baseline", "over DIP as published", "paper: DIP over its baselines"),
                tuple(summary),
                "All systems have the same costs, data and memory, and baselines get the best recomputation for every "
                "single iteration and the best number of chunks. The paper's Megatron-LM is one such setting of its "
                "users; balanced by parameters, ours computes stages of a ViT that attends over 2704 patches an image "
                "as slow as they are, hence gains beyond the paper's.",
            ),
            Table("Seconds of an iteration", ("model", "system", "seconds", "ours is faster by"), tuple(rows)),
        ),
        (Figure("figure-8a", "Throughput relative to ours (higher is better)", bars),),
        tuple(notes),
        device(*SETUPS.values()),
    )  # fmt: skip


def published_search(options: Options) -> Outcome:
    """DIP's two tree searches with ten times the time of ours, on DIP's own layout and with ours."""
    rows = []
    batches = runs.iterations(options, 1)
    searches = {
        runs.PUBLISHED: runs.MOST_SEARCH,
        runs.PRIORITY: runs.MOST_SEARCH,
        runs.OURS_SAME: 1,
        runs.OURS: 1,
    }
    for label, setup in SETUPS.items():
        found = {
            name: runs.all_timed(setup, name, batches, options.search_s * factor)
            for name, factor in searches.items()
        }
        means = {
            name: None if each is None else mean(one.seconds for one in each) for name, each in found.items()
        }
        for name, each in found.items():
            here = means[name]
            if each is None or here is None:
                rows.append((label, name, seconds_text(None), "", "", ""))
                continue
            same, ours = (
                "" if other is None else gain(here, other)
                for other in (means[runs.OURS_SAME], means[runs.OURS])
            )
            spent = mean(one.processor_s for one in each)
            rows.append((label, name, seconds_text(here), f"{spent:.1f}", same, ours))
    title = "Published searches with ten times the time"
    columns = (
        "model",
        "search",
        "iteration, s",
        "planning, CPU s",
        "ours on DIP's layout is faster by",
        "ours by",
    )
    note = (
        f"{len(options.seeds)} iterations a model. Planning counts everything: costs, graph, search, strategies, "
        "simulation and the checker."
    )
    return Outcome((Table(title, columns, tuple(rows), note),), devices=device(*SETUPS.values()))


def tried_layouts(_options: Options) -> Outcome:
    """What each layout that was tried would have cost."""
    tables = []
    for label, setup in SETUPS.items():
        tables.append(
            Table(
                f"{label}: sub-microbatch size and segments a module",
                ("layout", "planned, s", "lower bound, s"),
                tuple(
                    (
                        t.name,
                        "out of memory"
                        if t.problem
                        else f"over {t.seconds:.2f}"
                        if t.ruled_out
                        else f"{t.seconds:.2f}",
                        "" if t.problem else f"{t.bound_s:.2f}",
                    )
                    for t in setup.layouts
                ),
            )
        )
    note = (
        "The start is what the paper's rules give, with even ranks. `over`: lower bounds, or they and the plan of "
        "the first iteration, rule the layout out already. Means over two iterations that no other part times."
    )
    return Outcome(tuple(tables), notes=(note,), devices=device(*SETUPS.values()))


def table_4(options: Options) -> Outcome:
    """VLM-S on 16 H20: FSDP, Megatron-LM, DIP, ours."""
    setup = Setup("vlm-s", "dip-h20-16", 4, 4)
    case, batches = setup.case, runs.iterations(options)
    fsdp = [fsdp_time(case, setup.groups(*each), case.machine.num_devices) for each in batches]
    values: dict[str, float | None] = {"FSDP2, ZeRO-3": mean(seconds for seconds, _ in fsdp)}
    for name in (runs.MEGATRON, runs.MEGATRON_EVEN, runs.PUBLISHED, runs.OURS):
        found = runs.seconds_of(setup, name, batches, options.search_s)
        values[name] = None if found is None else mean(found)
    paper = {
        "FSDP2, ZeRO-3": ("40.270", "1.03"),
        runs.MEGATRON: ("39.053", "1.00"),
        runs.PUBLISHED: ("28.606", "0.73"),
    }
    base = values[runs.MEGATRON]
    assert base is not None
    rows = tuple(
        (name, seconds_text(v), "" if v is None else f"{v / base:.2f}", *paper.get(name, ("", "")))
        for name, v in values.items()
    )
    used = ", ".join(dict.fromkeys(strategy for _, strategy in fsdp))
    note = (
        f"FSDP: microbatches dealt to {case.machine.num_devices} replicas in turn, tensor parallelism 1, weights "
        f"gathered a layer ahead, strategy {used}; every module waits for the slowest replica. H20 has little compute "
        "for its network, so FSDP hides its traffic. The paper's microbatches, their number and its recomputation are "
        "not stated, so seconds differ; the order of the systems is what can be compared."
    )
    columns = ("system", "seconds", "relative", "paper: seconds", "paper: relative")
    return Outcome((Table("VLM-S on 16 H20", columns, rows, note),), devices=device(setup))


def figure_8b(options: Options) -> Outcome:
    """Forty iterations in which the number of images rises and falls twice."""
    setup = SETUPS["VLM-S"]
    names = (runs.MEGATRON, runs.NNSCALER, runs.OPTIMUS, runs.NO_SEARCH, runs.PUBLISHED, runs.OURS)
    systems = {name: runs.system(setup, name) for name in names}
    search_s = options.search_s / 2
    length = 20
    images, series = [], {name: list[float]() for name in names}
    worst = dict.fromkeys(names, 0.0)
    for i in range(2 * length):
        low, high = image_bounds(i % length)
        groups = bounded_microbatches(setup.num_microbatches, low, high, 777 + i)
        images.append(sum(len(s.image_tokens) for g in groups for s in g) / len(groups))
        for name, one in systems.items():
            found = runs.run(one, groups, search_s, i)
            series[name].append(float("nan") if found is None else found.iteration_s)
        for name in names:
            worst[name] = max(worst[name], series[name][-1] / series[runs.OURS][-1] - 1)
    x = [float(i + 1) for i in range(2 * length)]
    figure = line_figure(
        {name: (x, values) for name, values in series.items()},
        x=Axis("iteration"), y=Axis("iteration time, s", low=0.0), title="VLM-S, image counts rising and falling",
    )  # fmt: skip
    rising = slice(0, 10)
    falling = slice(14, 20)
    paper = {
        runs.MEGATRON: "52.9 % (iteration 6)",
        runs.NNSCALER: "10.4 %, later 50.5 %",
        runs.OPTIMUS: "10.4 %",
    }
    rows = tuple(
        (
            name,
            *(f"{_mean_of_fitting(series[name][part]):.2f}" for part in (slice(None), rising, falling)),
            f"{worst[name] * 100:.1f} %",
            paper.get(name, ""),
        ) for name in names
    )  # fmt: skip
    peak = max(range(length), key=lambda i: images[i])
    return Outcome(
        (
            Table(
                "VLM-S over 40 iterations, seconds",
                (
                    "system",
                    "all",
                    "iterations 1-10",
                    "iterations 15-20",
                    "most behind ours",
                    "paper: behind DIP",
                ),
                rows,
                "Layouts are those chosen on mixed data and stay. Bounds on images a microbatch: the lower one rises "
                "from 0 to 16 under an upper one of 32 (iterations 1 to 5), then both fall to 0 (6 to 20). "
                f"{search_s:g} s of search an iteration.",
            ),
        ),
        (Figure("figure-8b", "Iteration time under changing data", figure),),
        (
            f"Most images: {images[peak]:.0f} a microbatch on average in iteration {peak + 1} (paper: 22 in its peak).",
            *(
                f"{name} does not fit into memory in iteration {', '.join(lacking)}, and its means are of the others."
                for name, values in series.items()
                if (lacking := [str(i + 1) for i, value in enumerate(values) if isnan(value)])
            ),
        ),
        device(setup),
    )


def _mean_of_fitting(values: Sequence[float]) -> float:
    fitting = [value for value in values if not isnan(value)]
    return mean(fitting) if fitting else float("nan")


def image_bounds(i: int) -> tuple[int, int]:
    """Least and most images of a microbatch in iteration ``i`` of 20 (`dip.txt` §7.2)."""
    if i < 5:
        return round(16 * i / 4), 32
    share = (19 - i) / 14
    return round(16 * share), round(32 * share)


def bounded_microbatches(count: int, low: int, high: int, seed: int) -> Groups:
    """Microbatches of 8192 tokens with an even draw of ``low`` to ``high`` images each, the rest text."""
    generator = np.random.default_rng(seed)
    groups = []
    for m in range(count):
        images = int(generator.integers(low, high + 1))
        documents = max(1, min(8, images))
        shares = [images // documents + (k < images % documents) for k in range(documents)]
        text = 8192 - 169 * images
        cuts = [text // documents + (k < text % documents) for k in range(documents)]
        groups.append([Sample(f"{m}.{k}", cuts[k], (169,) * n, (2704,) * n) for k, n in enumerate(shares)])
    return groups
