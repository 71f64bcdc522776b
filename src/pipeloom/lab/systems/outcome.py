"""What a comparison came to: rows of numbers, and tracks to draw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeloom.errors import InfeasibleError
from pipeloom.explain.compare import track_of
from pipeloom.lab.systems.comparison import Comparison
from pipeloom.lab.systems.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.lab.systems.systems import mfu
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.report import Track, key_figures
from pipeloom.taskgraph import NS_PER_S


@dataclass(frozen=True)
class Outcome:
    """Several systems on one iteration of a model on a cluster.

    Attributes
    ----------
    groups : Microbatches
        The iteration that was compared.
    systems : tuple of Comparison
    """

    case: ModelOnCluster
    groups: Microbatches
    systems: tuple[Comparison, ...]

    @property
    def title(self) -> str:
        """Model, cluster and degrees."""
        degrees = self.case.degrees
        where = f"tp {degrees.tensor} pp {degrees.pipeline} dp {degrees.data}"
        return f"{self.case.architecture.name} on {self.case.cluster.name}, {where}"

    @property
    def note(self) -> str:
        """Where the seconds come from, and which systems do not fit."""
        device = self.case.cluster.device
        missing = "".join(f" {one.title}: {one.problem}." for one in self.systems if one.result is None)
        return f"Emulated from the {device.basis} table of {device.name}.{missing}"

    def rows(self) -> list[dict[str, Any]]:
        """Numbers of every system, as ``pipeloom compare --json`` prints them."""
        return [row_of(self.case, self.groups, one) for one in self.systems]

    def tracks(self) -> list[Track]:
        """What can be drawn: the systems that fit.

        Raises
        ------
        InfeasibleError
            None does.
        """
        num_tokens = backbone_tokens(self.case, self.groups)
        fitting = [(one.title, one.result) for one in self.systems if one.result is not None]
        if not fitting:
            raise InfeasibleError(f"{self.title}: no system fits: {self.systems[-1].problem}")
        return [
            track_of(replace(result, name=title), update_s=self.case.update_s, num_tokens=num_tokens)
            for title, result in fitting
        ]


def backbone_tokens(case: ModelOnCluster, groups: Microbatches) -> int:
    """Tokens that the last module sees in an iteration, on all replicas."""
    backbone = case.model.modules[-1]
    one = sum(sum(backbone.instance_lengths(sample)) for group in groups for sample in group)
    return one * case.degrees.data


def row_of(case: ModelOnCluster, groups: Microbatches, one: Comparison) -> dict[str, Any]:
    tried = {"layouts": [_tried(trial) for trial in one.tried]} if one.tried else {}
    if one.result is None:
        return {"system": one.name, "title": one.title, "problem": one.problem} | tried
    r = one.result
    track = track_of(replace(r, name=one.title), update_s=case.update_s, num_tokens=backbone_tokens(case, groups))
    numbers = key_figures(track)
    return {
        "system": one.name,
        "title": one.title,
        "iteration_s": numbers.iteration_ns / NS_PER_S,
        "tokens_per_s": numbers.tokens_per_s,
        "mfu": mfu(case, groups, r.iteration_s),
        "bubble_share": numbers.bubble_share,
        "peak_memory_bytes": numbers.peak_bytes,
        "gap": numbers.gap,
    } | tried


def _tried(trial: LayoutEvaluation) -> dict[str, Any]:
    """A layout that was tried before training; seconds of one that was ruled out early are what it takes at least."""
    if trial.problem:
        return {"layout": trial.name, "problem": trial.problem}
    key = "more_than_s" if trial.ruled_out else "planned_s"
    return {"layout": trial.name, key: trial.seconds, "lower_bound_s": trial.bound_s}
