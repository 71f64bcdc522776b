"""VLM-XL and T2V-XL on thousands of GPUs: Fig. 14 and Table 6."""

from __future__ import annotations

from pipeloom.planner.systems import mfu
from pipeloom.report.figures import Axis, bar_figure
from pipeloom.reproduce.dip import runs
from pipeloom.reproduce.dip.setups import LARGE, device, gain, mean, seconds_text
from pipeloom.reproduce.part import Figure, Options, Outcome, Table

MOST_SEARCH = 3
"""Times the search time of the smaller models."""


def large(options: Options) -> Outcome:
    """VLM-XL and T2V-XL on thousands of GPUs (Fig. 14, Table 6)."""
    rows, gains, notes = [], list[tuple[str, float, float]](), []
    for label, setup in LARGE.items():
        case = setup.case
        numbers = runs.iterations(options, 1)[: None if options.full else 1]
        values: dict[str, float | None] = {}
        share: dict[str, float] = {}
        planning = 0.0
        for name in (n for n in (*runs.BASELINES, runs.PUBLISHED, runs.OURS) if runs.suits(n, setup)):
            found = runs.all_timed(setup, name, numbers, options.search_s * MOST_SEARCH)
            values[name] = None if found is None else mean(one.seconds + case.update_s for one in found)
            if found is not None:
                used = [
                    mfu(case, setup.groups(*at), one.seconds) for at, one in zip(numbers, found, strict=True)
                ]
                share[name] = mean(used)
                planning = mean(one.processor_s for one in found)
        ours = values[runs.OURS]
        assert ours is not None
        for name, value in values.items():
            against = "" if value is None or name == runs.OURS else gain(value, ours)
            paper = {"VLM": "0.36", "T2V": "0.39"}[label[:3]] if name == runs.PUBLISHED else ""
            rows.append(
                (label, name, seconds_text(value), f"{share[name]:.3f}" if value else "", against, paper)
            )
        base = values[runs.MEGATRON]
        if base is not None:
            gains.append((label, base / ours - 1, share[runs.OURS]))
        notes.append(
            f"{label}: layout `{setup.layouts[0].name}`; planning an iteration took {planning:.1f} CPU s "
            f"(graph and costs included) of an iteration of {ours:.1f} s."
        )
    bars = bar_figure(
        [label for label, *_ in gains], {"gain over Megatron-LM": [g * 100 for _, g, _ in gains]},
        y=Axis("faster by, %"), title="Gain over Megatron-LM interleaved by parameters",
    )  # fmt: skip
    columns = ("setup", "system", "seconds", "MFU", "ours is faster by", "paper: MFU")
    return Outcome(
        (
            Table(
                "Large clusters",
                columns,
                tuple(rows),
                "The paper: up to 82.8 % over its baselines, growing with the pipeline. 64 microbatches a replica are "
                "assumed (not stated); gradient reduction and optimiser step are counted and not overlapped; "
                "recomputation is counted as no useful work. One replica is planned; the others count as equally fast. "
                "The first seed alone, unless `--full`.",
            ),
        ),
        (Figure("figure-14", "Gain at every pipeline size", bars),),
        tuple(notes),
        device(*LARGE.values()),
    )
