"""Files of a training run: summary.json, history.jsonl, and plans as text."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeloom.bounds import Finite, Magnitude, Number, NumBytes, Seconds, Seed, SignedSeconds
from pipeloom.errors import InputError
from pipeloom.explain.difference import Difference
from pipeloom.files import open_regular
from pipeloom.io import write_text
from pipeloom.kernels import num_cores
from pipeloom.outputs import writing
from pipeloom.plan import to_text
from pipeloom.runtime import StepReport
from pipeloom.runtime.train.evaluate import EvaluationResult


class WaitingRanks(msgspec.Struct, frozen=True):
    """Batches under each system on ranks that wait instead of computing. Means are over batches."""

    mean_planned_s: dict[str, Finite]
    """Simulated from the costs that the ranks waited for."""
    mean_measured_s: dict[str, Finite]
    batches: NumBytes
    stretch: Finite
    """Factor by which the ranks waited longer than the costs say. The means are divided by it."""


class Summary(msgspec.Struct, frozen=True):
    """``summary.json``: a training run in numbers. Means are over iterations.

    ``mean_planned_s`` is simulated from costs. ``mean_measured_s`` is measured on this machine, whose cores the
    ranks may share.
    """

    name: str
    iterations: NumBytes
    resumed_at: tuple[NumBytes, ...]
    """First iteration after each continuation from a checkpoint."""
    loss_first: Finite
    """Loss of the first iteration."""
    loss_last: Finite
    """Loss of the last iteration."""
    plans_fresh: NumBytes
    """Iterations that ran the plan made for their own batch."""
    plans_fallback: NumBytes
    """Iterations that ran the static fallback plan."""
    fallback_iterations: dict[NumBytes, str]
    """The iterations that ran the fallback plan, with the reason."""
    mean_gap: Finite
    """Planned time over the lower bound, minus one."""
    mean_planned_s: Finite
    mean_measured_s: Finite
    mean_planned_bubble_share: Finite
    mean_measured_bubble_share: Finite
    mean_lead_s: Finite
    """Mean seconds from the completion of a fresh plan to its use."""
    mean_search_s: Finite
    elapsed_s: Finite
    """Wall time in seconds of the last start from its first iteration on, and of the iterations of earlier starts."""
    num_ranks: NumBytes
    num_cores: NumBytes
    num_parameters: NumBytes
    seed: Seed
    layout: str
    """Digest of the layout."""
    evaluation: dict[str, Finite] = {}
    """The numbers that the task's ``evaluate`` returned. The file has null for those that are not finite."""
    comparison: dict[str, Finite] = {}
    """Mean planned seconds of each system on the same batches, costs and simulator."""
    comparison_batches: NumBytes = 0
    waiting: WaitingRanks | None = None
    """Null unless ``log.waiting_s`` is set."""
    advice: str = ""
    """What to do if a baseline is planned to be faster; empty otherwise."""
    evaluations: tuple[tuple[NumBytes, Finite], ...] = ()
    """Finished iterations and loss of each evaluation during training."""
    difference: Difference | None = None
    """Difference of measured and planned time over the analyzed iterations; null if none was analyzed."""
    samples_skipped: NumBytes = 0
    """Damaged samples that were skipped."""
    format: str = "pipeloom.summary/1"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of ``history.jsonl``: the numbers of an iteration."""

    iteration: Number
    loss: Finite
    gradient_norm: Finite
    num_microbatches: Number
    planned_s: Seconds
    """Simulated from costs."""
    measured_s: Seconds
    """Measured on this machine."""
    gap: Finite
    planned_bubble_share: Finite
    measured_bubble_share: Finite
    search_s: Seconds
    lead_s: SignedSeconds
    """Seconds from the completion of the plan to its use. Negative: seconds that the plan was waited for or made."""
    fresh: bool
    reason: str
    start: Number
    """Number of restarts of the run before this iteration."""
    learning_rate: Finite | None = None
    """Rate of the first parameter group on rank 0."""
    num_tokens: NumBytes = 0
    """Tokens in the sequences of the whole batch."""
    step_s: Seconds = 0.0
    """Wall time in seconds, including the wait for the plan and the optimizer step."""
    tokens_per_s: Finite | None = None
    """Tokens per second of wall time."""
    mfu: Finite | None = None
    """Operations of the model over the peak of the devices in that time; absent if the peak is unknown."""
    num_skipped: Number = 0
    """Damaged samples that were skipped in the batch."""
    slowness: tuple[Magnitude, ...] = ()
    """For each pipeline rank, its compute time relative to most ranks in the plan. Empty: all alike."""


@dataclass(frozen=True)
class RunFacts:
    """The part of a summary that does not come from iterations."""

    name: str
    num_ranks: int
    num_parameters: int
    seed: int
    layout: str
    """Digest of the layout."""


HISTORY = "history.jsonl"
EVALUATIONS = "evaluations.jsonl"
LAYOUTS = "layouts.jsonl"
TENSORBOARD = "tensorboard"
RESULTS = ("summary.json", "trace.json", "timeline.html", "comparison.html", "comparison.svg", "difference.html")
"""Files that are written after training."""
WRITTEN = (*RESULTS, "setup.json", "layout.json", "layers.json", HISTORY, EVALUATIONS, LAYOUTS)
_KEPT = frozenset({HISTORY, EVALUATIONS, LAYOUTS, "setup.json"})
"""Files that a resumed run continues."""
_MEANS = ("gap", "planned_s", "measured_s", "planned_bubble_share", "measured_bubble_share", "search_s")
"""Fields of a row whose means are in the summary."""
_OF_SYSTEMS = ("comparison", "comparison_batches", "waiting", "advice", "difference")
"""Fields of a summary that come from the reports of one start."""
_MAY_DIVERGE = ("loss", "gradient_norm")
"""Fields that are not finite if training diverges."""
_LOG = logging.getLogger(__name__)
# Most iterations whose whole reports are kept, evenly spread; rows are kept of all.
_MOST_REPORTS = 64


def check_folder(folder: Path, *, go_on: bool = False) -> None:
    """Raise `InputError` if a run's folder contains something that the run cannot use; see `fresh_folder`."""
    kept = _KEPT if go_on else frozenset()
    for path in (folder / name for name in kept):
        # A link may point to a user's file, to which lines would be appended.
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise InputError(str(path), "is not a regular file", "remove it")
    for path in (folder / "plans", folder / TENSORBOARD):
        if os.path.lexists(path) and not path.is_dir():
            raise InputError(str(path), "is not a folder", "remove it")


