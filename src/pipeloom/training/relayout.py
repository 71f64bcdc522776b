"""Whether a training run changes its layout at a checkpoint, since ranks have stayed slow or are quick again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import torch.distributed as dist

from pipeloom.bounds import Finite, NumBytes
from pipeloom.cost import Correction
from pipeloom.errors import InfeasibleError
from pipeloom.io import rule_path, write_layout, write_rule, write_text
from pipeloom.layout.slow_ranks import Relaid, layers_in_words, relaid
from pipeloom.layout.training import Preview
from pipeloom.planner import Setup
from pipeloom.runtime import StepReport
from pipeloom.runtime.launch.coordination import Patience, broadcast_bytes, first_says
from pipeloom.search import OrderRule
from pipeloom.spec import Batch, Layout
from pipeloom.training.job import Job
from pipeloom.training.record import LAYOUTS, append_line, read_lines

_LEAST_ITERATIONS = 10
"""Of an interval between checkpoints, to say that a rank stays slow."""
_QUARTERS = (0.25, 0.75)
"""In three of four iterations of an interval a rank must have been as slow as it is taken to be."""
_OTHER = 0.1
"""By how much a rank's speed must differ from that for which the layout was judged, to judge it again."""
_LEAST_GAIN = 0.05
_PREVIEWED = 3
"""The newest batches on which layouts are planned."""

Slowness = tuple[Finite, ...]


class LayoutChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of ``layouts.jsonl``: the run goes on under another layout."""

    iteration: NumBytes
    """The first under it."""
    first: str
    """Digest of the layout with which the run began."""
    slowness: tuple[Slowness, ...]
    """Of the ranks of each replica: how many times longer than most they took."""
    before_s: Finite
    """A planned iteration under the layout before."""
    planned_s: Finite
    """The same under this one."""
    layout: Layout
    rules: tuple[OrderRule, ...] = ()

    def applied(self, setup: Setup) -> Setup:
        """The setup under this layout."""
        search = msgspec.structs.replace(setup.search, rules=self.rules)
        return msgspec.structs.replace(setup, layout=self.layout, search=search)


def write_setup(job: Job, setup: Setup) -> None:
    """Write what all ranks read when they are started: setup, layout and rule."""
    path = job.folder / "layout.json"
    write_layout(path, setup.layout)
    rule_path(path).unlink(missing_ok=True)
    for rule in setup.search.rules[-1:]:
        write_rule(path, rule)
    write_text(job.setup_path, msgspec.json.format(msgspec.json.encode(setup), indent=1).decode() + "\n")


def newest_change(job: Job, first: str) -> LayoutChange | None:
    """The newest change of a run that began with a layout of this digest; None where there is none.

    Raises
    ------
    InputError
        Naming the line of the file that is none.
    """
    path = job.folder / LAYOUTS
    found = read_lines(path, LayoutChange) if path.is_file() else []
    return found[-1] if found and found[-1].first == first else None


def may_change(job: Job) -> bool:
    """Whether the run may change its layout at all."""
    config = job.config
    is_given = job.layout is not None or config.layout.kind == "file"
    wanted = config.layout.adapt if config.layout.adapt is not None else not is_given
    return wanted and config.checkpoint is not None and config.layout.ranks > 1


def lasting(seen: Sequence[Slowness]) -> Slowness:
    """How slow ranks were in at least three of four iterations; 1 for a rank that was now slow, now quick."""
    low, high = np.quantile(np.array(seen), _QUARTERS, axis=0)
    return tuple(np.clip(1.0, low, high).tolist())


class Relayout:
    """Judges the layout of a training run at its checkpoints; all ranks use it alike, rank 0 alone thinks.

    Parameters
    ----------
    job : Job
    setup : Setup
        With which the run is started.

    Attributes
    ----------
    setup : Setup
        With which it goes on.
    changed : bool
        Whether that is another than training has begun with (`begin`).
    """

    def __init__(self, job: Job, setup: Setup) -> None:
        self.job, self.setup, self.changed = job, setup, False
        self._may = may_change(job)
        self._is_first = dist.get_rank() == 0
        found = None
        if self._is_first and (job.folder / LAYOUTS).is_file():
            rows = read_lines(job.folder / LAYOUTS, LayoutChange)
            found = next((row for row in reversed(rows) if row.layout == setup.layout), None)
        self._first = setup.layout.digest if found is None else found.first
        alike = ((1.0,) * setup.layout.num_ranks,) * setup.layout.parallelism.data
        self._judged = alike if found is None else found.slowness
        self._others = [setup.layout]
        self._link: tuple[float, float] | None = None
        self._newest: tuple[Correction, ...] = ()
        self._seen: list[tuple[Correction, ...]] = []
        self._batches: deque[Batch] = deque(maxlen=_PREVIEWED)
        self._began, self._start_s = time.monotonic(), 0.0

    def begin(self) -> Setup:
        """The setup to train with from here on."""
        self.changed = False
        return self.setup

    def started(self, report: StepReport) -> None:
        """After the first iteration under a layout: what came before it is what a change costs."""
        self._start_s = max(self._start_s, time.monotonic() - self._began - report.step_s)

    def note(self, report: StepReport) -> None:
        """After every iteration."""
        if self._may and self._is_first and report.replicas and report.batch is not None:
            self._seen.append(report.replicas)
            self._newest, self._link = report.replicas, report.correction.link
            self._batches.append(report.batch)

    def ends_after(self, iteration: int) -> bool:
        """Whether the run is to go on under another layout; all ranks call it together after a checkpoint."""
        if not self._may:
            return False
        slowness = self._lasting() if self._is_first else None
        thinks = first_says(int(slowness is not None))
        if thinks:
            patience = Patience()
            change = None if slowness is None else self._judge(slowness, iteration)
            self.changed = bool(patience.hear("waiting for rank 0 to plan other layouts", int(change is not None)))
        if self.changed:
            self._began = time.monotonic()
            self.setup = msgspec.json.decode(
                broadcast_bytes(msgspec.json.encode(self.setup) if self._is_first else None), type=Setup
            )
        return self.changed

    def _lasting(self) -> tuple[Slowness, ...] | None:
        """How slow the ranks of every replica have stayed, where that is not what the layout was judged for."""
        if len(self._seen) < _LEAST_ITERATIONS:
            return None
        num_ranks, seen = self.setup.layout.num_ranks, self._seen
        self._seen = []
        found = tuple(
            lasting([correction.of_ranks(num_ranks) for correction in of_replica])
            for of_replica in zip(*seen, strict=True)
        )
        ratio = np.array(found) / np.array(self._judged)
        return found if (np.abs(ratio - 1) > _OTHER).any() else None

    def _judge(self, slowness: tuple[Slowness, ...], iteration: int) -> LayoutChange | None:
        """Look for a layout that pays for the iterations that are left; say what was found."""
        setup, self._judged = self.setup, slowness
        corrections = [
            msgspec.structs.replace(newest, slowness=each, link=self._link)
            for newest, each in zip(self._newest, slowness, strict=True)
        ]
        previews = [
            Preview(
                setup.costs.corrected(correction),
                setup.packing,
                tuple(self._batches),
                setup.layout.num_ranks,
                capacity_bytes=setup.cluster.memory_capacity_bytes,
                num_tensor=setup.layout.parallelism.tensor,
            )
            for correction in corrections
        ]
        rule = next(iter(setup.search.rules[-1:]), None)
        try:
            found = relaid(previews, setup.layout, rule, self._others, seed=setup.seed)
        except InfeasibleError:
            return None
        left = self.job.config.iterations - iteration
        refusal = why_not(found, left, self._start_s)
        verdict = f"stays, {refusal}" if refusal else "changed"
        self.job.display.say(f"iteration {iteration}: {_in_words(slowness)}; {_figures(found)}: {verdict}")
        if refusal:
            return None
        rules = tuple(each.moved_to(found.best.layout) for each in setup.search.rules)
        change = LayoutChange(
            iteration, self._first, slowness, found.before.seconds, found.best.seconds, found.best.layout, rules
        )
        self.setup = change.applied(setup)
        append_line(self.job.folder / LAYOUTS, change)
        write_setup(self.job, self.setup)
        return change


def why_not(found: Relaid, left: int, start_s: float) -> str:
    """Why a layout is not changed; empty where it is to be."""
    if found.gain < _LEAST_GAIN:
        return f"less than {_LEAST_GAIN:.0%} shorter"
    spared_s = found.before.seconds - found.best.seconds
    if spared_s * left <= start_s:
        return f"{left} iterations are left, and starting again takes {start_s:.1f} s"
    return ""


def _figures(found: Relaid) -> str:
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
