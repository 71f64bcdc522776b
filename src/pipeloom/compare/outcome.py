"""Results of a comparison: rows of numbers, and tracks for drawings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeloom.compare.answer import Question
from pipeloom.compare.baseline import mfu
from pipeloom.compare.comparison import Comparison
from pipeloom.compare.gain import GainStep
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.compare.now import NOW
from pipeloom.compare.result import track_of
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.report import Track, key_figures
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import NS_PER_S
from pipeloom.validation import Chance, Interval, chance, interval_for

_DEFAULT_BASELINE = "interleaved"
"""Reference system of gains without a current run."""


@dataclass(frozen=True)
class Outcome:
    """Several systems on one iteration of a model on a cluster.

    Attributes
    ----------
    steps : tuple of GainStep
        Steps from the current run to Pipeloom; empty if one of both is missing.
    would_fit : Degrees or None
        If no system fits: degrees under which one fits, on as many devices as their product.
    """

    question: Question
    systems: tuple[Comparison, ...]
    steps: tuple[GainStep, ...] = ()
    would_fit: Degrees | None = None

    @property
    def setting(self) -> ModelOnCluster:
        """Model and cluster of the comparison."""
        return self.question.setting

    @property
    def title(self) -> str:
        """Model, cluster and degrees."""
        return f"{self.setting.architecture.name} on {self.setting.cluster.name}, {degrees_text(self.setting.degrees)}"

    @property
    def baseline(self) -> Comparison | None:
        """Reference of gains: the current run, else Megatron-LM's interleaved schedule, else the first that fits."""
        fitting = {one.name: one for one in self.systems if one.result is not None}
        if NOW in {one.name for one in self.systems}:
            return fitting.get(NOW)
        return fitting.get(_DEFAULT_BASELINE) or next(iter(fitting.values()), None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of every system, the fastest first, and last those that do not fit."""
        rows = [self.row(one) for one in self.systems]
        return sorted(rows, key=lambda row: row.get("iteration_s", float("inf")))

    def row(self, one: Comparison) -> dict[str, Any]:
        """Return the numbers of one system, as ``pipeloom compare --json`` prints them."""
        tried = {"layouts": [_tried(trial) for trial in one.tried]} if one.tried else {}
        if one.result is None:
            problem = {"problem": one.problem, "can_run": one.can_run}
            return {"system": one.name, "title": one.title} | problem | tried
        numbers = key_figures(self.track(one))
        base = self.baseline
        return {
            "system": one.name,
            "title": one.title,
            "iteration_s": numbers.iteration_ns / NS_PER_S,
            **self.interval.fields(numbers.iteration_ns / NS_PER_S),
            "gain": None if base is None else self.iteration_s(base) / self.iteration_s(one) - 1,
            "sign_probability": None if base is None else self.chance(one).probability,
            "tokens_per_s": numbers.tokens_per_s,
            "tokens_per_s_per_device": (numbers.tokens_per_s or 0.0) / self.setting.degrees.num_devices,
            "mfu": mfu(self.setting, self.question.iterations.real.groups, self.iteration_s(one)),
            "bubble_share": numbers.bubble_share,
            "peak_memory_bytes": numbers.peak_bytes,
            "fits": one.result.fits,
            "gap": numbers.gap,
        } | tried

    @property
    def interval(self) -> Interval:
        """Interval of every iteration time, relative to it."""
        return interval_for(self.setting.cluster.device, self.setting.architecture, self.setting.trainer)

    def iteration_s(self, one: Comparison) -> float:
        """Return the seconds of an iteration, update included."""
        assert one.result is not None
        return self.setting.iteration_s(one.result)

    def chance(self, one: Comparison) -> Chance:
        """Return the probability that the sign of a system's gain over the baseline is right."""
        base = self.baseline
        assert base is not None
        return chance(self.iteration_s(one) / self.iteration_s(base))

    def step_rows(self) -> list[dict[str, Any]]:
        """Return seconds, saving and share of the total saving of every step from the current run to Pipeloom."""
        base = self.baseline
        if not self.steps or base is None or base.name != NOW:
            return []
        before = first = self.iteration_s(base)
        saved_all = first - self.steps[-1].iteration_s
        rows = []
        for step in self.steps:
            seconds = step.iteration_s
            share = (before - seconds) / saved_all if saved_all else 0.0
            rows.append(
                {
                    "step": step.name,
                    "iteration_s": seconds,
                    "saved_s": before - seconds,
                    "share": share,
                    "sign_probability": chance(seconds / before).probability,
                    "note": step.note,
                }
            )
            before = seconds
        return rows

    def track(self, one: Comparison) -> Track:
        """Make the track of a system that fits."""
        assert one.result is not None
        named = replace(one.result, name=f"{one.name}: {one.title}")
        tokens = backbone_tokens(self.setting, self.question.iterations.real.groups)
        update_s = self.iteration_s(one) - one.result.iteration_s
        return track_of(named, update_s=update_s, num_tokens=tokens)

    def tracks(self) -> list[Track]:
        """Return the tracks of all systems that fit, the fastest first."""
        fitting = [one for one in self.systems if one.result is not None]
        return [self.track(one) for one in sorted(fitting, key=self.iteration_s)]


def degrees_text(degrees: Degrees) -> str:
    """Format degrees for titles."""
    more = "".join(f" {word} {n}" for word, n in (("cp", degrees.context), ("ep", degrees.expert)) if n > 1)
    return f"tp {degrees.tensor} pp {degrees.pipeline} dp {degrees.data}{more}"


def backbone_tokens(setting: ModelOnCluster, microbatches: Microbatches) -> int:
    """Return the tokens of the last module in an iteration, on all replicas."""
    backbone = setting.model.modules[-1]
    one = sum(sum(backbone.instance_lengths(sample)) for microbatch in microbatches for sample in microbatch)
    return one * setting.degrees.data


def _tried(trial: LayoutEvaluation) -> dict[str, Any]:
    """Return the numbers of a tried layout; the seconds of a pruned layout are a lower limit."""
    if trial.problem:
        return {"layout": trial.name, "problem": trial.problem}
    key = "more_than_s" if trial.ruled_out else "planned_s"
    return {"layout": trial.name, key: trial.seconds, "lower_bound_s": trial.bound_s}