def fresh_folder(folder: Path, *, go_on: bool = False) -> None:
    """Create a run's folder, and remove the files of an earlier run of this name; raise `InputError` if that fails.

    With ``go_on``, the run is resumed: its plans, history and measurements remain. Its results remain until the
    `Recorder` adds an iteration.
    """
    check_folder(folder, go_on=go_on)
    results = (name for name in RESULTS if (folder / name).is_file() and not (folder / name).is_symlink())
    kept = {*_KEPT, *results} if go_on else set[str]()
    stale = [folder / name for name in WRITTEN if name not in kept]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        events = (*(folder / "plans").glob("*.plan"), *(folder / TENSORBOARD).glob("events.out.tfevents.*"))
    for old in (*stale, *(() if go_on else events)):
        with writing(old):
            old.unlink(missing_ok=True)


@dataclass
class Totals:
    """Sums over all iterations for the summary, in constant memory."""

    count: int = 0
    loss_first: float = 0.0
    loss_last: float = 0.0
    num_skipped: int = 0
    fallbacks: dict[int, str] = field(default_factory=dict)
    """The iterations that ran the fallback plan, with the reason."""
    resumed_at: list[int] = field(default_factory=list)
    _sums: Counter[str] = field(default_factory=Counter)
    _lead_s: float = 0.0
    _start: int = 0

    def add(self, row: Row) -> None:
        """Add an iteration."""
        if not self.count:
            self.loss_first = row.loss
        elif row.start != self._start:
            self.resumed_at.append(row.iteration)
        self.count, self.loss_last, self._start = self.count + 1, row.loss, row.start
        self.num_skipped += row.num_skipped
        for name in _MEANS:
            self._sums[name] += getattr(row, name)
        if row.fresh:
            self._lead_s += row.lead_s
        else:
            self.fallbacks[row.iteration] = row.reason

    def mean(self, name: str) -> float:
        """Return the mean of a field over all iterations."""
        return self._sums[name] / self.count

    @property
    def mean_lead_s(self) -> float:
        """Mean of ``lead_s`` over the iterations that ran their own plan."""
        num_fresh = self.count - len(self.fallbacks)
        return self._lead_s / num_fresh if num_fresh else 0.0


