"""VLM-XL and T2V-XL on thousands of GPUs: Fig. 14 and Table 6."""

from __future__ import annotations

from pipeloom.compare.baseline import mfu
from pipeloom.errors import InfeasibleError
from pipeloom_lab.figures import Axis, bar_figure
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import LARGE, PaperSetup, device, gain, mean, seconds_text
from pipeloom_lab.reproduce.part import Figure, Options, Outcome
from pipeloom_lab.reproduce.texts import make_table

FORMS = (runs.PUBLISHED, runs.FROM_UNIFORM, runs.NO_SEARCH)
"""Of DIP here; the others take as long again, and are in the smaller comparisons."""

PIPELINES = (
    ("VLM-XL, 8 and 16 ranks", "VLM-XL, 8192 GPUs", "VLM-XL, 16384 GPUs"),
    ("T2V-XL, 4 and 8 ranks", "T2V-XL, 3072 GPUs", "T2V-XL, 6144 GPUs"),
)
"""Each model's two setups, by the length of the pipeline."""


def large(options: Options) -> Outcome:
    """VLM-XL and T2V-XL on thousands of GPUs (Fig. 14, Table 6)."""
    rows, gains, notes = [], list[tuple[str, float]](), []
    for label, setup in LARGE.items():
        numbers = runs.iterations(options, None if options.full else 1)[: None if options.full else 1]
        names = [n for n in (*runs.BASELINE_TITLES, *FORMS, runs.OURS) if runs.suits(n, setup)]
        values = {name: mean_and_mfu(setup, name, numbers, options.search_s) for name in names}
        ours = values[runs.OURS]
        forms = {name: value[0] for name in FORMS if (value := values[name]) is not None}
        best = min(forms, key=lambda name: forms[name], default="")
        for name, value in values.items():
            paper = {"VLM": "0.36", "T2V": "0.39"}[label[:3]] if name == runs.PUBLISHED else ""
            shown = f"{runs.BEST_FORM}: {name}" if name == best else name
            if value is None:
                rows.append((label, shown, seconds_text(None), "", "", paper))
                continue
            against = "" if ours is None or name == runs.OURS else gain(value[0], ours[0])
            rows.append((label, shown, f"{value[0]:.2f}", f"{value[1]:.3f}", against, paper))
        base = values[runs.MEGATRON]
        if base is not None and ours is not None:
            gains.append((label, base[0] / ours[0] - 1))
        notes.append(f"{label}: layout `{_layout_name(setup)}`. {runs.chunks_note(setup)}")
    bars = bar_figure(
        [label for label, _ in gains],
        {"gain over Megatron-LM": [g * 100 for _, g in gains]},
        y=Axis("faster by, %"),
        title="Gain over Megatron-LM interleaved by parameters",
    )
    by_setup = dict(gains)
    growth = [
        (model, f"{by_setup[few] * 100:+.1f} %", f"{by_setup[many] * 100:+.1f} %", "grows")
        for model, few, many in PIPELINES
        if few in by_setup and many in by_setup
    ]
    grows = all(by_setup[few] < by_setup[many] for _, few, many in PIPELINES if few in by_setup and many in by_setup)
    which = "" if options.full else " The first iteration of the first seed alone, unless `--full`."
    return Outcome(
        (
            make_table("dip/figure-14-setups", rows, rule=runs.rule(options), which=which),
            make_table(
                "dip/figure-14-growth",
                growth,
                growth_note="" if grows else "The paper's growth with the pipeline is not reproduced for every model.",
            ),
        ),
        (Figure("figure-14", "Gain at every pipeline size", bars),) if gains else (),
        tuple(notes),
        device(*LARGE.values()),
    )


def mean_and_mfu(
    setup: PaperSetup, name: str, numbers: list[tuple[int, int]], search_s: float
) -> tuple[float, float] | None:
    """Mean seconds with the update of the weights, and mean MFU; None: an iteration does not fit."""
    found = runs.all_timed(setup, name, numbers, search_s)
    if found is None:
        return None
    used = [mfu(setup.setting, setup.groups(*at), one.seconds) for at, one in zip(numbers, found, strict=True)]
    return mean(one.seconds for one in found), mean(used)


def _layout_name(setup: PaperSetup) -> str:
    try:
        return setup.layouts[0].name
    except InfeasibleError:
        return "none fits"
