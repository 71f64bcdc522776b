"""How fast: Table 2, Figs. 2, 6 and 7, and what the reductions of Table 2 depend on."""

from __future__ import annotations

import numpy as np

from pipeloom.packing import Policy
from pipeloom.report import make_track, timeline_svg
from pipeloom.tuning import TuningSpec
from pipeloom_lab.figures import Axis, bar_figure, line_figure
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome, Table
from pipeloom_lab.reproduce.pipetune import setups
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
    setup = setups.ON_A["13b"]
    tables = []
    for mixture in setups.MIXTURES:
        seconds = setups.mean_seconds(setup, mixture, options)
        paper = dict(zip(seconds, _PAPER_TABLE_2[mixture], strict=False))
        first, balanced = seconds[setups.ORIGINAL], seconds[setups.BALANCED]
        still = {}
        for name, short in ((setups.ORIGINAL, "Original"), (setups.BALANCED, "Balanced")):
            size, still[name] = setups.best_static(setup, mixture, options, name)
            seconds[f"{short} at the best static size, {_contexts(size)}"] = still[name]
        rows = tuple(
            (
                name,
                f"{value:.3f}",
                *(setups.change(before, value) for before in (first, balanced, still[setups.BALANCED])),
                paper.get(name, ""),
            )
            for name, value in seconds.items()
        )
        tables.append(make_table("pipetune/table-2", rows, mixture=setups.NAMES[mixture]))
    tables.append(_smaller(setup, options))
    setting = setups.emulated(setup)
    settings, static = make_note("pipetune/settings"), make_note("pipetune/static")
    note = make_note("pipetune/table-2", max_contexts=setting.max_contexts, context=setup.context, settings=settings)
    return Outcome(tuple(tables), notes=(note, static), devices=(setting.device,))


def _contexts(count: int) -> str:
    return f"{count} context{'s' if count > 1 else ''}"


def _smaller(setup: setups.PaperSetup, options: Options) -> Table:
    """The same where memory leaves an untuned run smaller microbatches."""
    setting, rows = setups.emulated(setup), []
    for mixture in setups.MIXTURES:
        mean = _mean(setting, mixture, _FEW, options)
        quoted = _PAPER_TABLE_2[mixture][-1].partition("(")[2].rstrip(")")
        rows.append(
            (
                setups.NAMES[mixture],
                f"{mean[setups.ORIGINAL]:.3f}",
                *(
                    setups.change(mean[setups.ORIGINAL], mean[name])
                    for name in (setups.BALANCED, setups.PIPETUNE, setups.OURS)
                ),
                quoted,
            )
        )
    return make_table("pipetune/table-2-small", rows, contexts=_contexts(_FEW))


def figure_6(options: Options) -> Outcome:
    """Three model sizes, two clusters, three mixtures."""
    tables, figures, devices = [], [], []
    single: dict[str, list[str]] = {}
    for label, cluster in (("PP4 on cluster B", setups.ON_B), ("TP4·PP4 on cluster A", setups.ON_A)):
        rows, names = [], []
        bars: dict[str, list[float]] = {}
        for setup in cluster.values():
            setting = setups.emulated(setup)
            devices.append(setting.device)
            for mixture in setups.MIXTURES:
                seconds = setups.mean_seconds(setup, mixture, options, setups.ends_of(setup))
                names.append(f"{setup.size.upper()} {setups.NAMES[mixture].removeprefix('Data')}")
                for name, value in seconds.items():
                    bars.setdefault(name, []).append(value)
                size, still = setups.best_static(setup, mixture, options, setups.BALANCED)
                gains = {
                    n: setups.change(seconds[setups.ORIGINAL], seconds[n]) for n in seconds if n != setups.ORIGINAL
                }
                rows.append(
                    (
                        setup.name,
                        setups.NAMES[mixture],
                        str(setting.max_contexts),
                        f"{seconds[setups.ORIGINAL]:.3f}",
                        *(gains[n] for n in (setups.BALANCED, setups.PIPETUNE, setups.OURS, setups.OURS_BALANCED)),
                        setups.change(seconds[setups.BALANCED], seconds[setups.PIPETUNE]),
                        setups.change(seconds[setups.BALANCED], seconds[setups.OURS]),
                        f"{size}: {setups.change(seconds[setups.ORIGINAL], still)}",
                        setups.change(still, seconds[setups.PIPETUNE]),
                        setups.change(still, seconds[setups.OURS]),
                    )
                )
                if setting.max_contexts == 1:
                    single.setdefault(setup.name, []).append(
                        f"{gains[setups.PIPETUNE]} (PipeTune) and {gains[setups.OURS]} (ours) on "
                        f"{setups.NAMES[mixture]}"
                    )
        tables.append(make_table("pipetune/figure-6", rows, label=label))
        stem = "figure-6-b" if cluster is setups.ON_B else "figure-6-a"
        figures.append(Figure(stem, f"Mean iteration time, {label}", bar_figure(names, bars, y=Axis("seconds", low=0))))
    notes = (
        make_note("pipetune/figure-6", settings=make_note("pipetune/settings")),
        *(make_note("pipetune/figure-6-single", name=name, found="; ".join(found)) for name, found in single.items()),
        make_note("pipetune/static"),
    )
    return Outcome(tuple(tables), tuple(figures), notes, tuple(dict.fromkeys(devices)))


