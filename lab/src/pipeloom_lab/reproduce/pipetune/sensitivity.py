"""What the reductions rest on: how large the untuned run's microbatches are, which its memory decides."""

from __future__ import annotations

from pipeloom.report.figures import Axis, line_figure
from pipeloom.tuning import TuningSpec
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome
from pipeloom_lab.reproduce.pipetune import setups
from pipeloom_lab.reproduce.texts import make_note, make_table

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
        case = setups.emulated(setup, recomputed=strategy, most_contexts=max(SIZES))
        for contexts in SIZES:
            if contexts > case.max_contexts:
                for each in rows.values():
                    each.append((text, str(contexts), "does not fit", *[""] * 4))
                break
            for mixture in setups.MIXTURES:
                seconds = _mean(case, mixture, contexts, options)
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


def _mean(case: setups.Emulated, mixture: str, contexts: int, options: Options) -> dict[str, float]:
    """Mean seconds of Original, Balanced, PipeTune and ours with microbatches of at most so many contexts."""
    settings = setups.ends_of(case.setup) | {setups.OURS: TuningSpec()}
    ways = {name: setups.tuned_by(case, spec, contexts) for name, spec in settings.items()}
    return setups.means(setups.seconds_by(case.setup, mixture, options, ways))