@dataclass
class Recorder:
    """Collects the reports of rank 0, and writes plans and history.

    ``first_iteration`` is that of this start. Later rows of the history belong to lost iterations and are removed. The
    newest ``num_plans`` plans are kept.
    """

    folder: Path
    first_iteration: int = 0
    num_plans: int = 1000
    _totals: Totals = field(init=False, default_factory=Totals)
    reports: list[StepReport] = field(init=False, default_factory=list)
    evaluations: list[EvaluationResult] = field(init=False, default_factory=list)
    _stride: int = field(init=False, default=1)
    _start: int = field(init=False, default=0)
    _earlier_s: float = field(init=False, default=0.0)
    """Wall time of the iterations of earlier starts in seconds."""
    _has_trained: bool = field(init=False, default=False)
    """Whether this start has added an iteration."""

    def __post_init__(self) -> None:
        """Create the folder for the plans, and read the history of earlier starts."""
        self._drop_plans(self.first_iteration)
        path = self.folder / HISTORY
        rows: list[Row] = []
        if self.first_iteration:
            found = read_history(path) if path.exists() else []
            self._start = 1 + max((row.start for row in found), default=0)
            rows = [row for row in found if row.iteration < self.first_iteration]
            if len(rows) != self.first_iteration:
                has = f"has {len(rows)} of the {self.first_iteration} iterations before the checkpoint"
                _LOG.warning("%s: %s; the summary leaves out the others", path, has)
        for row in rows:
            self._totals.add(row)
        self._earlier_s = sum(row.step_s for row in rows)
        write_text(path, "".join(_line(row) for row in rows))
        path = self.folder / EVALUATIONS
        if path.exists():
            known = read_lines(path, EvaluationResult) if self.first_iteration else []
            self.evaluations = [each for each in known if each.iteration <= self.first_iteration]
            write_text(path, "".join(_line(each) for each in self.evaluations))

    def add(self, report: StepReport) -> Row:
        """Keep a report, write its plan and its row of the history, and return the row.

        The first report removes the results of an earlier start, which lack this iteration.
        """
        answer = report.answer
        assert answer is not None
        if not self._has_trained:
            self._has_trained = True
            for result in (self.folder / name for name in RESULTS):
                with writing(result, _ELSEWHERE):
                    result.unlink(missing_ok=True)
        row = Row(
            iteration=report.iteration,
            loss=report.loss,
            gradient_norm=report.gradient_norm,
            num_microbatches=report.num_microbatches,
            planned_s=answer.planned_ns / 1e9,
            measured_s=report.measured_s,
            gap=answer.gap,
            planned_bubble_share=answer.bubble_share,
            measured_bubble_share=report.measured_bubble_share,
            search_s=answer.search_s,
            lead_s=report.lead_s,
            fresh=report.fresh,
            reason=report.reason,
            num_skipped=report.num_skipped,
            slowness=report.correction.slowness,
            start=self._start,
            learning_rate=report.learning_rate,
            num_tokens=report.num_tokens,
            step_s=report.step_s,
            tokens_per_s=report.num_tokens / report.step_s if report.step_s else None,
            mfu=report.mfu,
        )
        if self.num_plans:
            path = self._plan(report.iteration)
            with writing(path, _ELSEWHERE):
                self._plan(report.iteration - self.num_plans).unlink(missing_ok=True)
                # An earlier start may have left something that is not a regular file.
                path.unlink(missing_ok=True)
                path.write_text(to_text(answer.plan))
        append_line(self.folder / HISTORY, row)
        self._totals.add(row)
        if report.iteration % self._stride == 0:
            self.reports.append(report)
        if len(self.reports) > _MOST_REPORTS:
            self._stride *= 2
            kept = [each for each in self.reports if each.iteration % self._stride == 0]
            self.reports = kept or self.reports[-1:]
        return row

    def _plan(self, iteration: int) -> Path:
        return self.folder / "plans" / f"{iteration:05d}.plan"

    def _drop_plans(self, first: int) -> None:
        """Create the folder for the plans, and remove the oldest plans."""
        folder = self.folder / "plans"
        with writing(folder, _ELSEWHERE):
            folder.mkdir(exist_ok=True)
            for path in folder.glob("*.plan"):
                if path.stem.isdecimal() and int(path.stem) < first - self.num_plans:
                    path.unlink()

    @property
    def last_evaluated(self) -> tuple[int, float]:
        """Number of finished iterations at the last evaluation, and its loss; zeros if there is none."""
        return (self.evaluations[-1].iteration, self.evaluations[-1].loss) if self.evaluations else (0, 0.0)

    def add_evaluation(self, evaluated: EvaluationResult) -> None:
        """Keep an evaluation, and write its line."""
        self.evaluations.append(evaluated)
        append_line(self.folder / EVALUATIONS, evaluated)

    def relaid(self) -> None:
        """Discard the reports under the previous layout."""
        self.reports.clear()
        self._stride = 1

    def summarize(
        self,
        run: RunFacts,
        elapsed_s: float,
        comparison: Mapping[str, Sequence[float]] | None = None,
        difference: Difference | None = None,
        advice: str = "",
        waiting: WaitingRanks | None = None,
    ) -> Summary:
        """Write ``summary.json`` and return it.

        If this start has added no iteration, what the earlier summary says of compared systems remains. ``elapsed_s``
        is the wall time of this start; the summary adds the iterations of earlier starts. ``comparison`` has planned
        seconds of every compared batch under each system, and ``waiting`` the systems on waiting ranks.
        """
        totals, compared = self._totals, comparison or {}
        if not totals.count:
            problem = "has no iterations, because all were trained before the checkpoint"
            raise InputError(str(self.folder / HISTORY), problem, "raise iterations, or train --from-scratch")
        summary = Summary(
            name=run.name,
            iterations=totals.count,
            resumed_at=tuple(totals.resumed_at),
            loss_first=totals.loss_first,
            loss_last=totals.loss_last,
            plans_fresh=totals.count - len(totals.fallbacks),
            plans_fallback=len(totals.fallbacks),
            fallback_iterations=totals.fallbacks,
            mean_gap=totals.mean("gap"),
            mean_planned_s=totals.mean("planned_s"),
            mean_measured_s=totals.mean("measured_s"),
            mean_planned_bubble_share=totals.mean("planned_bubble_share"),
            mean_measured_bubble_share=totals.mean("measured_bubble_share"),
            mean_lead_s=totals.mean_lead_s,
            mean_search_s=totals.mean("search_s"),
            elapsed_s=self._earlier_s + elapsed_s,
            num_ranks=run.num_ranks,
            num_cores=num_cores(),
            num_parameters=run.num_parameters,
            seed=run.seed,
            layout=run.layout,
            comparison={name: statistics.fmean(seconds) for name, seconds in compared.items()},
            comparison_batches=len(next(iter(compared.values()), ())),
            waiting=waiting,
            difference=difference,
            advice=advice,
            evaluations=tuple((each.iteration, each.loss) for each in self.evaluations),
            samples_skipped=totals.num_skipped,
        )
        return self.write(summary if self._has_trained else self._with_earlier(summary))

    def _with_earlier(self, summary: Summary) -> Summary:
        """Return the summary with the compared systems of the earlier summary, if there is one."""
        try:
            earlier = read_summary(self.folder / "summary.json")
        except InputError as error:
            if (self.folder / "summary.json").exists():
                _LOG.warning("%s; comparisons of the earlier start are lost", error)
            return summary
        return msgspec.structs.replace(summary, **{name: getattr(earlier, name) for name in _OF_SYSTEMS})

    def write(self, summary: Summary) -> Summary:
        """Write ``summary.json`` and return the summary."""
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        write_text(self.folder / "summary.json", text + "\n")
        return summary


