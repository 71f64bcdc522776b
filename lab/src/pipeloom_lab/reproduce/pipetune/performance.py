"""How fast: Table 2, Figs. 2, 6 and 7."""

from __future__ import annotations

import numpy as np

from pipeloom.packing import Policy
from pipeloom.report import make_track, timeline_svg
from pipeloom.report.figures import Axis, bar_figure, line_figure
from pipeloom.tuning import TuningSpec
from pipeloom_lab.reproduce.part import Figure, Options, Outcome, Table
from pipeloom_lab.reproduce.pipetune.setups import (
    BALANCED,
    MIXTURES,
    NAMES,
    ON_A,
    ON_B,
    ORIGINAL,
    OURS,
    OURS_BALANCED,
    OURS_SEARCHED,
    PIPETUNE,
    PaperSetup,
    batch_of,
    best_static,
    change,
    emulated,
    ends_of,
    mean_seconds,
    means,
    run_batch,
    searched_by,
    seconds_by,
    steps_of,
    tuned_by,
)
from pipeloom_lab.reproduce.texts import make_note, make_table

_PAPER_TABLE_2 = {
    "datamix1": ("15.35", "10.52 (-31.5 %)", "10.34 (-32.6 %)", "9.10 (-40.7 %)"),
    "datamix2": ("17.76", "15.61 (-12.1 %)", "14.73 (-17.1 %)", "12.63 (-28.9 %)"),
    "datamix3": ("17.25", "16.82 (-2.5 %)", "16.04 (-7.0 %)", "14.47 (-16.1 %)"),
}
_FEW = 2
"""Contexts of the largest microbatch, in the table for little memory."""


def table_2(options: Options) -> Outcome:
    """The techniques one after the other, 13B on cluster A."""
    setup = ON_A["13b"]
    tables = []
    for mixture in MIXTURES:
        seconds = mean_seconds(setup, mixture, options)
        paper = dict(zip(seconds, _PAPER_TABLE_2[mixture], strict=False))
        first, balanced = seconds[ORIGINAL], seconds[BALANCED]
        still = {}
        for name, short in ((ORIGINAL, "Original"), (BALANCED, "Balanced")):
            size, still[name] = best_static(setup, mixture, options, name)
            seconds[f"{short} at the best static size, {_contexts(size)}"] = still[name]
        rows = tuple(
            (
                name,
                f"{value:.3f}",
                *(change(before, value) for before in (first, balanced, still[BALANCED])),
                paper.get(name, ""),
            )
            for name, value in seconds.items()
        )
        tables.append(make_table("pipetune/table-2", rows, mixture=NAMES[mixture]))
    tables.append(_smaller(setup, options))
    case = emulated(setup)
    settings, static = make_note("pipetune/settings"), make_note("pipetune/static")
    note = make_note("pipetune/table-2", max_contexts=case.max_contexts, context=setup.context, settings=settings)
    return Outcome(tuple(tables), notes=(note, static), devices=(case.device,))


def _contexts(count: int) -> str:
    return f"{count} context{'s' if count > 1 else ''}"


def _smaller(setup: PaperSetup, options: Options) -> Table:
    """The same where memory leaves an untuned run smaller microbatches."""
    case, settings, rows = emulated(setup), ends_of(setup) | {OURS: TuningSpec()}, []
    ways = {name: tuned_by(case, spec, _FEW) for name, spec in settings.items()}
    for mixture in MIXTURES:
        mean = means(seconds_by(setup, mixture, options, ways))
        quoted = _PAPER_TABLE_2[mixture][-1].partition("(")[2].rstrip(")")
        rows.append(
            (
                NAMES[mixture],
                f"{mean[ORIGINAL]:.3f}",
                *(change(mean[ORIGINAL], mean[name]) for name in (BALANCED, PIPETUNE, OURS)),
                quoted,
            )
        )
    return make_table("pipetune/table-2-small", rows, contexts=_contexts(_FEW))


def figure_6(options: Options) -> Outcome:
    """Three model sizes, two clusters, three mixtures."""
    tables, figures, devices = [], [], []
    single: dict[str, list[str]] = {}
    for label, setups in (("PP4 on cluster B", ON_B), ("TP4·PP4 on cluster A", ON_A)):
        rows, names = [], []
        bars: dict[str, list[float]] = {}
        for setup in setups.values():
            case = emulated(setup)
            devices.append(case.device)
            for mixture in MIXTURES:
                seconds = mean_seconds(setup, mixture, options, ends_of(setup))
                names.append(f"{setup.size.upper()} {NAMES[mixture].removeprefix('Data')}")
                for name, value in seconds.items():
                    bars.setdefault(name, []).append(value)
                size, still = best_static(setup, mixture, options, BALANCED)
                gains = {n: change(seconds[ORIGINAL], seconds[n]) for n in seconds if n != ORIGINAL}
                rows.append(
                    (
                        setup.name,
                        NAMES[mixture],
                        str(case.max_contexts),
                        f"{seconds[ORIGINAL]:.3f}",
                        *(gains[n] for n in (BALANCED, PIPETUNE, OURS, OURS_BALANCED)),
                        change(seconds[BALANCED], seconds[PIPETUNE]),
                        change(seconds[BALANCED], seconds[OURS]),
                        f"{size}: {change(seconds[ORIGINAL], still)}",
                        change(still, seconds[PIPETUNE]),
                        change(still, seconds[OURS]),
                    )
                )
                if case.max_contexts == 1:
                    single.setdefault(setup.name, []).append(
                        f"{gains[PIPETUNE]} (PipeTune) and {gains[OURS]} (ours) on {NAMES[mixture]}"
                    )
        tables.append(make_table("pipetune/figure-6", rows, label=label))
        stem = "figure-6-b" if setups is ON_B else "figure-6-a"
        figures.append(Figure(stem, f"Mean iteration time, {label}", bar_figure(names, bars, y=Axis("seconds", low=0))))
    notes = (
        make_note("pipetune/figure-6", settings=make_note("pipetune/settings")),
        *(make_note("pipetune/figure-6-single", name=name, found="; ".join(found)) for name, found in single.items()),
        make_note("pipetune/static"),
    )
    return Outcome(tuple(tables), tuple(figures), notes, tuple(dict.fromkeys(devices)))


