"""Ranks of which one is slow: plans that do not know it, plans that do, and a layout that is made for it."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.slow_task import QUOTAS, build_model, quota_folder, write_run
from pipeloom.layout import ModulePlacement, by_count, replicated, separate
from pipeloom.report import markdown_table
from pipeloom.training import TrainingRun
from pipeloom.training.record import LAYOUTS, Row, read_history, read_lines
from pipeloom.training.relayout import LayoutChange

TITLE = "One rank slower than the others"
_TASK = Path(__file__).parent / "slow_task.py"
_LAYERS = 4
_BLIND, _KNOWN = 12, 24
"""Iterations until speeds are learned, and until a checkpoint at which the layout may change."""
_LAST, _SETTLED = 37, 6
"""All iterations, and those of each stretch that are left out: what was learned before is still being left."""
_BRIEF = 42
"""Iteration at which a rank that was slow for 30 is quick again, after it was known to be slow from the 12th on."""


class Case(NamedTuple):
    """Ranks, how much slower one of them is, where the encoder lies, and what each has of a core (0: layers sleep)."""

    ranks: int
    slower: float
    where: Literal["divided", "on every rank"]
    share: float = 0.0


CASES = tuple(
    Case(ranks, slower, where)
    for where in ("divided", "on every rank")
    for ranks, slower in ((4, 1.2), (4, 1.5), (4, 2.0), (8, 1.5))
)

COMPUTED = tuple(Case(4, slower, where, 0.2) for where in ("divided", "on every rank") for slower in (1.5, 2.0))


def run(cases: Sequence[Case] = CASES, computed: Sequence[Case] = COMPUTED) -> str:
    """Measure, and return the section as Markdown."""
    times = ["unknown, ms", "known, ms", "new layout, ms", "shorter: known", "shorter: new layout"]
    header = ["encoder", "ranks", "slower", *times, "layout changed", "above the bound", "iterations to adapt"]
    text = (
        f"The trainer runs on ranks with layers that sleep ({_LAYERS} layers of each module per rank), "
        "with small messages over gloo. A batch has six documents per rank, of equal sizes in every iteration. "
        f"Until iteration {_BLIND}, plans do not know that rank 1 is slow. Then they do, and from iteration "
        f"{_KNOWN} the layout may change at no cost. Times are medians of iterations by the wall clock. "
        "The bound is that of the last plans, with the known speeds and layout. Late wake-ups on busy "
        "cores are part of the measured times. *Iterations to adapt* counts from the first iteration "
        "that learns speeds to the first that is planned with them."
    )
    parts = [text, markdown_table(header, [_row(setting) for setting in cases]), _brief(Case(4, 1.5, "on every rank"))]
    if computed and (QUOTAS / "cpu.cfs_quota_us").is_file():
        share = computed[0].share
        text = (
            f"Real computation (layers of 128 by 512) under a kernel quota: each rank has {share:.0%} of a "
            "core, and the slow rank has less by its factor. So four ranks do not compete for two cores, "
            "and the planner has the rest. Other conditions are as above."
        )
        parts += [text, markdown_table(header, [_row(setting) for setting in computed])]
    return "\n\n".join(parts)


def _row(setting: Case) -> list[str]:
    rows, changes = _train(setting, _LAST, _BLIND)
    blind, known, new = (
        _median(rows[first + _SETTLED : last]) for first, last in itertools.pairwise((0, _BLIND, _KNOWN, _LAST))
    )
    bound = statistics.median(row.planned_s / (1 + row.gap) for row in rows[_KNOWN + _SETTLED :])
    adapted = next((row.iteration for row in rows if row.slowness), None)
    times = [f"{each * 1e3:.0f}" for each in (blind, known, new)]
    shorter = [f"{1 - each / blind:.1%}" for each in (known, new)]
    changed = "yes" if changes else "no"
    after = "never" if adapted is None else str(adapted - _BLIND)
    return [
        setting.where,
        str(setting.ranks),
        f"x{setting.slower:g}",
        *times,
        *shorter,
        changed,
        f"{new / bound - 1:.1%}",
        after,
    ]


def _brief(setting: Case) -> str:
    rows, _ = _train(setting, _BRIEF + _BLIND, 10**6, until=_BRIEF)
    slow = [row.iteration for row in rows if row.slowness]
    return (
        f"A rank that is slow for 30 iterations after speeds are learned, until iteration {_BRIEF} (4 ranks, x1.5, "
        f"{setting.where}): plans use its speed in iterations {min(slow)} to {max(slow)}. An iteration takes "
        f"{_median(rows[_SETTLED:_BLIND]) * 1e3:.0f} ms before the speed is known, "
        f"{_median(rows[_BLIND + _SETTLED : _BRIEF]) * 1e3:.0f} ms with the known speed, and "
        f"{_median(rows[_BRIEF + _SETTLED :]) * 1e3:.0f} ms after the rank has recovered."
    )


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row.measured_s for row in rows)


def _train(setting: Case, iterations: int, every: int, until: int = 10**6) -> tuple[list[Row], list[LayoutChange]]:
    layers = _LAYERS * setting.ranks
    layout = separate(
        build_model(0, layers).spec, setting.ranks, {"vision": ModulePlacement(sub_microbatch=4)}, by_count
    )
    with tempfile.TemporaryDirectory() as folder:
        fields = {"layers": layers, "slower": setting.slower, "share": setting.share, "last": iterations}
        fields |= {"until": until, "blind": _BLIND}
        placed = layout if setting.where == "divided" else replicated(layout, ["vision"])
        file = write_run(Path(folder), placed, _TASK, iterations, fields, deadline_s=5.0, every=every)
        run = TrainingRun.from_toml(file, runs=Path(folder, "runs"))
        with _quotas(setting):
            run.train()
        changes = read_lines(run.folder / LAYOUTS, LayoutChange) if (run.folder / LAYOUTS).is_file() else []
        return read_history(run.folder / "history.jsonl"), changes


@contextmanager
def _quotas(setting: Case) -> Iterator[None]:
    folders = [quota_folder(rank) for rank in range(setting.ranks)] if setting.share else []
    for each in folders:
        each.mkdir(exist_ok=True)
    try:
        yield
    finally:
        for each in folders:
            each.rmdir()
