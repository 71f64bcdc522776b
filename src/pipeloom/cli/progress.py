"""Display of a training run: a live table on a terminal, plain lines elsewhere, and the results at the end."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeloom.cli.output import console_to
from pipeloom.errors import visible_line
from pipeloom.explain.difference import Difference
from pipeloom.explain.difference_page import core_words, steps
from pipeloom.heartbeat import EVERY_S, announced, doing, heartbeat
from pipeloom.printing import last_printed_s
from pipeloom.report.any_width import Table as WideTable
from pipeloom.runtime import StepReport
from pipeloom.training import Display, Summary

_NUM_ROWS = 12
_PLAIN_EVERY = 20
_LASTING = 20
"""Iterations for which ranks must have been slow before this is reported."""

COLUMNS = {
    "step": 5,
    "loss": 6,
    "rate": 7,
    "tok/s": 5,
    "mb": 3,
    "plan/run ms": 11,
    "gap": 5,
    "idle %": 7,
    "MFU": 3,
    "plan, ahead by": 0,
}
"""Columns of an iteration and their widths: 80 characters a line, including separators."""
_OMITTED_FIRST = ("MFU", "rate", "mb", "tok/s", "gap", "idle %", "plan/run ms")
"""Columns to omit on a narrow terminal, in this order."""
_LAST = 14
"""Least width of the last column."""
LEGEND = (
    "mb: microbatches; plan/run: planned, measured time; gap: above the lower bound;\n"
    "idle: bubbles, planned and measured"
)


def _cells(report: StepReport) -> tuple[str, ...]:
    """Return the cells of one iteration, one for each column."""
    answer = report.answer
    assert answer is not None
    return (
        str(report.iteration),
        f"{report.loss:.4f}"[:6],
        "" if report.learning_rate is None else f"{report.learning_rate:.2g}",
        _short(report.num_tokens / report.step_s) if report.step_s else "",
        str(report.num_microbatches),
        f"{answer.planned_ns / 1e6:.0f}/{report.measured_s * 1e3:.0f}",
        f"{answer.gap:.1%}",
        f"{answer.bubble_share * 100:.0f}/{report.measured_bubble_share * 100:.0f}",
        "" if report.mfu is None else f"{report.mfu:.0%}",
        _plan(report),
    )


def _visible_columns(width: int) -> list[int]:
    """Return the numbers of the columns that fit a terminal of this width."""
    names = list(COLUMNS)
    for name in _OMITTED_FIRST:
        if sum(COLUMNS[kept] + 1 for kept in names) + _LAST <= width:
            break
        names.remove(name)
    return [number for number, name in enumerate(COLUMNS) if name in names]


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 9999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}G"


def _plan(report: StepReport) -> str:
    if not report.fresh:
        return f"fallback: {report.reason}"
    lead_ms = report.lead_s * 1e3
    return f"fresh, {lead_ms:.0f} ms" if lead_ms >= 0 else f"fresh, late by {-lead_ms:.0f} ms"


def _line(words: Iterable[str]) -> str:
    return " ".join(f"{word:>{width}}" for word, width in zip(words, COLUMNS.values(), strict=True))


@dataclass(frozen=True)
class Terminal(Display):
    """Shows a run on standard output, or on standard error to leave standard output free."""

    to_stderr: bool = False

    def say(self, text: str, *, warning: bool = False) -> None:
        """Print a line."""
        self._console().print(text, style="yellow" if warning else None)
        announced(text)

    @contextmanager
    def working(self, title: str) -> Iterator[Callable[[str, float | None], None]]:
        """Show a bar with the elapsed time, if on a terminal."""
        console = self._console()
        if not console.is_terminal:
            yield lambda text, _share: doing(f"{title}: {text}")
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}", markup=False),
        )
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=None, what="")
            yield lambda text, share: bar.update(
                task, total=None if share is None else 1.0, completed=share or 0.0, what=text
            )

    @contextmanager
    def iterations(self, total: int, first: int) -> Iterator[Callable[[StepReport], None]]:
        """Show each finished iteration."""
        with Progress(self._console(), total, first) as progress, heartbeat("training"):
            yield progress.show

    def close(self, summary: Summary) -> None:
        """Print the results of the run."""
        self._console().print(summary_tables(summary))

    def _console(self) -> Console:
        return _console_to(self.to_stderr)


@functools.cache
def _console_to(to_stderr: bool) -> Console:
    """Return one console for all, so that lines are printed above a live table."""
    return console_to(to_stderr=to_stderr)


class Progress:
    """Shows finished iterations. ``total`` is the number of all iterations, ``first`` the number of earlier ones."""

    def __init__(self, console: Console, total: int, first: int = 0) -> None:
        self._console, self._total, self._first = console, total, first
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_NUM_ROWS)
        self._fallbacks: list[int] = []
        self._last_reason = ""
        self._slow: frozenset[int] = frozenset()
        self._slow_reported = self._slow
        self._slow_since = first
        self._begin = time.monotonic()
        self._count = first
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        else:
            self._console.print(LEGEND)
            self._console.print(_line(COLUMNS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, report: StepReport) -> None:
        """Add an iteration."""
        self._count += 1
        doing(f"training, iteration {report.iteration + 1}")
        row = _cells(report)
        self._rows.append(row)
        self._report_speeds(report)
        if not report.fresh:
            self._fallbacks.append(report.iteration)
            self._last_reason = report.reason
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
        elif (
            self._count == self._first + 1
            or self._count % _PLAIN_EVERY == 0
            or self._count == self._total
            or not report.fresh
            or time.monotonic() - last_printed_s() > EVERY_S
        ):
            self._console.print(visible_line(_line(row)), soft_wrap=True)

    def _report_speeds(self, report: StepReport) -> None:
        """Report which ranks the plans treat as slow or fast, once that has lasted and changed."""
        found = {rank: factor for rank, factor in enumerate(report.correction.slowness) if factor != 1.0}
        if found.keys() != self._slow:
            self._slow, self._slow_since = frozenset(found), report.iteration
        # If ranks share cores, the slow rank changes often: a line for each change would bury the rows.
        if self._slow == self._slow_reported or report.iteration < self._slow_since + _LASTING - 1:
            return
        self._slow_reported = self._slow
        ranks = ", ".join(f"rank {rank} takes {factor:.2f} times as long" for rank, factor in found.items())
        what = f"so that {ranks} as most" if found else "as if all ranks were alike"
        self._console.print(
            f"iteration {report.iteration}: since iteration {self._slow_since} planned {what}", soft_wrap=True
        )

    def _render(self) -> Group:
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
        numbers = _visible_columns(self._console.width)
        for name, width in (list(COLUMNS.items())[number] for number in numbers):
            table.add_column(name, justify="right" if width else "left", no_wrap=True, min_width=width)
        for row in self._rows:
            table.add_row(
                *(Text(row[number]) for number in numbers), style="yellow" if row[-1].startswith("fallback") else ""
            )
        elapsed = time.monotonic() - self._begin
        left = elapsed / (self._count - self._first) * (self._total - self._count)
        status = Text(f" {self._count}/{self._total} iterations, {elapsed:.0f} s, about {left:.0f} s left; ")
        if self._fallbacks:
            shown = ", ".join(map(str, self._fallbacks[-8:]))
            # The table cuts long reasons.
            last = visible_line(self._last_reason)
            status.append(f"{len(self._fallbacks)} on a fallback plan ({shown}), the last: {last}", style="yellow")
        else:
            status.append("every plan fresh", style="green")
        # A bar by itself ends without a line break.
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=self._total, completed=self._count, width=min(60, self._console.width - 2)))
        return Group(table, bar, status, Text(LEGEND, style="dim"))


def summary_tables(summary: Summary) -> Group:
    """Return the tables at the end of a run: the comparison, then the numbers of the run."""
    columns = ["system", "mean planned", "per-batch plan is faster by"]
    waiting = summary.waiting
    if waiting is not None:
        columns += ["on waiting ranks (planned)", "faster by (planned)"]
    compared = WideTable(*columns, title="Iteration time on the same batches")

    def faster(seconds: dict[str, float], name: str) -> str:
        best = seconds.get("per-batch plan", 0.0)
        return "" if name == "per-batch plan" or not best else f"{seconds[name] / best - 1:.1%}"

    for name, seconds in summary.comparison.items():
        cells = [f"{seconds * 1e3:.1f} ms", faster(summary.comparison, name)]
        if waiting is not None:
            planned, measured = waiting.mean_planned_s, waiting.mean_measured_s
            gain = f"{faster(measured, name)} ({faster(planned, name)})" if faster(measured, name) else ""
            cells += [f"{measured[name] * 1e3:.1f} ms ({planned[name] * 1e3:.1f})", gain]
        compared.add_row(name, *cells)
    compared.add_row("per-batch plan, real computation", f"{summary.mean_measured_s * 1e3:.1f} ms")
    compared.caption = (
        f"Planned: simulated from measured layer costs, {summary.comparison_batches} batches. Real computation: all "
        f"{summary.iterations} iterations, {summary.num_ranks} ranks on {summary.num_cores} cores."
    )
    if waiting is not None:
        compared.caption += (
            f" Waiting ranks: measured on {waiting.batches} of the batches; every rank waits for the measured cost of "
            f"each task, {waiting.stretch:.3g} times as long, instead of computing."
        )
    if summary.num_cores < summary.num_ranks:
        compared.caption += " Real computation takes longer, because ranks share cores."
    numbers = WideTable("", "", title="This run", left=(0, 1), show_header=False)
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
    advice = [Text(summary.advice, style="yellow")] if summary.advice else []
    return Group(compared, *found, numbers, *advice)


def difference_table(found: Difference) -> WideTable:
    """Return the causes of an iteration's time, for the terminal."""
    caption = core_words(found).strip() or None
    table = WideTable("", "mean", title="Why an iteration took as long as it did", caption=caption)
    for words, seconds, _ in steps(found):
        table.add_row(words, f"{seconds * 1e3:.2f} ms")
    return table
