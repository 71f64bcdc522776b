"""End-to-end comparisons: Table 4, Fig. 8a, Fig. 8b."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeloom.planner.case import Groups
from pipeloom.planner.comparison import SYSTEMS, TITLES
from pipeloom.planner.systems import (
    System,
    dip_layout,
    fsdp_time,
    searched_system,
    unadaptive_system,
)
from pipeloom.report.figures import Axis, bar_figure, line_figure
from pipeloom.reproduce.dip.setups import (
    SETUPS,
    Setup,
    case_of,
    device,
    gain,
    iterations,
    layouts,
    lazily,
    mean,
    seconds_text,
    timed,
    typical,
)
from pipeloom.reproduce.part import Figure, Options, Outcome, Table

MEGATRON = TITLES["interleaved"]
OURS, OURS_SAME = TITLES["pipeloom"], TITLES["pipeloom-dip-layout"]
PUBLISHED, PRIORITY = TITLES["dip"], TITLES["dip-priority"]
OPTIMUS = TITLES["optimus"]
BASELINES = tuple(TITLES.values())[:6]
_KEYS = {title: name for name, title in TITLES.items()}


def system(setup: Setup, name: str) -> System:
    """A system by name, with its layout chosen on the typical iterations."""
    case = case_of(setup)
    if name == OURS:
        return searched_system(OURS, case, layouts(setup)[0].layout)
    return SYSTEMS[_KEYS[name]](case, typical(setup))


def times_of(setup: Setup, names: Sequence[str], options: Options) -> dict[str, list[float] | None]:
    """Seconds of every iteration under every system; None: one of them does not fit."""
    systems = lazily(names, lambda name: system(setup, name))
    out: dict[str, list[float] | None] = {}
    for name, one in systems.items():
        values: list[float] = []
        for seed, groups in iterations(setup, options):
            found = None if one is None else timed(one, groups, options.search_s, seed)
            if found is None:
                values.clear()
                break
            values.append(found.iteration_s)
        out[name] = values or None
    return out


def figure_8a(options: Options) -> Outcome:
    """Five models on mixed data under every system."""
    names = [*BASELINES, PUBLISHED, OURS_SAME, OURS]
    rows, relative, notes = [], {name: list[float | None]() for name in names}, []
    paper = {"VLM": "15.6 to 76.2 % over three", "T2V": "36.6 to 97.3 % over two"}
    summary = []
    for label, setup in SETUPS.items():
        found = times_of(setup, [n for n in names if not (label.startswith("T2V") and n == OPTIMUS)], options)
        averages = {name: None if values is None else mean(values) for name, values in found.items()}
        ours = averages[OURS]
        assert ours is not None
        for name in names:
            value = averages.get(name)
            relative[name].append(None if value is None else 1 / value * ours)
            if name in averages:
                against = "" if value is None or name == OURS else gain(value, ours)
                rows.append((label, name, seconds_text(value), against))
        fitting = {n: v for n, v in averages.items() if n in BASELINES and v is not None}
        best = min(fitting, key=lambda n: fitting[n])
        plain = averages[MEGATRON]
        over = "out of memory" if plain is None else gain(plain, ours)
        published = averages[PUBLISHED]
        summary.append(
            (label, layouts(setup)[0].name, over, best, gain(fitting[best], ours),
             "" if published is None else gain(published, ours), paper[label[:3]])
        )  # fmt: skip
        notes.append(
            f"{label}: layout `{layouts(setup)[0].name}`, of {len(layouts(setup))} tried on "
            f"{len(typical(setup))} other iterations; what each would have cost is in the part `layouts`."
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
    for label, setup in SETUPS.items():
        batches = iterations(setup, options, 1)
        values: dict[str, list[float]] = {}
        spent: dict[str, list[float]] = {}
        for name, factor in ((PUBLISHED, 10), (PRIORITY, 10), (OURS_SAME, 1), (OURS, 1)):
            one = system(setup, name)
            for seed, groups in batches:
                begin = time.process_time()
                found = timed(one, groups, options.search_s * factor, seed)
                spent.setdefault(name, []).append(time.process_time() - begin)
                if found is not None:
                    values.setdefault(name, []).append(found.iteration_s)
        ours, same = mean(values[OURS]), mean(values[OURS_SAME])
        for name in (PUBLISHED, PRIORITY, OURS_SAME, OURS):
            here = mean(values[name]) if name in values else None
            rows.append(
                (label, name, seconds_text(here), f"{mean(spent[name]):.1f}",
                 "" if here is None else gain(here, same), "" if here is None else gain(here, ours))
            )  # fmt: skip
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
                        else f"over {t.bound_s:.2f}"
                        if t.ruled_out
                        else f"{t.seconds:.2f}",
                        "" if t.problem else f"{t.bound_s:.2f}",
                    )
                    for t in layouts(setup)
                ),
            )
        )
    note = "The paper's rules give the first; `over` means that the lower bound rules the layout out already."
    return Outcome(tuple(tables), notes=(note,), devices=device(*SETUPS.values()))


def table_4(options: Options) -> Outcome:
    """VLM-S on 16 H20: FSDP, Megatron-LM, DIP, ours."""
    setup = Setup("vlm-s", "dip-h20-16", 4, 4)
    case = case_of(setup)
    batches = [groups for _, groups in iterations(setup, options)]
    fsdp = [fsdp_time(case, groups, case.machine.num_devices) for groups in batches]
    values: dict[str, float | None] = {"FSDP2, ZeRO-3": mean(seconds for seconds, _ in fsdp)}
    found = times_of(setup, (MEGATRON, TITLES["interleaved-time"], PUBLISHED, OURS), options)
    values |= {name: None if v is None else mean(v) for name, v in found.items()}
    paper = {"FSDP2, ZeRO-3": ("40.270", "1.03"), MEGATRON: ("39.053", "1.00"), PUBLISHED: ("28.606", "0.73")}
    base = values[MEGATRON]
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
    case = case_of(setup)
    names = (MEGATRON, "nnScaler*", OPTIMUS, "DIP, no search", PUBLISHED, OURS)
    plain = unadaptive_system("DIP, no search", case, dip_layout(case, typical(setup)), "first in, first out")
    systems = {n: plain if n == "DIP, no search" else system(setup, n) for n in names}
    length = 20
    images, series = [], {name: list[float]() for name in names}
    worst = dict.fromkeys(names, 0.0)
    for i in range(2 * length):
        low, high = image_bounds(i % length)
        groups = bounded_microbatches(setup.num_microbatches, low, high, 777 + i)
        images.append(sum(len(s.image_tokens) for g in groups for s in g) / len(groups))
        for name, one in systems.items():
            found = timed(one, groups, options.search_s, i)
            series[name].append(float("nan") if found is None else found.iteration_s)
        for name in names:
            worst[name] = max(worst[name], series[name][-1] / series[OURS][-1] - 1)
    x = [float(i + 1) for i in range(2 * length)]
    figure = line_figure(
        {name: (x, values) for name, values in series.items()},
        x=Axis("iteration"), y=Axis("iteration time, s", low=0.0), title="VLM-S, image counts rising and falling",
    )  # fmt: skip
    rising = slice(0, 10)
    falling = slice(14, 20)
    paper = {
        MEGATRON: "52.9 % (iteration 6)",
        "nnScaler*": "10.4 %, later 50.5 %",
        OPTIMUS: "10.4 %",
    }
    rows = tuple(
        (
            name,
            *(f"{mean(series[name][part]):.2f}" for part in (slice(None), rising, falling)),
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
                "from 0 to 16 under an upper one of 32 (iterations 1 to 5), then both fall to 0 (6 to 20).",
            ),
        ),
        (Figure("figure-8b", "Iteration time under changing data", figure),),
        (
            f"Most images: {images[peak]:.0f} a microbatch on average in iteration {peak + 1} (paper: 22 in its peak).",
        ),
        device(setup),
    )


def image_bounds(i: int) -> tuple[int, int]:
    """Least and most images of a microbatch in iteration ``i`` of 20 (`dip.txt` §7.2)."""
    if i < 5:
        return round(16 * i / 4), 32
    share = (19 - i) / 14
    return round(16 * share), round(32 * share)


def bounded_microbatches(count: int, low: int, high: int, seed: int) -> Groups:
    """Microbatches of 8192 tokens with an even draw of ``low`` to ``high`` images each, the rest text."""
    import numpy as np

    from pipeloom.spec import Sample

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
