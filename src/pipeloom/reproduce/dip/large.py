"""VLM-XL and T2V-XL on thousands of GPUs: Fig. 14 and Table 6."""

from __future__ import annotations

import time

from pipeloom.planner.systems import mfu
from pipeloom.report.figures import Axis, bar_figure
from pipeloom.reproduce.dip.end_to_end import BASELINES, MEGATRON, OPTIMUS, OURS, PUBLISHED, system
from pipeloom.reproduce.dip.setups import (
    LARGE,
    case_of,
    device,
    gain,
    iterations,
    layouts,
    lazily,
    mean,
    seconds_text,
    timed,
)
from pipeloom.reproduce.part import Figure, Options, Outcome, Table


def large(options: Options) -> Outcome:
    """VLM-XL and T2V-XL on thousands of GPUs (Fig. 14, Table 6)."""
    rows, gains, notes = [], list[tuple[str, float, float]](), []
    for label, setup in LARGE.items():
        case = case_of(setup)
        batches = iterations(setup, options, 1)[: None if options.full else 1]
        values: dict[str, float | None] = {}
        share: dict[str, float] = {}
        planning: list[float] = []
        names = [n for n in BASELINES if not (label.startswith("T2V") and n == OPTIMUS)]
        systems = lazily([*names, PUBLISHED, OURS], lambda name, setup=setup: system(setup, name))  # type: ignore[misc]
        for name, one in systems.items():
            found: list[tuple[float, float]] = []
            for seed, groups in batches:
                begin = time.process_time()
                result = None if one is None else timed(one, groups, options.search_s * 4, seed)
                if result is None:
                    found.clear()
                    break
                found.append((result.iteration_s + case.update_s, mfu(case, groups, result.iteration_s)))
                if name == OURS:
                    planning.append(time.process_time() - begin)
            values[name] = mean(s for s, _ in found) if found else None
            share[name] = mean(m for _, m in found) if found else 0.0
        ours = values[OURS]
        assert ours is not None
        for name, value in values.items():
            against = "" if value is None or name == OURS else gain(value, ours)
            paper = {"VLM": "0.36", "T2V": "0.39"}[label[:3]] if name == PUBLISHED else ""
            rows.append(
                (label, name, seconds_text(value), f"{share[name]:.3f}" if value else "", against, paper)
            )
        base = values[MEGATRON]
        if base is not None:
            gains.append((label, base / ours - 1, share[OURS]))
        notes.append(
            f"{label}: layout `{layouts(setup)[0].name}`; planning an iteration took {mean(planning):.1f} CPU s "
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
