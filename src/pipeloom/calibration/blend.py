"""Blend a device table with evidence, and say what changed."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from pipeloom.calibration.evidence import Evidence, nothing_usable
from pipeloom.calibration.iterations import blend_iterations
from pipeloom.calibration.model import Blend, QuantityRow, TableModel, generation_spread
from pipeloom.emulator.rules import base_kind
from pipeloom.spec.hardware import DeviceSpec


def blend(base: DeviceSpec, evidence: Evidence, *, name: str = "") -> Blend:
    """Blend a table with evidence.

    Every third observation checks a blend of the others. The returned table is a blend of all.

    Parameters
    ----------
    name : str
        Name of the blended device. Empty: that of the base table, so that intervals come from published runs on it.

    Raises
    ------
    InputError
        If no observation and no iteration can be used.
    """
    kernels, spread = _blend_kernels(base, evidence)
    iterations = blend_iterations(kernels.device, evidence, spread)
    if not evidence.observations and not iterations.rows:
        raise nothing_usable(evidence)
    base_errors = kernels.base_errors + iterations.base_errors
    blended_errors = kernels.blended_errors + iterations.blended_errors
    error = base.error
    if blended_errors:
        median = float(np.median(blended_errors))
        error = f"{median:.1%} in the median of {len(blended_errors)} observations, none of them fitted"
    device = msgspec.structs.replace(
        iterations.device,
        name=name or base.name,
        basis="blended",
        source=f"{base.source}; blended by pipeloom calibrate with {_contents(evidence, iterations.rows)}",
        error=error,
    )
    return Blend(device, kernels.rows + iterations.rows, base_errors, blended_errors)


def _blend_kernels(base: DeviceSpec, evidence: Evidence) -> tuple[Blend, float]:
    """Return the blend with the observations of operators, and the spread of the sustained share that they leave."""
    observations = evidence.observations
    if not observations:
        return Blend(base), generation_spread(base, "sustained")
    model = TableModel(base, observations, evidence.devices)
    held = model.held_out()
    trained, final = model.fit(~held), model.fit(np.ones(len(observations), bool))
    base_errors, blended_errors = model.errors(np.zeros(model.num_values)), model.errors(trained)
    rows = (*model.rows(final, held, base_errors, blended_errors), *model.shared_rows(final))
    errors = (tuple(base_errors[held].tolist()), tuple(blended_errors[held].tolist()))
    return Blend(model.table(final), rows, *errors), model.sustained_spread


def _contents(evidence: Evidence, rows: tuple[QuantityRow, ...]) -> str:
    counts = Counter(base_kind(one.measurement.kind) for one in evidence.observations)
    counts["iteration"] = sum(row.num_observations for row in rows)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()) if count)