def figure_7(options: Options) -> Outcome:
    """Static microbatch sizes against adaptive ones, 3B on cluster A."""
    setup = setups.ON_A["3b"]
    setting = setups.emulated(setup)
    sizes = [k for k in (1, 2, 4, 8) if k <= setting.max_contexts]
    static = TuningSpec("algorithm1_opened", "fixed", "clusters", "frozen")
    ways = {str(k): setups.tuned_by(setting, static, k) for k in sizes}
    ways |= {
        "adaptive": setups.tuned_by(setting, setups.steps_of(setup)[setups.PIPETUNE]),
        setups.OURS: setups.tuned_by(setting, TuningSpec()),
    }
    ways[setups.OURS_SEARCHED] = setups.searched_by(setting, options)
    rows, lines = [], {}
    for mixture in setups.MIXTURES:
        found = setups.seconds_by(setup, mixture, options, ways)
        mean = setups.means(found)
        best = min(mean[str(k)] for k in sizes)
        every = np.array([found[str(k)] for k in sizes])
        wins = np.bincount(every.argmin(axis=0), minlength=len(sizes)).tolist()
        chosen = ", ".join(f"{k}: {count}" for k, count in zip(sizes, wins, strict=True) if count)
        paper = {"datamix3": "-9.27 %"}.get(mixture, "0 %")
        rows.append(
            (
                setups.NAMES[mixture],
                *(f"{mean[str(k)]:.3f}" for k in sizes),
                chosen,
                setups.change(best, float(every.min(axis=0).mean())),
                f"{mean['adaptive']:.3f}",
                setups.change(best, mean["adaptive"]),
                paper,
                f"{mean[setups.OURS]:.3f}",
                setups.change(best, mean[setups.OURS]),
                setups.change(best, mean[setups.OURS_SEARCHED]),
            )
        )
        lines[setups.NAMES[mixture]] = (sizes, [mean[str(k)] for k in sizes])
    svg = line_figure(lines, x=Axis("microbatch size, contexts", log=True), y=Axis("seconds", low=0))
    figure = Figure("figure-7", "Static microbatch sizes", svg)
    return Outcome(
        (make_table("pipetune/figure-7", rows, sizes=(f"static {k}" for k in sizes)),),
        (figure,),
        devices=(setting.device,),
    )