def figure_7(options: Options) -> Outcome:
    """Static microbatch sizes against adaptive ones, 3B on cluster A."""
    setup = ON_A["3b"]
    case = emulated(setup)
    sizes = [k for k in (1, 2, 4, 8) if k <= case.max_contexts]
    static = TuningSpec("algorithm1_opened", "fixed", "clusters", "frozen")
    ways = {str(k): tuned_by(case, static, k) for k in sizes}
    ways |= {"adaptive": tuned_by(case, steps_of(setup)[PIPETUNE]), OURS: tuned_by(case, TuningSpec())}
    ways[OURS_SEARCHED] = searched_by(case, options)
    rows, lines = [], {}
    for mixture in MIXTURES:
        found = seconds_by(setup, mixture, options, ways)
        mean = means(found)
        best = min(mean[str(k)] for k in sizes)
        every = np.array([found[str(k)] for k in sizes])
        wins = np.bincount(every.argmin(axis=0), minlength=len(sizes)).tolist()
        chosen = ", ".join(f"{k}: {count}" for k, count in zip(sizes, wins, strict=True) if count)
        paper = {"datamix3": "-9.27 %"}.get(mixture, "0 %")
        rows.append(
            (
                NAMES[mixture],
                *(f"{mean[str(k)]:.3f}" for k in sizes),
                chosen,
                change(best, float(every.min(axis=0).mean())),
                f"{mean['adaptive']:.3f}",
                change(best, mean["adaptive"]),
                paper,
                f"{mean[OURS]:.3f}",
                change(best, mean[OURS]),
                change(best, mean[OURS_SEARCHED]),
            )
        )
        lines[NAMES[mixture]] = (sizes, [mean[str(k)] for k in sizes])
    svg = line_figure(lines, x=Axis("microbatch size, contexts", log=True), y=Axis("seconds", low=0))
    figure = Figure("figure-7", "Static microbatch sizes", svg)
    return Outcome(
        (make_table("pipetune/figure-7", rows, sizes=(f"static {k}" for k in sizes)),),
        (figure,),
        devices=(case.device,),
    )


def figure_2(options: Options) -> Outcome:
    """The four-panel example: one batch, one technique more in every panel."""
    setup = ON_A["13b"]
    case = emulated(setup)
    half = max(1, case.max_contexts // 2)
    balance: Policy = "algorithm1_opened"
    panels = (
        ("a: random packing", TuningSpec("random", "fixed", "given", "off"), None, ""),
        ("b: balanced packing", TuningSpec(balance, "fixed", "given", "off"), None, "-7.35 %"),
        ("c: half the microbatch size", TuningSpec(balance, "fixed", "given", "off"), half, "-10.93 %"),
        ("d: reordered, encoder pre-computed", TuningSpec(balance, "fixed", "clusters", "frozen"), half, "-6.05 %"),
        ("e: ours", TuningSpec(), None, ""),
    )
    ways = {name: tuned_by(case, spec, contexts) for name, spec, contexts, _ in panels}
    mean = means(seconds_by(setup, "datamix2", options, ways))
    first = before = mean[panels[0][0]]
    rows = []
    for name, _, _, paper in panels:
        share = 100 * (mean[name] - before) / first
        rows.append((name, f"{mean[name]:.3f}", f"{share:+.2f} %", change(first, mean[name]), paper))
        before = mean[name]
    batch = batch_of(setup, "datamix2", options.seeds[0] * 10_000)
    tracks = []
    for name, spec, contexts, _ in panels:
        one = run_batch(case, batch, spec, options.seeds[0], contexts and contexts * setup.context)
        tracks.append(
            make_track(name, one.plan.graph, one.plan.schedule, one.timeline, chunk_names=case.layout.chunk_names)
        )
    figure = Figure("figure-2", "One batch of DataMix2, 13B TP4·PP4, emulated", timeline_svg(tracks))
    return Outcome((make_table("pipetune/figure-2", rows),), (figure,), devices=(case.device,))
