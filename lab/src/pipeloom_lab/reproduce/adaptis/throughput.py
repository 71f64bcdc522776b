"""Throughput: Fig. 8 (models and sizes), Fig. 9 (sequence lengths), Fig. 10 (ablation)."""

from __future__ import annotations

from pipeloom_lab.figures import Axis, bar_figure, line_figure
from pipeloom_lab.reproduce.adaptis import setups
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome, Table
from pipeloom_lab.reproduce.texts import make_note, make_table

_PAPER_8 = {
    ("Gemma", 2048): ((0.99, 0.99, 1.02, 1.15), (0.99, 1.00, 1.17, 1.31), (0.96, 1.03, 1.23, 1.38)),
    ("DeepSeek", 2048): ((1.00, 0.96, 1.02, 1.27), (0.97, 1.02, 1.10, 1.35), (0.96, 0.99, 1.11, 1.37)),
    ("Nemotron-H", 2048): ((0.94, 0.97, 1.00, 1.18), (0.89, 1.01, 1.16, 1.41), (0.80, 0.97, 1.18, 1.35)),
    ("Gemma", 4096): ((1.02, 1.02, 1.14, 1.22), (1.02, 1.03, 1.23, 1.39), (0.85, 1.03, 1.27, 1.42)),
    ("DeepSeek", 4096): ((1.04, 1.01, 1.07, 1.31), (1.04, 1.03, 1.22, 1.37), (0.98, 1.02, 1.18, 1.43)),
    ("Nemotron-H", 4096): ((0.91, 0.98, 1.12, 1.26), (0.83, 1.01, 1.08, 1.36), (0.78, 1.03, 1.16, 1.36)),
}
"""Normalised throughput of I-1F1B, ZB, Mist and AdaPtis, for small, medium and large. For display only."""
_PAPER_AVERAGE = {"S-1F1B": "1.34", "I-1F1B": "1.42", "ZB": "1.34", "Mist": "1.20"}
_BEST = "the best of eleven"


def figure_8(options: Options) -> Outcome:
    """Every model, size and sequence length, with two and four microbatches per rank."""
    tables, figures = [], []
    gains: dict[str, list[tuple[float, float]]] = {name: [] for name in (*setups.BASELINES, _BEST)}
    for rounds in setups.ROUNDS:
        rows = []
        bars: dict[str, list[float | None]] = {name: [] for name in (*setups.BASELINES, setups.GENERATOR, "ours")}
        for (family, tokens), paper in _PAPER_8.items():
            for size, theirs in zip(setups.SIZES, paper, strict=True):
                setup = setups.setup_of(family, size, tokens, rounds)
                value, theirs_s = setups.ours_s(setup, options), setups.generated_s(setup, options)
                seconds, cells = {}, [f"{family} {size}", str(tokens), str(setup.pipeline)]
                for name, system in setups.BASELINES.items():
                    result = setups.run_baseline(system, setup)
                    seconds[name] = setups.seconds_of(result)
                    if result.fits:  # one that does not is no system to gain on
                        gains[name].append((seconds[name] / value, seconds[name] / theirs_s))
                    if name != "S-1F1B":
                        mark = "" if result.fits else " (out of memory)"
                        cells.append(f"{seconds['S-1F1B'] / seconds[name]:.2f}{mark}")
                    bars[name].append(seconds["S-1F1B"] / seconds[name])
                bars[setups.GENERATOR].append(seconds["S-1F1B"] / theirs_s)
                bars["ours"].append(seconds["S-1F1B"] / value)
                if (best := setups.best_baseline(setup)) is not None:
                    gains[_BEST].append((setups.seconds_of(best) / value, setups.seconds_of(best) / theirs_s))
                cells += [f"{seconds['S-1F1B'] / theirs_s:.2f}", f"{seconds['S-1F1B'] / value:.2f}"]
                cells += [setups.over_best(setup, value), " / ".join(f"{x:.2f}" for x in theirs)]
                rows.append(tuple(cells))
        tables.append(make_table("adaptis/figure-8-models", rows, rounds=rounds, generator=setups.GENERATOR))
        svg = bar_figure([" ".join(row[:2]) for row in rows], bars, y=Axis("throughput over S-1F1B"))
        figures.append(Figure(f"figure-8-{rounds}", f"Throughput, {rounds} microbatches per rank", svg))
    average = tuple(
        (
            name,
            *(
                cell
                for which in (0, 1)
                for cell in (f"{setups.mean(v[which] for v in values):.2f}", f"{max(v[which] for v in values):.2f}")
            ),
            _PAPER_AVERAGE.get(name, ""),
        )
        for name, values in gains.items()
        if values
    )
    tables.append(make_table("adaptis/figure-8-average", average, generator=setups.GENERATOR))
    return Outcome(tuple(tables), tuple(figures), devices=setups.device())