_ELSEWHERE = "use another --runs"
_Line = TypeVar("_Line")


def append_line(path: Path, line: object) -> None:
    """Append a line of JSON to a file, in place of a last line that was cut off when the process died.

    Raise `InputError` if it cannot be written.
    """
    with writing(path, _ELSEWHERE), path.open("a+b") as lines:
        if lines.seek(0, os.SEEK_END):
            lines.seek(-1, os.SEEK_END)
            if lines.read(1) != b"\n":
                lines.seek(0)
                lines.truncate(lines.read().rfind(b"\n") + 1)
        lines.write(_line(line).encode())


def read_summary(path: Path) -> Summary:
    """Read a ``summary.json``. Numbers of ``evaluation`` that are null become NaN.

    Raise `InputError` if the file cannot be read, or is no summary.
    """
    try:
        with open_regular(path) as file:
            fields = msgspec.json.decode(file.read(), type=dict[str, Any])
        scores = msgspec.convert(fields.pop("evaluation", {}), dict[str, bool | Finite | None])
        summary = msgspec.convert(fields, Summary, str_keys=True)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), f"cannot be read ({error})", "train the run to its end first") from error
    evaluation = {name: math.nan if score is None else float(score) for name, score in scores.items()}
    return msgspec.structs.replace(summary, evaluation=evaluation)


