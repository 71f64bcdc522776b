"""Costs of the stages, fitted to measurements of the first steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeloom.cost import LayerFit, Profile, StrategyFit
from pipeloom.cost.fits import Coefficients, aligned, fit_bytes, fit_seconds, workload_features
from pipeloom.integrations.steps.running import stage_kind
from pipeloom.spec import TRAITS, Layout, Strategy, Workload

MEASURED_STEPS = range(1, 4)
"""Steps in which the times of the stages are measured. The first step is not, since it allocates memory."""
BYTES = "bytes"
"""Stands for held bytes in place of a verb."""
_UNMEASURED_S = 1e-6
_NOTHING: Coefficients = (0.0, 0.0, 0.0, 0.0)
_ENOUGH_SIZES = 4
"""Bytes have coefficients of a constant, tokens and token pairs. A fourth size confirms them."""
_ENOUGH_TIMES = 8
"""Seconds have four coefficients, and noise."""


class Row(NamedTuple):
    """One measurement of a stage on a microbatch."""

    stage: int
    what: str
    """F, B, I or W, whose seconds were measured; or `BYTES`."""
    strategy: Strategy
    lengths: tuple[int, ...]
    """Sizes of what passed through the stage: of a microbatch, or of some of its images."""
    value: float
    """Seconds, or bytes held from the forward to the backward."""


@dataclass
class Measurements:
    """Measurements of all ranks.

    Attributes
    ----------
    rows : list of Row
    widths : list of float
        Sizes of the stages' outputs, in units of four bytes per size.
    step : int
        Number of the training step that the next rows are from.
    """

    rows: list[Row]
    widths: list[float]
    step: int = 0

    def note(self, rows: Sequence[Row], widths: Mapping[int, float]) -> None:
        """Add the measurements of a rank."""
        has_times = self.step >= MEASURED_STEPS.start
        self.rows += [row for row in rows if has_times or row.what == BYTES]
        for stage, width in widths.items():
            self.widths[stage] = width

    def cover(self, strategies: Iterable[Strategy]) -> bool:
        """Return whether each strategy was measured often enough: its bytes on enough sizes, or on all that occurred,
        and its seconds in enough microbatches.
        """
        of = {strategy: set[tuple[int, ...]]() for strategy in strategies}
        num_timed = dict.fromkeys(of, 0)
        for row in self.rows:
            if row.stage == 0:
                num_timed[row.strategy] += row.what == "B"
                if row.what == BYTES:
                    of[row.strategy].add(row.lengths)
        enough = min(_ENOUGH_SIZES, len(set().union(*of.values())))
        return all(len(of[each]) >= max(1, enough) and num_timed[each] >= _ENOUGH_TIMES for each in of)


def stage_profile(rows: Sequence[Row], layout: Layout) -> Profile:
    """Return the costs of the stages from measurements; without any, equal costs in proportion to sizes."""
    stages = range(len(layout.chunks))
    return _profile([_stage_fit([row for row in rows if row.stage == stage]) for stage in stages], layout)


def counting_profile(layout: Layout, unit_bytes: int) -> Profile:
    """Return equal costs in proportion to sizes, and the same bytes for every microbatch."""
    held: Coefficients = (float(unit_bytes), 0.0, 0.0, 0.0)
    return _profile([msgspec.structs.replace(_stage_fit([]), activation_bytes=held)] * len(layout.chunks), layout)


def _profile(stages: Sequence[LayerFit], layout: Layout) -> Profile:
    names = (f"{chunk.module}/{stage_kind(stage)}" for stage, chunk in enumerate(layout.chunks))
    layers = dict(zip(names, stages, strict=True))
    return Profile(machine="this one", layers=layers, typical_s=dict.fromkeys(layers, 1.0))


def _stage_fit(rows: Sequence[Row]) -> LayerFit:
    # Recomputation of everything runs the same forward.
    plain = [row for row in rows if TRAITS[row.strategy].recomputes != "cheap"]
    forward = _fit(plain, "F") or (0.0, 0.0, _UNMEASURED_S, 0.0)
    inputs, weights, backward = (_fit(rows, what, "keep") for what in "IWB")
    if backward is None and inputs is not None and weights is not None:
        backward = _sum(inputs, weights)
    elif backward is None:
        backward = tuple(2.0 * each for each in forward)
    half = tuple(0.5 * each for each in backward)
    given = _fit(rows, BYTES, "recompute") or _NOTHING
    selective = _fit(rows, BYTES, "selective") or given
    zeros: dict[str, Any] = dict.fromkeys(_NOT_MEASURED, _NOTHING)
    sizes = {row.lengths for row in rows}
    strategies = StrategyFit(
        input_gradient_s=inputs or half,
        weight_gradient_s=weights or half,
        selective_forward_s=_sum(forward, _beyond(_fit(rows, "F", "selective"), forward, sizes)),
        selective_backward_s=_sum(backward, _beyond(_fit(rows, "B", "selective"), backward, sizes)),
        # Profiles count them beside those that every strategy holds.
        selective_bytes=tuple((aligned([selective], 4) - aligned([given], 4))[0].tolist()),
        given_bytes=given,
        **zeros,
    )
    again = _beyond(_fit(rows, "B", "recompute"), backward, sizes)
    return LayerFit(forward, backward, _fit(rows, BYTES, "keep") or _NOTHING, strategies, again)


def _beyond(longer: Coefficients | None, keep: Coefficients, every: Iterable[tuple[int, ...]]) -> Coefficients | None:
    """Return by how much the seconds of a strategy are longer than those of ``keep``, at no size less than zero.

    A strategy that recomputes does all that ``keep`` does. Few microbatches are measured under each, so that noise can
    say otherwise.
    """
    if longer is None:
        return None
    features = aligned([workload_features(Workload(lengths)) for lengths in sorted(every)])
    return fit_seconds(features, (features @ (np.array(longer) - np.array(keep))).clip(0.0))


def _sum(one: Coefficients, other: Coefficients | None) -> Coefficients:
    return one if other is None else tuple(a + b for a, b in zip(one, other, strict=True))


_NOT_MEASURED = ("weight_gradient_bytes", "offload_s", "load_s", "unsaved_bytes", "workspace_bytes")
"""Costs of strategies that are not available here, and memory beside that held from forward to backward."""


def _fit(rows: Sequence[Row], what: str, strategy: Strategy | None = None) -> Coefficients | None:
    """Fit the rows of one kind, of one strategy or of all; None without rows."""
    chosen = [row for row in rows if row.what == what and strategy in (None, row.strategy)]
    if not chosen:
        return None
    features = aligned([workload_features(Workload(row.lengths)) for row in chosen])
    fit = fit_bytes if what == BYTES else fit_seconds
    return fit(features, np.array([row.value for row in chosen]))
