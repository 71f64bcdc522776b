"""End-to-end comparisons: Table 4, Fig. 8a, Fig. 8b, and the published searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from pipeloom.compare.baseline import by_parameters, fixed_system
from pipeloom.compare.baselines.fsdp import fsdp_time
from pipeloom.compare.model_on_cluster import layer_seconds
from pipeloom.layout import chain_of_stages
from pipeloom.layout.layouts import chunk_counts
from pipeloom.search import Budget, interleaved_one_f_one_b
from pipeloom_lab.figures import Axis, bar_figure, line_figure
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import (
    H20,
    SETUPS,
    PaperSetup,
    bounded_microbatches,
    device,
    gain,
    image_bounds,
    images_of,
    mean,
    seconds_text,
)
from pipeloom_lab.reproduce.part import Figure, Options, Outcome, Table
from pipeloom_lab.reproduce.texts import make_note, make_table

MOST_CHUNKS = (2, 4, 8, 16)
"""Chunks a rank that Megatron-LM's gains are also shown for."""
SELDOM = 5
"""DIP's searches plan every ``SELDOM``-th of the changing iterations."""
PAPERS_ITERATION = 6
"""The changing iteration for which the paper quotes Megatron-LM's distance."""


def figure_8a(options: Options) -> Outcome:
    """Five models on mixed data under every system."""
    names = (*runs.BASELINE_TITLES, runs.PUBLISHED, runs.BEST_FORM, runs.OURS_SAME, runs.OURS_GIVEN, runs.OURS)
    rows, relative, notes, summary = [], {name: list[float | None]() for name in names}, [], []
    fitted: dict[str, list[str]] = {}
    paper = {"VLM": "15.6 to 76.2 % over three", "T2V": "36.6 to 97.3 % over two"}
    for label, setup in SETUPS.items():
        found = _against_ours(setup, names, options)
        for name in names:
            relative[name].append(found[name].ratio if name in found else None)
            fitted.setdefault(name, []).append(found[name].fits if name in found else "")
            if name in found:
                rows.append((label, found[name].title, seconds_text(found[name].seconds), found[name].gain))
        best = best_baseline(found)
        summary.append(
            (
                label,
                _our_layout(setup),
                best or seconds_text(None),
                *(_over(found, best) if best else ("", "", "")),
                *_room(setup, best, options),
                found[runs.MEGATRON].gain or seconds_text(None),
                found[runs.PUBLISHED].gain,
                found[runs.BEST_FORM].gain,
                found[runs.BEST_FORM].form,
                paper[label[:3]],
            )
        )
        notes.append(
            f"{label}: layout `{_our_layout(setup)}`, of {len(setup.layouts)} tried on "
            f"{len(setup.typical)} other iterations; what each would have cost is in the part `layouts`. "
            f"{runs.chunks_note(setup)}{_vision_note(setup)}"
        )
    bars = bar_figure(
        list(SETUPS), relative, y=Axis("throughput, ours = 1"), title="Throughput on mixed data, relative to ours"
    )
    return Outcome(
        (
            _gain_table(summary, options),
            make_table(
                "dip/figure-8a-chunks",
                tuple((label, *_by_chunks(setup)) for label, setup in SETUPS.items()),
                chunks=(str(most) for most in MOST_CHUNKS),
            ),
            make_table(
                "dip/figure-8a-seconds",
                rows,
                few_note="" if options.full or options.iterations == 1 else make_note("dip/few"),
            ),
            make_table("dip/figure-8a-fits", tuple((name, *cells) for name, cells in fitted.items()), setups=SETUPS),
        ),
        (Figure("figure-8a", "Throughput relative to ours (higher is better)", bars),),
        tuple(notes),
        device(*SETUPS.values()),
    )


def _gain_table(rows: Sequence[tuple[str, ...]], options: Options) -> Table:
    """What ours gains on every model, over the best baseline first."""
    jitter = max(setup.setting.cluster.device.jitter for setup in SETUPS.values())
    return make_table(
        "dip/figure-8a-gain",
        rows,
        jitter=jitter * 100,
        few_bounds=runs.FEW_BOUNDS,
        rule=runs.rule(options),
        forms=make_note("dip/forms"),
    )


