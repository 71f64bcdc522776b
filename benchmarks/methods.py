"""The search methods side by side: gap over time, families by methods, as a table and a figure.

Every method but the default is run once for the longest time, and what it had earlier is read from its trace; the
default plans its annealing by the time it is told, so it is run anew for each.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from pipeloom.io import make_folder, write_text
from pipeloom.report import markdown_table
from pipeloom_lab.figures import Axis, Points, panel_figure
from pipeloom_lab.library_runs import Run, run_library
from pipeloom_lab.solvers import compile_methods

TITLE = "Search methods"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "search-gap-over-time.svg"
_SEEDS = {
    "vlm-s": 1,
    "vlm-s-ckpt-m1.5": 1,
    "vlm-s-k3-m2.5": 1,
    "t2v-s": 1,
    "vlm-l-k2": 1,
    "vlm-l-ckpt-k2-m1.5": 1,
    "vlm-xl": 1,
}
"""Families and how many seeds of each: about six minutes of one core in all."""
_TRACED = ("portfolio", "mcts", "mcts priority", "depth first", "random")
_TIMES = (0.1, 1.0, 10.0)
_MOMENTS = np.geomspace(0.02, _TIMES[-1], 80)

Gaps = dict[str, list[float]]
"""By method, of every seed, in per cent."""


def run() -> str:
    """Measure, draw, and return the section as Markdown."""
    compile_methods(_TRACED)
    return report({family: measure(family, num_seeds) for family, num_seeds in _SEEDS.items()})


def measure(family: str, num_seeds: int, times: tuple[float, ...] = _TIMES) -> dict[str, list[list[Run]]]:
    """Runs by method and seed; of the default one per time, of the others one."""
    runs: dict[str, list[list[Run]]] = defaultdict(list)
    for seed in range(num_seeds):
        runs["default"].append(list(run_library([family], ["default"], budgets_s=times, seeds=[seed])))
        for made in run_library([family], _TRACED, budgets_s=times[-1:], seeds=[seed]):
            runs[made.method].append([made])
    return runs


def report(measured: dict[str, dict[str, list[list[Run]]]], times: tuple[float, ...] = _TIMES) -> str:
    """Tables and figure of what `measure` gave for every family."""
    rows, behind, slower, panels = [], [], [], {}
    for family, runs in measured.items():
        gaps = {moment: gaps_at(runs, number, moment) for number, moment in enumerate(times)}
        for moment, by_method in gaps.items():
            rows.append([family, f"{moment:g}", *(f"{statistics.median(g):.2f}" for g in by_method.values())])
            behind += _not_ahead(family, moment, by_method)
        for method in ("mcts", "mcts priority"):
            pairs = zip(gaps[times[0]]["default"], gaps[times[-1]][method], strict=True)
            slower += [
                f"{family}/{seed}: {ours:.2f} against {theirs:.2f} of {method}"
                for seed, (ours, theirs) in enumerate(pairs)
                if ours > theirs
            ]
        panels[family] = curves(runs)
    make_folder(FIGURE.parent)
    write_text(
        FIGURE,
        panel_figure(
            panels,
            x=Axis("CPU seconds", log=True, low=0.02, high=times[-1]),
            y=Axis("gap, %", low=0),
            columns=3,
            style="steps",
        ),
    )
    methods = ["default", *_TRACED]
    seeds = ", ".join(f"{family} {len(runs['default'])}" for family, runs in measured.items())
    claims = [
        f"On every instance, the default needs at most {times[0]:g} s for what a tree search reaches in "
        f"{times[-1]:g} s: " + ("yes." if not slower else f"no: {'; '.join(slower)}."),
        "In the median of every family, the default is at least as good as every published search: "
        + ("yes." if not behind else f"no: {'; '.join(behind)}."),
    ]
    return "\n\n".join(
        (
            f"Median gap to the lower bound in per cent, by family and CPU seconds on one thread (seeds: {seeds}):",
            markdown_table(["family", "s", *methods], rows),
            *claims,
            f"![Gap over time of every method](../figures/{FIGURE.name})",
            "Medians of the gap to the lower bound. The line of the default comes from its longest run.",
        )
    )


def gaps_at(runs: dict[str, list[list[Run]]], number: int, moment: float) -> Gaps:
    """The gap of every method and seed after some time, in per cent."""
    gaps = {"default": [100 * made[number].gap for made in runs["default"]]}
    return gaps | {method: [100 * made[0].gap_at(moment) for made in runs[method]] for method in _TRACED}


def _not_ahead(family: str, moment: float, gaps: Gaps) -> list[str]:
    ours = statistics.median(gaps["default"])
    return [
        f"{family} after {moment:g} s: {ours:.2f} against {statistics.median(theirs):.2f} of {method}"
        for method, theirs in gaps.items()
        if method not in ("default", "portfolio") and statistics.median(theirs) < ours
    ]


def curves(runs: dict[str, list[list[Run]]]) -> dict[str, Points]:
    """Median gap over time, from the moment on at which every seed has a schedule."""
    lines: dict[str, Points] = {}
    for method, by_seed in runs.items():
        if method == "portfolio":
            continue
        longest = [made[-1] for made in by_seed]
        first = max(run.trace[0][0] for run in longest)
        moments = [first, *(float(m) for m in _MOMENTS if m > first)]
        lines[method] = moments, [statistics.median(100 * r.gap_at(m) for r in longest) for m in moments]
    return lines
