"""What a training run leaves behind: summary.json and every plan as text."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipeloom.errors import InputError
from pipeloom.io import write_text
from pipeloom.plan import to_text
from pipeloom.runtime import StepReport


class Summary(msgspec.Struct, frozen=True):
    """``summary.json``: a training run in numbers. Means are over iterations.

    ``mean_planned_s`` is simulated from costs; ``mean_measured_s`` is real computation on this machine, whose cores
    the ranks may have to share.
    """

    name: str
    iterations: int
    loss_first: float
    """Loss of the first iteration."""
    loss_last: float
    """Loss of the last iteration."""
    plans_fresh: int
    """Iterations that ran the plan made for their own batch."""
    plans_fallback: int
    """Iterations that ran the static fallback plan."""
    fallback_iterations: dict[int, str]
    """Which ones, and why."""
    mean_gap: float
    """Planned time over the lower bound, minus one."""
    mean_planned_s: float
    mean_measured_s: float
    mean_planned_bubble_share: float
    mean_measured_bubble_share: float
    mean_lead_s: float
    """How long before its use a fresh plan was ready."""
    mean_search_s: float
    elapsed_s: float
    """Wall time of all iterations."""
    num_ranks: int
    num_cores: int
    num_parameters: int
    seed: int
    layout: str
    """Digest of the layout."""
    digit_accuracy: float | None = None
    """Share of digits read right in held-out documents with images (where the task evaluates it)."""
    exact_match: float | None = None
    """Share of held-out documents with images that are read without a mistake."""
    evaluation: dict[str, float] = {}
    """All that the task's ``evaluate`` returned."""
    comparison: dict[str, float] = {}
    """Mean planned seconds of each system on the same batches, costs and simulator."""
    comparison_batches: int = 0
    format: str = "pipeloom.summary/1"


WRITTEN = ("summary.json", "trace.json", "timeline.html", "comparison.html", "comparison.svg")


def fresh_folder(folder: Path) -> None:
    """Make a run's folder, and take away what an earlier run of this name left, so that nothing is taken for new.

    Raises
    ------
    InputError
        When the folder cannot be made or emptied.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*(folder / name for name in WRITTEN), *(folder / "plans").glob("*.plan")):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            str(folder), f"cannot be made or emptied ({error.strerror})", "give another --runs"
        ) from error


@dataclass
class Recorder:
    """Collects the reports of rank 0 and writes plans as they come."""

    folder: Path
    reports: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the folder for the plans."""
        (self.folder / "plans").mkdir(exist_ok=True)

    def add(self, report: StepReport) -> None:
        """Keep a report, and write its plan."""
        assert report.answer is not None
        path = self.folder / "plans" / f"{report.iteration:05d}.plan"
        try:
            path.write_text(to_text(report.answer.plan))
        except OSError as error:
            raise InputError(
                str(path), f"cannot be written ({error.strerror})", "make room, or use --runs"
            ) from error
        self.reports.append(report)

    def summarise(
        self,
        *,
        name: str,
        elapsed_s: float,
        num_ranks: int,
        num_parameters: int,
        seed: int,
        layout: str,
        comparison: Mapping[str, float],
        comparison_batches: int,
    ) -> Summary:
        """Write ``summary.json`` and return it."""
        reports = self.reports
        answers = [report.answer for report in reports if report.answer is not None]
        fresh = [report for report in reports if report.fresh]
        return self.write(Summary(
            name=name,
            iterations=len(reports),
            loss_first=reports[0].loss,
            loss_last=reports[-1].loss,
            plans_fresh=len(fresh),
            plans_fallback=len(reports) - len(fresh),
            fallback_iterations={report.iteration: report.reason for report in reports if not report.fresh},
            mean_gap=statistics.fmean(answer.gap for answer in answers),
            mean_planned_s=statistics.fmean(answer.planned_ns / 1e9 for answer in answers),
            mean_measured_s=statistics.fmean(report.measured_s for report in reports),
            mean_planned_bubble_share=statistics.fmean(answer.bubble_share for answer in answers),
            mean_measured_bubble_share=statistics.fmean(report.measured_bubble_share for report in reports),
            mean_lead_s=statistics.fmean(report.lead_s for report in fresh) if fresh else 0.0,
            mean_search_s=statistics.fmean(answer.search_s for answer in answers),
            elapsed_s=elapsed_s,
            num_ranks=num_ranks,
            num_cores=len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
            num_parameters=num_parameters,
            seed=seed,
            layout=layout,
            comparison=dict(comparison),
            comparison_batches=comparison_batches,
        ))  # fmt: skip

    def write(self, summary: Summary) -> Summary:
        """Write ``summary.json`` and return what was written."""
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        write_text(self.folder / "summary.json", text + "\n")
        return summary


def closing_tables(summary: Summary) -> Group:
    """What is printed at the end: the comparison, then the run in numbers."""
    compared = Table(title="Iteration time on the same batches", title_justify="left")
    for name in ("system", "mean planned", "per-batch plan is faster by"):
        compared.add_column(name, justify="left" if name == "system" else "right")
    best = summary.comparison.get("per-batch plan", 0.0)
    for name, seconds in summary.comparison.items():
        gain = "" if name == "per-batch plan" or not best else f"{seconds / best - 1:.1%}"
        compared.add_row(name, f"{seconds * 1e3:.1f} ms", gain)
    compared.add_row("per-batch plan, measured", f"{summary.mean_measured_s * 1e3:.1f} ms", "")
    compared.caption = (
        f"Planned: simulated from measured layer costs, {summary.comparison_batches} batches. Measured: all "
        f"{summary.iterations} iterations, {summary.num_ranks} ranks on {summary.num_cores} cores."
    )
    compared.caption_justify = "left"
    numbers = Table(title="This run", title_justify="left", show_header=False)
    share = summary.plans_fresh / max(summary.iterations, 1)
    rows = {
        "loss, first and last iteration": f"{summary.loss_first:.4f}, {summary.loss_last:.4f}",
        "fresh plans": f"{summary.plans_fresh} of {summary.iterations} ({share:.1%})",
        "mean gap to the lower bound": f"{summary.mean_gap:.2%}",
        "mean bubble share, planned and measured": (
            f"{summary.mean_planned_bubble_share:.1%}, {summary.mean_measured_bubble_share:.1%}"
        ),
        "plan ready before its use": f"{summary.mean_lead_s * 1e3:.0f} ms",
        **{name.replace("_", " "): f"{value:.4g}" for name, value in summary.evaluation.items()},
    }
    for name, text in rows.items():
        numbers.add_row(Text(name), Text(text))
    return Group(compared, numbers)