def _by_chunks(setup: PaperSetup) -> list[str]:
    """Seconds of the sampled iterations under the best number of chunks up to each of `MOST_CHUNKS`, and any."""
    setting, mine = setup.setting, runs.system(setup, runs.OURS)
    ours = mean(
        setting.iteration_s(planned)
        for seed, groups in enumerate(setup.typical)
        if (planned := runs.run(mine, groups, runs.CHOICE, seed)) is not None
    )
    seconds = dict[int, float]()
    for chunks in chunk_counts(setting.num_ranks, setting.model.modules)[1:]:
        layout = chain_of_stages(setting.model, setting.num_ranks, chunks, by_parameters(setting, setup.typical))
        one = fixed_system("interleaved", setting, layout, interleaved_one_f_one_b)
        found = [runs.run(one, groups, Budget(evaluations=1), 0) for groups in setup.typical]
        if None not in found:
            seconds[chunks] = mean(setting.iteration_s(each) for each in found if each is not None)
    cells = []
    for most in (*MOST_CHUNKS, max(seconds, default=0)):
        best = min((value for chunks, value in seconds.items() if chunks <= most), default=None)
        cells.append(seconds_text(best) + ("" if best is None else f" ({gain(best, ours)})"))
    return cells


def _vision_note(setup: PaperSetup) -> str:
    """Images of a microbatch, and the encoder's share of the time; empty where there is no encoder of images."""
    setting, seconds = setup.setting, layer_seconds(setup.setting, setup.typical)
    if "vision" not in {module.name for module in setting.model.modules}:
        return ""
    time = {m.name: sum(seconds[f"{m.name}/{layer.kind}"] for layer in m.flat_layers) for m in setting.model.modules}
    groups = [group for batch in setup.typical for group in batch]
    return (
        f" A microbatch has {images_of(groups):.1f} images, and vision takes "
        f"{time['vision'] / sum(time.values()) * 100:.0f} % of the layers' time."
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A system compared with ours on the same iterations."""

    title: str
    fits: str = ""
    """Numbers of iterations that fit under the chosen layout, under another layout, and not at all."""
    seconds: float | None = None
    """Mean of the iterations that both fit; None: there are none."""
    ratio: float | None = None
    """Its throughput, ours being one."""
    gain: str = ""
    jittered: str = ""
    """What ours is faster by, as planned and where passes take other times."""
    form: str = ""
    """Which form of DIP it is, for the best of them."""


def _against_ours(setup: PaperSetup, names: Sequence[str], options: Options) -> dict[str, Comparison]:
    """Time the systems that can train a model, and ours on the same iterations."""
    out = {}
    for name in (name for name in names if runs.suits(name, setup)):
        numbers = runs.planned_iterations(options, runs.PUBLISHED if name == runs.BEST_FORM else name)
        form = ""
        if name == runs.BEST_FORM:
            best = runs.best_form(setup, numbers, options.search_s)
            form = "" if best is None else best[0]
        out[name] = _beside(setup, name, form, numbers, options.search_s)
    return out


def _beside(setup: PaperSetup, name: str, form: str, numbers: list[tuple[int, int]], search_s: float) -> Comparison:
    title = f"{name}: {form}" if form else name
    if name == runs.BEST_FORM and not form:
        return Comparison(title)
    found = runs.each_timed(setup, form or name, numbers, search_s)
    ours = runs.each_timed(setup, runs.OURS, numbers, search_s)
    chosen = sum(one is not None and one.as_chosen for one in found)
    fits = f"{chosen} / {len(found) - found.count(None) - chosen} / {found.count(None)}"
    both = [(a, b) for a, b in zip(found, ours, strict=True) if a is not None and b is not None]
    if not both:
        return Comparison(title, fits, form=form)
    value, least = mean(a.seconds for a, _ in both), mean(b.seconds for _, b in both)
    if name == runs.OURS:
        return Comparison(title, fits, value, 1.0)
    jittered = gain(mean(a.jittered_s for a, _ in both), mean(b.jittered_s for _, b in both))
    return Comparison(title, fits, value, least / value, gain(value, least), jittered, form)


def best_baseline(found: dict[str, Comparison]) -> str:
    """The baseline with the most throughput; of those that fit all iterations, if any do. Empty: none fits any."""
    fitting = [name for name in runs.BASELINE_TITLES if name in found and found[name].ratio is not None]
    whole = [name for name in fitting if found[name].fits.endswith("/ 0")]
    return max(whole or fitting, key=lambda name: found[name].ratio or 0.0, default="")


def _over(found: dict[str, Comparison], best: str) -> tuple[str, str, str]:
    """Return our gain over the best baseline: planned, with jitter, and with given microbatches."""
    theirs, given = found[best].seconds, found[runs.OURS_GIVEN].seconds
    return found[best].gain, found[best].jittered, "" if theirs is None or given is None else gain(theirs, given)


def unsearched(options: Options) -> Outcome:
    """Ours beside its own layouts and packings under a static order: what searching orders and strategies brings."""
    rows, batches = [], runs.iterations(options, 1)
    for label, setup in SETUPS.items():
        plain, ours = (runs.seconds_of(setup, name, batches, options.search_s) for name in (runs.UNSEARCHED, runs.OURS))
        shown = (seconds_text(None if each is None else mean(each)) for each in (plain, ours))
        rows.append((label, *shown, "" if plain is None or ours is None else gain(mean(plain), mean(ours))))
    return Outcome(
        (make_table("dip/unsearched", rows, count=len(batches), rule=runs.rule(options)),),
        devices=device(*SETUPS.values()),
    )


def _our_layout(setup: PaperSetup) -> str:
    """Return the name of our layout."""
    mine = runs.system(setup, runs.OURS).layout
    return next(one.name for one in setup.layouts if one.layout == mine)


def _room(setup: PaperSetup, best: str, options: Options) -> tuple[str, str, str]:
    """What the best baseline is above the least lower bound, and how much of that ours is ahead of it.

    With microbatches of its own, and with those given.
    """
    numbers = runs.iterations(options)
    theirs, ours, given = (
        runs.all_timed(setup, name, numbers, options.search_s) for name in (best, runs.OURS, runs.OURS_GIVEN)
    )
    if theirs is None or ours is None:
        return "", "", ""
    least = (
        min(runs.least_bound_s(setup, setup.groups(*number)), one.bound_s)
        for number, one in zip(numbers, ours, strict=True)
    )
    bound, start = mean(least), mean(one.seconds for one in theirs)

    def closed(found: list[runs.TimedIteration]) -> str:
        return f"{(start - mean(one.seconds for one in found)) / (start - bound) * 100:.0f} %"

    return f"{(start / bound - 1) * 100:.1f} %", closed(ours), "" if given is None else closed(given)


def published_search(options: Options) -> Outcome:
    """DIP's searches, on DIP's own layout and beside ours."""
    rows = []
    batches = runs.iterations(options, 1)
    for label, setup in SETUPS.items():
        found = {
            name: runs.all_timed(setup, name, batches, options.search_s)
            for name in (*runs.FORMS, runs.OURS_SAME, runs.OURS)
        }
        means = {name: None if each is None else mean(one.seconds for one in each) for name, each in found.items()}
        best = min((name for name in runs.FORMS if means[name] is not None), key=lambda n: means[n] or 0, default="")
        for name, each in found.items():
            here = means[name]
            if each is None or here is None:
                rows.append((label, name, seconds_text(None), "", "", "", ""))
                continue
            same, ours = (
                "" if other is None else gain(here, other) for other in (means[runs.OURS_SAME], means[runs.OURS])
            )
            spent = mean(one.processor_s for one in each)
            rows.append((label, name, seconds_text(here), f"{spent:.1f}", same, ours, "best" if name == best else ""))
    plural = "s" if len(batches) > 1 else ""
    return Outcome(
        (
            make_table(
                "dip/published",
                rows,
                count=len(batches),
                plural=plural,
                rule=runs.rule(options),
                forms=make_note("dip/forms"),
            ),
        ),
        devices=device(*SETUPS.values()),
    )


def tried_layouts(_options: Options) -> Outcome:
    """List the planned time and the lower bound of every tried layout."""
    tables = []
    for label, setup in SETUPS.items():
        tables.append(
            make_table(
                "dip/layouts",
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
                label=label,
            )
        )
    return Outcome(tuple(tables), notes=(make_note("dip/layouts"),), devices=device(*SETUPS.values()))


def table_4(options: Options) -> Outcome:
    """VLM-S on 16 H20: FSDP, Megatron-LM, DIP, ours."""
    setup = H20
    setting, batches = setup.setting, runs.planned_iterations(options, runs.PUBLISHED)
    fsdp = [fsdp_time(setting, setup.groups(*each), setting.cluster.num_devices) for each in batches]
    values: dict[str, float | None] = {"FSDP2, ZeRO-3": mean(seconds for seconds, _ in fsdp)}
    for name in (runs.MEGATRON, runs.MEGATRON_EVEN, runs.PUBLISHED):
        found = runs.seconds_of(setup, name, batches, options.search_s)
        values[name] = None if found is None else mean(found)
    if (best := runs.best_form(setup, batches, options.search_s)) is not None:
        values[f"{runs.BEST_FORM}: {best[0]}"] = best[1]
    found = runs.seconds_of(setup, runs.OURS, batches, options.search_s)
    values[runs.OURS] = None if found is None else mean(found)
    paper = {"FSDP2, ZeRO-3": ("40.270", "1.03"), runs.MEGATRON: ("39.053", "1.00"), runs.PUBLISHED: ("28.606", "0.73")}
    base = values[runs.MEGATRON]
    rows = tuple(
        (name, seconds_text(v), "" if v is None or base is None else f"{v / base:.2f}", *paper.get(name, ("", "")))
        for name, v in values.items()
    )
    used = ", ".join(dict.fromkeys(strategy for _, strategy in fsdp))
    return Outcome(
        (
            make_table(
                "dip/table-4",
                rows,
                num_devices=setting.cluster.num_devices,
                used=used,
                count=len(batches),
                rule=runs.rule(options),
                forms=make_note("dip/forms"),
            ),
        ),
        devices=device(setup),
    )


def figure_8b(options: Options) -> Outcome:
    """Forty iterations in which the number of images rises and falls twice."""
    setup = SETUPS["VLM-S"]
    names = (runs.MEGATRON, runs.NNSCALER, runs.OPTIMUS, *runs.FORMS[::-1], runs.OURS)
    systems = {name: runs.system(setup, name) for name in names}
    length, seldom = 20, 1 if options.full else SELDOM
    images, series, lacking = [], {name: list[float]() for name in names}, dict[str, list[int]]()
    for i in range(2 * length):
        low, high = image_bounds(i % length)
        groups = bounded_microbatches(setup.num_microbatches, low, high, 777 + i)
        images.append(images_of(groups))
        for name, one in systems.items():
            if name in runs.SEARCHED and i % seldom:
                series[name].append(float("nan"))
                continue
            found = runs.run(one, groups, runs.budget_of(name, options.search_s), i)
            series[name].append(float("nan") if found is None else setup.setting.iteration_s(found))
            if found is None:
                lacking.setdefault(name, []).append(i + 1)
    at = range(0, 2 * length, seldom)
    forms = {name: sum(series[name][i] for i in at) for name in runs.FORMS}
    best = min((name for name in forms if not isnan(forms[name])), key=lambda name: forms[name], default=runs.PUBLISHED)
    shown = {name: name for name in names if name not in runs.FORMS} | {runs.PUBLISHED: runs.PUBLISHED}
    shown[best] = f"{runs.BEST_FORM}: {best}"
    figure = line_figure(
        {shown[name]: _known(series[name]) for name in names if name in shown},
        x=Axis("iteration"),
        y=Axis("iteration time, s", low=0.0),
        title="VLM-S, image counts rising and falling",
    )
    rising, falling, quoted = slice(0, 10), slice(14, 20), slice(PAPERS_ITERATION - 1, PAPERS_ITERATION)
    paper = {
        runs.MEGATRON: f"52.9 % (iteration {PAPERS_ITERATION})",
        runs.NNSCALER: "10.4 %, later 50.5 %",
        runs.OPTIMUS: "10.4 %",
    }
    ours = series[runs.OURS]
    rows = tuple(
        (
            shown.get(name, name),
            *(_seconds_beside(series[name][part], ours[part]) for part in (slice(None), rising, falling)),
            _most_behind(series[name][quoted], ours[quoted]),
            _most_behind(series[name], ours),
            paper.get(name, ""),
        )
        for name in names
    )
    ordinal = "single" if seldom == 1 else f"{seldom}th"
    peak = max(range(length), key=lambda i: images[i])
    return Outcome(
        (
            make_table(
                "dip/figure-8b",
                rows,
                ordinal=ordinal,
                rule=runs.rule(options),
                forms=make_note("dip/forms"),
                papers_iteration=PAPERS_ITERATION,
            ),
        ),
        (Figure("figure-8b", "Iteration time under changing data", figure),),
        (
            f"Most images: {images[peak]:.0f} a microbatch on average in iteration {peak + 1} (paper: 22 in its peak).",
            *(
                f"{name} does not fit into memory in iteration {', '.join(map(str, where))}."
                for name, where in lacking.items()
            ),
        ),
        device(setup),
    )


def _known(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the timed iterations and their seconds."""
    at = [i for i, value in enumerate(values) if not isnan(value)]
    return [float(i + 1) for i in at], [values[i] for i in at]


def _seconds_beside(values: Sequence[float], ours: Sequence[float]) -> str:
    """Return mean seconds, and our gain on the same iterations."""
    both = [(v, o) for v, o in zip(values, ours, strict=True) if not isnan(v) and not isnan(o)]
    if not both:
        return "not timed"
    here, there = mean(v for v, _ in both), mean(o for _, o in both)
    return f"{here:.2f}" if here == there else f"{here:.2f} ({gain(here, there)})"


def _most_behind(values: Sequence[float], ours: Sequence[float]) -> str:
    behind = [v / o - 1 for v, o in zip(values, ours, strict=True) if not isnan(v) and not isnan(o)]
    return f"{max(behind) * 100:.1f} %" if behind else ""