def read_history(path: Path) -> list[Row]:
    """Read a ``history.jsonl``; see `read_lines`."""
    return read_lines(path, Row)


def read_lines(path: Path, kind: type[_Line]) -> list[_Line]:
    """Read a file of JSON lines. A last line that was cut off when the process died is ignored with a warning.

    Raise `InputError` if the file cannot be read, or a line is invalid; the message names the line.
    """
    try:
        with open_regular(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "remove the file") from error
    if lines.pop():
        _LOG.warning("%s: line %d was cut off when the process died and is ignored", path, len(lines) + 1)
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_decoded(line, kind))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path}: line {number}", str(error), "remove the file") from error
    return found


def _decoded(line: bytes, kind: type[_Line]) -> _Line:
    """Decode a line. A loss that is not finite was written as null, since JSON has no such number."""
    fields = msgspec.json.decode(line)
    diverged = [name for name in _MAY_DIVERGE if isinstance(fields, dict) and fields.get(name, 0.0) is None]
    if not diverged:
        return msgspec.json.decode(line, type=kind)
    found = msgspec.convert(fields | dict.fromkeys(diverged, 0.0), kind)
    change: Any = replace if is_dataclass(found) else msgspec.structs.replace
    changed: _Line = change(found, **dict.fromkeys(diverged, math.nan))
    return changed


def _line(row: object) -> str:
    return msgspec.json.encode(row).decode() + "\n"