def figure_9(options: Options) -> Outcome:
    """Nemotron-H large from 1K to 32K tokens, P = 8, T = 4, 64 microbatches."""
    lengths = (1024, 2048, 4096, 8192, 16384, 32768)
    base: float | None = None
    gains: dict[str, list[float]] = {name: [] for name in (*setups.BASELINES, setups.GENERATOR)}
    lines = {name: Line([], []) for name in (*setups.BASELINES, setups.GENERATOR, "ours")}
    rows = []
    for tokens in lengths:
        setup = setups.PaperSetup("nemotron-h-large", 8, 4, 64, tokens)
        results = {name: setups.run_baseline(system, setup) for name, system in setups.BASELINES.items()}
        seconds = {name: setups.seconds_of(result) for name, result in results.items()}
        seconds[setups.GENERATOR] = setups.generated_s(setup, options)
        seconds["ours"] = setups.ours_s(setup, options)
        for name, value in seconds.items():
            rate = tokens / value
            base = base or rate
            lines[name].add(tokens, rate / base)
            if name in gains and (name not in results or results[name].fits):
                gains[name].append(value / seconds["ours"])
        rows.append(
            (
                str(tokens),
                *(
                    f"{seconds[name] / seconds['ours']:.2f}{'' if results[name].fits else ' (out of memory)'}"
                    for name in setups.BASELINES
                ),
                f"{seconds[setups.GENERATOR] / seconds['ours']:.2f}",
                setups.over_best(setup, seconds["ours"]),
            )
        )
    svg = line_figure(lines, x=Axis("tokens of a sequence", log=True), y=Axis("tokens per second over S-1F1B at 1K"))
    return Outcome(
        (
            make_table(
                "adaptis/figure-9", rows, systems=(f"over {name}" for name in (*setups.BASELINES, setups.GENERATOR))
            ),
            _extremes(gains),
        ),
        (Figure("figure-9", "Throughput by sequence length", svg),),
        devices=setups.device(),
    )


_PAPER_9 = {"S-1F1B": "1.54", "I-1F1B": "2.14", "ZB": "1.51", "Mist": "1.27"}


def _extremes(gains: dict[str, list[float]]) -> Table:
    """The least, the largest and the average gain over every system, of the lengths at which it fits."""
    rows = tuple(
        (
            name,
            str(len(each)),
            f"{min(each):.2f}",
            f"{max(each):.2f}",
            f"{setups.mean(each):.2f}",
            _PAPER_9.get(name, ""),
        )
        for name, each in gains.items()
        if each
    )
    return make_table("adaptis/figure-9-extremes", rows)


_COMBINATIONS = (
    ("baseline", (), (76, 73, 75)),
    ("+1", ("placement",), (72, 75, 63)),
    ("+2", ("schedule",), (78, 74, 76)),
    ("+3", ("partition",), (88, 84, 84)),
    ("+1+2", ("placement", "schedule"), (92, 89, 70)),
    ("+1+3", ("placement", "partition"), (95, 95, 92)),
    ("+2+3", ("schedule", "partition"), (96, 91, 92)),
    ("+1+2+3", ("placement", "schedule", "partition"), (100, 100, 100)),
)


def figure_10(options: Options) -> Outcome:
    """Tune placement (1), schedule (2) and partition (3), alone and together: the paper's generator, then ours."""
    tables, figures = [], []
    medium = [setups.setup_of(family, "Medium", 4096, setups.ROUNDS[-1]) for family in setups.FAMILIES]
    for title, tune in ((setups.GENERATOR, setups.generated_s), ("ours", setups.ours_s)):
        values = [
            [
                tune(setup, options, phases, "schedule" in phases)
                if phases
                else setups.seconds_of(setups.run_baseline("S-1F1B", setup))
                for setup in medium
            ]
            for _, phases, _ in _COMBINATIONS
        ]
        best = values[-1]
        shares = [[100 * b / v for b, v in zip(best, row, strict=True)] for row in values]
        rows = tuple(
            (
                name,
                *(cell for share, quoted in zip(row, paper, strict=True) for cell in (f"{share:.0f} %", f"{quoted} %")),
            )
            for (name, _, paper), row in zip(_COMBINATIONS, shares, strict=True)
        )
        names = [name for name, _, _ in _COMBINATIONS]
        svg = bar_figure(
            list(setups.FAMILIES), dict(zip(names, shares, strict=True)), y=Axis("share of the best throughput, %")
        )
        tables.append(
            make_table(
                "adaptis/figure-10",
                rows,
                title=title,
                note=make_note(f"adaptis/figure-10-{title.lower()}"),
                families=(c for family in setups.FAMILIES for c in (family, f"paper: {family}")),
            )
        )
        figures.append(Figure(f"figure-10-{title.lower()}", f"Ablation: {title}", svg))
    return Outcome(tuple(tables), tuple(figures), devices=setups.device())
