"""Changes of a training run's layout at a checkpoint, when ranks have stayed slow or are fast again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch.distributed as dist

from pipeloom.bounds import Finite, NumBytes
from pipeloom.cost import Correction
from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InfeasibleError
from pipeloom.io import rule_path, write_layers, write_layout, write_rule
from pipeloom.layout.slow_ranks import RelayoutResult, layers_in_words, relaid
from pipeloom.layout.training import Preview
from pipeloom.packing import budget_tokens
from pipeloom.planner import PlanningProblem, write_problem
from pipeloom.planner.client import fallback_plan
from pipeloom.planner.problem_file import decode_problem, encode_problem
from pipeloom.runtime import StepReport
from pipeloom.runtime.launch.coordination import LongBarrier, broadcast_bytes, broadcast_int
from pipeloom.search import OrderRule
from pipeloom.spec import Batch, Layout, ModelSpec
from pipeloom.training.job import Job
from pipeloom.training.record import LAYOUTS, append_line, read_lines

_LEAST_ITERATIONS = 10
"""Least iterations between checkpoints to decide that a rank stays slow."""
_QUARTERS = (0.25, 0.75)
"""A rank counts as slow only if it was that slow in three of four iterations of an interval."""
_OTHER = 0.1
"""Relative difference of a rank's speed from that of the last evaluation that triggers another evaluation."""
_LEAST_GAIN = 0.05
_PREVIEWED = 3
"""Number of the newest batches on which layouts are planned."""

Slowness = tuple[Finite, ...]


class LayoutChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of ``layouts.jsonl``: the run continues under another layout."""

    iteration: NumBytes
    """The first iteration under it."""
    first: str
    """Digest of the layout with which the run began."""
    slowness: tuple[Slowness, ...]
    """For the ranks of each replica, their time relative to most ranks."""
    before_s: Finite
    """Planned seconds of an iteration under the previous layout."""
    planned_s: Finite
    """Planned seconds of an iteration under this layout."""
    layout: Layout
    rules: tuple[OrderRule, ...] = ()

    def applied(self, problem: PlanningProblem) -> PlanningProblem:
        """Return the problem under this layout."""
        search = msgspec.structs.replace(problem.search, rules=self.rules)
        return replace(problem, layout=self.layout, search=search)


def write_shared_files(job: Job, problem: PlanningProblem, layers: LayerTable | None = None) -> None:
    """Write the planning problem, layout and rule that all ranks read when they start, and the costs of layers."""
    path = job.folder / "layout.json"
    write_layout(path, problem.layout)
    rule_path(path).unlink(missing_ok=True)
    for rule in problem.search.rules[-1:]:
        write_rule(path, rule)
    write_problem(job.setup_path, problem)
    if layers is not None:
        write_layers(job.folder / "layers.json", layers)


def newest_change(job: Job, first: str) -> LayoutChange | None:
    """Return the newest change of a run that began with the layout of this digest.

    None if there is none, or if the run may no longer change its layout. Raise `InputError` if a line of the file is
    invalid; the message names the line.
    """
    path = job.folder / LAYOUTS
    found = read_lines(path, LayoutChange) if may_change(job) and path.is_file() else []
    return found[-1] if found and found[-1].first == first else None


def may_change(job: Job) -> bool:
    """Return whether the run may change its layout."""
    config = job.config
    is_declared = job.layout is not None or config.layout.kind == "file"
    wanted = config.layout.adapt if config.layout.adapt is not None else not is_declared
    return wanted and config.checkpoint is not None and config.layout.ranks > 1


def lasting(seen: Sequence[Slowness]) -> Slowness:
    """Return the slowness of ranks in at least three of four iterations; 1 for a rank of changing speed."""
    low, high = np.quantile(np.array(seen), _QUARTERS, axis=0)
    return tuple(np.clip(1.0, low, high).tolist())


@dataclass
class _Observations:
    """Measured speeds of the ranks since the last checkpoint, newest batches, and the batch with the longest sample."""

    corrections: list[tuple[Correction, ...]] = field(default_factory=list)
    """For each iteration, the correction of every replica."""
    newest: tuple[Correction, ...] = ()
    link: tuple[float, float] | None = None
    batches: deque[Batch] = field(default_factory=lambda: deque(maxlen=_PREVIEWED))
    longest: dict[str, tuple[int, Batch]] = field(default_factory=dict)
    """Tokens and batch: ``share`` is that of this replica's longest sample, ``sample`` the longest of all replicas,
    alone."""

    def add(self, report: StepReport, model: ModelSpec) -> None:
        """Add an iteration."""
        own, whole = report.batch, report.global_batch
        if report.replicas and own is not None and whole is not None:
            self.corrections.append(report.replicas)
            self.newest, self.link = report.replicas, report.correction.link
            self.batches.append(own)
            alone = whole.part([int(budget_tokens(whole, model).argmax())])
            for name, batch in (("share", own), ("sample", alone)):
                most = int(budget_tokens(batch, model).max(initial=0))
                if name not in self.longest or most > self.longest[name][0]:
                    self.longest[name] = most, batch

    def lasting_slowness(self, num_ranks: int) -> tuple[Slowness, ...] | None:
        """Return how slow the ranks of every replica were, and start anew; None if there are too few iterations."""
        if len(self.corrections) < _LEAST_ITERATIONS:
            return None
        seen, self.corrections = self.corrections, []
        return tuple(
            lasting([correction.of_ranks(num_ranks) for correction in of_replica])
            for of_replica in zip(*seen, strict=True)
        )

    def corrected(self, slowness: tuple[Slowness, ...]) -> list[Correction]:
        """Return the newest correction of every replica with this slowness."""
        return [
            msgspec.structs.replace(newest, slowness=each, link=self.link)
            for newest, each in zip(self.newest, slowness, strict=True)
        ]


class Relayout:
    """Evaluates the layout of a training run at its checkpoints. All ranks use it alike; rank 0 decides.

    Attributes
    ----------
    problem : PlanningProblem
        The problem with which the run continues.
    changed : bool
        Whether the layout has changed since `begin`.
    """

    def __init__(self, job: Job, problem: PlanningProblem) -> None:
        self.job, self.problem, self.changed = job, problem, False
        self._may_change = may_change(job)
        self._is_first = dist.get_rank() == 0
        found = None
        if self._is_first and (job.folder / LAYOUTS).is_file():
            rows = read_lines(job.folder / LAYOUTS, LayoutChange)
            found = next((row for row in reversed(rows) if row.layout == problem.layout), None)
        self._first_layout = problem.layout.digest if found is None else found.first
        alike = ((1.0,) * problem.layout.num_ranks,) * problem.layout.parallelism.data
        self._slowness = alike if found is None else found.slowness
        self._known_layouts = [problem.layout]
        self._observations = _Observations()
        self._began, self._start_s = time.monotonic(), 0.0

    def begin(self) -> PlanningProblem:
        """Return the problem to train with from here on."""
        self.changed = False
        return self.problem

    def started(self, other_s: float) -> None:
        """Record the time until the end of the first iteration under a layout, which is the cost of a change.

        ``other_s`` are its seconds that are no cost: of that iteration, and of an evaluation before it.
        """
        self._start_s = max(self._start_s, time.monotonic() - self._began - other_s)

    def note(self, report: StepReport) -> None:
        """Record an iteration."""
        if self._may_change and self._is_first:
            self._observations.add(report, self.problem.model)

    def ends_after(self, iteration: int) -> bool:
        """Return whether the run continues under another layout; all ranks call it together after a checkpoint."""
        if not self._may_change:
            return False
        slowness = self._new_slowness() if self._is_first else None
        if broadcast_int(int(slowness is not None)):
            barrier = LongBarrier()
            change = None if slowness is None else self._evaluate(slowness, iteration)
            self.changed = bool(barrier.hear("waiting for rank 0 to plan other layouts", int(change is not None)))
        if self.changed:
            self._began = time.monotonic()
            self.problem = decode_problem(broadcast_bytes(encode_problem(self.problem) if self._is_first else None))
        return self.changed

    def _new_slowness(self) -> tuple[Slowness, ...] | None:
        """Return the lasting slowness of every replica if it differs from that for which the layout was evaluated."""
        found = self._observations.lasting_slowness(self.problem.layout.num_ranks)
        if found is None:
            return None
        ratio = np.array(found) / np.array(self._slowness)
        return found if (np.abs(ratio - 1) > _OTHER).any() else None

    def _evaluate(self, slowness: tuple[Slowness, ...], iteration: int) -> LayoutChange | None:
        """Search for a layout that pays off in the remaining iterations, and report the result."""
        problem, self._slowness = self.problem, slowness
        previews = [
            Preview(
                problem.profile_costs.corrected(correction),
                problem.packing,
                tuple(self._observations.batches),
                problem.layout.num_ranks,
                capacity_bytes=problem.memory.capacity_bytes,
                num_tensor=problem.layout.parallelism.tensor,
            )
            for correction in self._observations.corrected(slowness)
        ]
        rule = next(iter(problem.search.rules[-1:]), None)
        try:
            found = relaid(previews, problem.layout, rule, self._known_layouts, seed=problem.seed)
        except InfeasibleError:
            return None
        rules = tuple(each.moved_to(found.best.layout) for each in problem.search.rules)
        change = LayoutChange(
            iteration, self._first_layout, slowness, found.before.seconds, found.best.seconds, found.best.layout, rules
        )
        left = self.job.config.iterations - iteration
        changed = change.applied(problem)
        refusal = why_not(found, left, self._start_s) or self._what_lacks_memory(changed)
        verdict = f"unchanged, {refusal}" if refusal else "changed"
        self.job.display.say(f"iteration {iteration}: {_in_words(slowness)}; {_figures(found)}: {verdict}")
        if refusal:
            return None
        self.problem = changed
        append_line(self.job.folder / LAYOUTS, change)
        write_shared_files(self.job, self.problem)
        return change

    def _what_lacks_memory(self, changed: PlanningProblem) -> str:
        """Return that the longest sample so far does not fit under the changed layout; empty if it does."""
        for most, batch in self._observations.longest.values():
            try:
                fallback_plan(changed, batch)
            except InfeasibleError:
                return f"a batch with a sample of {most} tokens would not fit into memory"
        return ""


def why_not(found: RelayoutResult, left: int, start_s: float) -> str:
    """Return why a layout is not changed; empty if it is to be changed."""
    if found.gain < _LEAST_GAIN:
        return f"less than {_LEAST_GAIN:.0%} shorter"
    saved_s = found.before.seconds - found.best.seconds
    if saved_s * left <= start_s:
        return f"{left} iterations are left, but a restart takes {start_s:.1f} s"
    return ""


def _figures(found: RelayoutResult) -> str:
    figures = f"an iteration is planned to take {found.before.seconds:.3g} s ({layers_in_words(found.before.layout)})"
    if found.best.layout == found.before.layout:
        return f"{figures}, and no layout is faster"
    return f"{figures}, with {layers_in_words(found.best.layout)} {found.best.seconds:.3g} s"


def _in_words(slowness: Sequence[Slowness]) -> str:
    several = len(slowness) > 1
    ranks = [
        f"rank {rank}{f' of replica {replica}' if several else ''} takes {factor:.2f} times as long"
        for replica, factors in enumerate(slowness)
        for rank, factor in enumerate(factors)
        if factor != 1.0
    ]
    return f"{', '.join(ranks)} as most" if ranks else "all ranks are alike"
