"""What `pipeloom train` prints at its end."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from pipeloom.explain.difference import Difference
from pipeloom.explain.difference_page import core_words, steps
from pipeloom.report.any_width import Table
from pipeloom.training import Summary


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
    evaluated = {}
    if summary.evaluations:
        iteration, loss = summary.evaluations[-1]
        evaluated["evaluation loss"] = f"{loss:.4f}, after {iteration} iterations"
    rows = {
        "loss, first and last iteration": f"{summary.loss_first:.4f}, {summary.loss_last:.4f}",
        "fresh plans": f"{summary.plans_fresh} of {summary.iterations} ({share:.1%})",
        "mean gap to the lower bound": f"{summary.mean_gap:.2%}",
        "mean bubble share, planned and measured": (
            f"{summary.mean_planned_bubble_share:.1%}, {summary.mean_measured_bubble_share:.1%}"
        ),
        "plan ready before its use": f"{summary.mean_lead_s * 1e3:.0f} ms",
        **evaluated,
        **{name.replace("_", " "): f"{value:.4g}" for name, value in summary.evaluation.items()},
    }
    for name, text in rows.items():
        numbers.add_row(name, text)
    found = [] if summary.difference is None else [difference_table(summary.difference)]
    told = [Text(summary.advice, style="yellow")] if summary.advice else []
    return Group(compared, *found, numbers, *told)


def difference_table(found: Difference) -> Table:
    """The causes alone, for the terminal."""
    table = Table(
        title="Why an iteration took as long as it did",
        title_justify="left",
        caption=core_words(found).strip() or None,
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("mean", justify="right")
    for words, seconds, _ in steps(found):
        table.add_row(words, f"{seconds * 1e3:.2f} ms")
    return table