def figure_2(options: Options) -> Outcome:
    """The four-panel example: one batch, one technique more in every panel."""
    setup = setups.ON_A["13b"]
    setting = setups.emulated(setup)
    half = max(1, setting.max_contexts // 2)
    balance: Policy = "algorithm1_opened"
    panels = (
        ("a: random packing", TuningSpec("random", "fixed", "given", "off"), None, ""),
        ("b: balanced packing", TuningSpec(balance, "fixed", "given", "off"), None, "-7.35 %"),
        ("c: half the microbatch size", TuningSpec(balance, "fixed", "given", "off"), half, "-10.93 %"),
        ("d: reordered, encoder pre-computed", TuningSpec(balance, "fixed", "clusters", "frozen"), half, "-6.05 %"),
        ("e: ours", TuningSpec(), None, ""),
    )
    ways = {name: setups.tuned_by(setting, spec, contexts) for name, spec, contexts, _ in panels}
    mean = setups.means(setups.seconds_by(setup, "datamix2", options, ways))
    first = before = mean[panels[0][0]]
    rows = []
    for name, _, _, paper in panels:
        share = 100 * (mean[name] - before) / first
        rows.append((name, f"{mean[name]:.3f}", f"{share:+.2f} %", setups.change(first, mean[name]), paper))
        before = mean[name]
    batch = setups.batch_of(setup, "datamix2", options.seeds[0] * 10_000)
    tracks = []
    for name, spec, contexts, _ in panels:
        one = setups.run_batch(setting, batch, spec, options.seeds[0], contexts and contexts * setup.context)
        tracks.append(
            make_track(name, one.plan.graph, one.plan.schedule, one.timeline, chunk_names=setting.layout.chunk_names)
        )
    figure = Figure("figure-2", "One batch of DataMix2, 13B TP4·PP4, emulated", timeline_svg(tracks))
    return Outcome((make_table("pipetune/figure-2", rows),), (figure,), devices=(setting.device,))


SIZES = (2, 4, 6, 8, 12)
"""Contexts of the largest microbatch."""
_STRATEGIES = {
    "keep": "nothing",
    "selective": "norms, activation functions",
    "recompute:0.5": "every second layer",
    "recompute": "all",
}
_PAPER = {"datamix1": "-40.7 %", "datamix2": "-28.9 %", "datamix3": "-16.1 %"}
"""PipeTune against Original, Table 2: quoted in the tables' titles."""


def sensitivity(options: Options) -> Outcome:
    """Reductions of Table 2 for other sizes of the untuned microbatch, and other recomputation."""
    setup = setups.ON_A["13b"]
    rows: dict[str, list[tuple[str, ...]]] = {mixture: [] for mixture in setups.MIXTURES}
    lines = {setups.NAMES[mixture]: Line([], []) for mixture in setups.MIXTURES}
    for strategy, text in _STRATEGIES.items():
        setting = setups.emulated(setup, recomputed=strategy, most_contexts=max(SIZES))
        for contexts in SIZES:
            if contexts > setting.max_contexts:
                for each in rows.values():
                    each.append((text, str(contexts), "does not fit", *[""] * 4))
                break
            for mixture in setups.MIXTURES:
                seconds = _mean(setting, mixture, contexts, options)
                first, balanced = seconds[setups.ORIGINAL], seconds[setups.BALANCED]
                changes = (
                    setups.change(first, seconds[name]) for name in (setups.BALANCED, setups.PIPETUNE, setups.OURS)
                )
                rows[mixture].append(
                    (text, str(contexts), f"{first:.3f}", *changes, setups.change(balanced, seconds[setups.OURS]))
                )
                if strategy == "recompute":
                    lines[setups.NAMES[mixture]].add(contexts, 100 * (1 - seconds[setups.OURS] / first))
    tables = tuple(
        make_table("pipetune/sensitivity", tuple(rows[mixture]), mixture=setups.NAMES[mixture], paper=_PAPER[mixture])
        for mixture in setups.MIXTURES
    )
    used = setups.emulated(setup)
    recomputed = _STRATEGIES[setups.RECOMPUTED]
    notes = (
        make_note("pipetune/sensitivity", recomputed=recomputed, max_contexts=used.max_contexts),
        make_note("pipetune/sensitivity-size"),
    )
    svg = line_figure(lines, x=Axis("largest microbatch, contexts"), y=Axis("shorter than Original, per cent", low=0))
    figure = Figure("sensitivity", "Ours against Original, all layers recomputed", svg)
    return Outcome(tables, (figure,), notes, devices=(used.device,))


def _mean(setting: setups.EmulatedSetup, mixture: str, contexts: int, options: Options) -> dict[str, float]:
    """Mean seconds of Original, Balanced, PipeTune and ours with microbatches of at most so many contexts."""
    settings = setups.ends_of(setting.setup) | {setups.OURS: TuningSpec()}
    ways = {name: setups.tuned_by(setting, spec, contexts) for name, spec in settings.items()}
    return setups.means(setups.seconds_by(setting.setup, mixture, options, ways))
