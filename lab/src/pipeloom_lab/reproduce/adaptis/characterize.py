"""Why anything is to be tuned: Fig. 1 (bubbles), Fig. 3 (three steps), Fig. 4 (how many cases there are)."""

from __future__ import annotations

from math import comb, factorial, log10

from pipeloom.report import make_track, timeline_svg
from pipeloom_lab.figures import Axis, bar_figure, panel_figure
from pipeloom_lab.reproduce.adaptis import setups
from pipeloom_lab.reproduce.part import Figure, Options, Outcome
from pipeloom_lab.reproduce.texts import make_table

_FIGURE_1 = {
    "LLaMA-2": ("llama2-7b", (18.0, 2.7, 11.5, 6.8)),
    "Gemma": ("gemma-small", (36.2, 30.3, 34.9, 20.7)),
    "DeepSeek": ("deepseek-medium", (44.7, 39.5, 43.8, 25.6)),
    "Nemotron-H": ("nemotron-h-small", (47.9, 51.1, 47.2, 41.5)),
}


def figure_1(options: Options) -> Outcome:
    """Bubble ratios of the published systems, and of ours."""
    bars: dict[str, list[float]] = {name: [] for name in (*setups.BASELINES, setups.GENERATOR, "ours")}
    table: list[tuple[str, ...]] = []
    for family, (model, paper) in _FIGURE_1.items():
        setup = setups.PaperSetup(model, 4, 2, 16, 4096)
        cells = [family]
        for (name, system), theirs in zip(setups.BASELINES.items(), paper, strict=True):
            share = 100 * setups.bubble_share(setups.run_baseline(system, setup))
            bars[name].append(share)
            cells += [f"{share:.1f} %", f"{theirs:.1f} %"]
        bars[setups.GENERATOR].append(100 * setups.bubble_share(setups.generated(setup, options.search_s)))
        one = setups.ours(setup, options.seeds[0], options.search_s)
        bars["ours"].append(100 * setups.bubble_share(one))
        table.append((*cells, f"{bars[setups.GENERATOR][-1]:.1f} %", f"{bars['ours'][-1]:.1f} %"))
    rows = tuple(table)
    svg = bar_figure(list(_FIGURE_1), bars, y=Axis("bubble share, %"))
    return Outcome(
        (
            make_table(
                "adaptis/figure-1",
                rows,
                systems=(c for name in setups.BASELINES for c in (name, f"paper: {name}")),
                generator=setups.GENERATOR,
            ),
        ),
        (Figure("figure-1", "Bubble ratio by system and model", svg),),
        devices=setups.device(),
    )


def figure_3(options: Options) -> Outcome:
    """Tune the schedule, then the partition too, then the placement too, on a model with a large head."""
    setup = setups.PaperSetup("gemma-small", 4, 2, 4, 4096)
    base = setups.run_baseline("S-1F1B", setup)
    start = setups.seconds_of(base)
    steps = (
        ("+ schedule", ("schedule",), "1.28"),
        ("+ partition", ("schedule", "partition"), "1.49"),
        ("+ placement", ("schedule", "partition", "placement"), "1.74"),
    )
    rows = [("S-1F1B", f"{1e3 * start:.1f} ms", "1.00", "1.00", "1.00")]
    tracks = [make_track("S-1F1B", base.graph, base.schedule, base.timeline)]
    for name, phases, paper in steps:
        value = setups.ours_s(setup, options, phases)
        theirs = start / setups.generated_s(setup, options, phases)
        rows.append((name, f"{1e3 * value:.1f} ms", f"{start / value:.2f}", f"{theirs:.2f}", paper))
        one = setups.ours(setup, options.seeds[0], options.search_s, phases)
        tracks.append(make_track(name, one.graph, one.schedule, one.timeline))
    return Outcome(
        (make_table("adaptis/figure-3", rows, generator=setups.GENERATOR),),
        (Figure("figure-3", "Four timelines", timeline_svg(tracks)),),
        devices=setups.device(),
    )


def partitions(layers: int, ranks: int) -> int:
    """Ways to cut a chain into one stage for each rank."""
    return comb(layers - 1, ranks - 1)


def placements(stages: int, ranks: int) -> int:
    """Ways to put stages on ranks so that none is empty, ranks being alike (Stirling, second kind)."""
    terms = ((-1) ** k * comb(ranks, k) * (ranks - k) ** stages for k in range(ranks + 1))
    return int(sum(terms) // factorial(ranks))


def schedules(microbatches: int) -> int:
    """Orders of F, B and W of all microbatches on one rank, each microbatch's own three in that order."""
    return int(factorial(3 * microbatches) // 6**microbatches)


def figure_4(options: Options) -> Outcome:
    """Count partitions, placements and orders."""
    del options  # nothing is random
    counts, microbatches = (30, 40, 50, 60, 70, 80), (5, 10, 15, 20, 25, 30)
    ranks = (4, 8, 16, 32)
    cut = {f"P = {p}": (counts, [log10(partitions(n, p)) if n > p else 0.0 for n in counts]) for p in ranks}
    put = {f"P = {p}": (counts, [log10(max(1, placements(n, p))) for n in counts]) for p in ranks}
    order = {"P = 1": (microbatches, [log10(schedules(n)) for n in microbatches])}
    svg = panel_figure(
        {"partition": cut, "placement": put, "schedule": order},
        x=Axis("layers, stages, microbatches"),
        y=Axis("cases, log10"),
    )
    rows = tuple((f"P = {p}", f"{cut[f'P = {p}'][1][-1]:.0f}", f"{put[f'P = {p}'][1][-1]:.0f}") for p in ranks)
    orders = make_table(
        "adaptis/figure-4-orders",
        tuple((str(n), f"{log:.0f}") for n, log in zip(microbatches, order["P = 1"][1], strict=True)),
    )
    table = make_table("adaptis/figure-4-cases", rows)
    return Outcome((table, orders), (Figure("figure-4", "Size of the search space", svg),))
