"""Blend the sustained share of a device with measured iterations, as `pipeloom.validation.constants` fits it.

The constants of trainers (the host's time, overlap, eager operators) take part with their shipped values as priors and
the spreads of ``constants.toml``, because an iteration says nothing about one constant alone. Only the device's own
values are kept: others belong to a trainer's file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from pipeloom.calibration.evidence import Evidence, shown
from pipeloom.calibration.model import Blend, QuantityRow, with_sustained
from pipeloom.emulator.fit import robust_posterior
from pipeloom.errors import PipeloomError
from pipeloom.spec.catalog import load_device
from pipeloom.spec.hardware import DeviceSpec
from pipeloom.validation.constants import EVIDENCE, TYPICAL_ERROR, Constant, constants, shipped, with_values
from pipeloom.validation.express import DEVICES, ExpressedRun, express
from pipeloom.validation.reasons import kind_of
from pipeloom.validation.runs import PublishedRun
from pipeloom.validation.unstated import complete

STEP = 0.05
"""Step of a derivative, on the scale of `Constant.to_line`."""
MOST_OFF = 4.0
"""Largest plausible ratio between a measured and a predicted time. The emulator is within three of every published
run."""
HELD_OUT = 3
"""One of this many runs checks the blend."""


class _Run(NamedTuple):
    run: PublishedRun
    expressed: ExpressedRun
    error: float
    """Logarithm of measured over predicted time."""
    slopes: tuple[float, ...]


def blend_iterations(device: DeviceSpec, evidence: Evidence, spread: float) -> Blend:
    """Blend the sustained share of a table, known up to a spread, with the measured iterations of some evidence.

    Runs that cannot be used are counted in the evidence, by reason.
    """
    runs = [found for name, run in evidence.runs if (found := _usable(name, run, device, evidence)) is not None]
    if not runs:
        return Blend(device)
    held = runs[1::HELD_OUT] if len(runs) >= HELD_OUT else []
    rest = [one for i, one in enumerate(runs) if i % HELD_OUT != 1]
    blended = with_sustained(device, _factor(runs, spread))
    without = with_sustained(device, _factor(rest, spread)) if held else device
    base_errors = tuple(_error(one, device) for one in held)
    blended_errors = tuple(_error(one, without) for one in held)
    times = [one.run.measured_s or 0.0 for one in runs]
    # Measured over predicted time, as a share: what the share would be if it alone explained the error.
    slope = float(np.median([one.slopes[0] for one in runs]))
    alone = math.exp(float(np.median([one.error for one in runs])) / slope) if slope else float("nan")
    row = QuantityRow(
        "sustained share, from iterations",
        len(runs),
        min(times),
        max(times),
        device.sustained,
        device.sustained * alone,
        blended.sustained,
        len(held),
        float(np.median(base_errors)) if held else None,
        float(np.median(blended_errors)) if held else None,
    )
    return Blend(blended, (row,), base_errors, blended_errors)


def _usable(name: str, run: PublishedRun, device: DeviceSpec, evidence: Evidence) -> _Run | None:
    evidence.source = name
    zoo = next((key for key, entry in DEVICES.items() if load_device(entry).name == device.name), None)
    if run.device and run.device not in (zoo, device.name):
        evidence.reject(f"run on another device ({shown(run.device)})")
        return None
    try:
        found = _expressed(replace(run, device=zoo or "H100"), evidence)
        if evidence.network is None and found.cluster.num_nodes > 1:
            evidence.reject("run between nodes, of a device whose network the zoo lacks; give --cluster")
            return None
        at = _predicted(found, device)
        slopes = _slopes(found, device, at)
    except PipeloomError as error:
        evidence.reject(f"run that cannot be emulated: {kind_of(error)}")
        return None
    difference = math.log(run.measured_s or 1.0) - at
    if abs(difference) > math.log(MOST_OFF):
        evidence.reject(f"run whose time is more than {MOST_OFF:g} times off the emulated one; another unit?")
        return None
    return _Run(run, found, difference, slopes)


def _expressed(run: PublishedRun, evidence: Evidence) -> ExpressedRun:
    """Return a run on the network that the evidence counts with."""
    stated = evidence.devices_per_node(run)
    known = complete(replace(run, per_node=stated)).run
    found = express(known)
    # `express` always takes whole racks of devices whose NVLink joins them; the cluster may have smaller nodes.
    per_node = min(found.cluster.devices_per_node, stated)
    nodes = {"devices_per_node": per_node, "num_nodes": -(-(known.gpus or 1) // per_node)}
    own = msgspec.structs.replace(found.cluster, **nodes)
    if (network := evidence.network) is not None:
        rates = {"nic_bytes_per_s": network.nic_bytes_per_s, "nic_latency_s": network.nic_latency_s}
        own = msgspec.structs.replace(own, **rates)
    return replace(found, cluster=own)


def _predicted(expressed: ExpressedRun, device: DeviceSpec) -> float:
    """Return the logarithm of the predicted time on a device."""
    cluster = msgspec.structs.replace(expressed.cluster, device=device)
    return math.log(replace(expressed, cluster=cluster).predict()[0])


def _error(one: _Run, device: DeviceSpec) -> float:
    return abs(math.exp(_predicted(one.expressed, device)) / (one.run.measured_s or 1.0) - 1)


def _trainer_constants() -> list[Constant]:
    return [one for one in constants() if all(target.startswith("trainers/") for target in one.targets)]


def _slopes(expressed: ExpressedRun, device: DeviceSpec, at: float) -> tuple[float, ...]:
    """Return the derivatives of the logarithm of the time, by the sustained share and by trainers' constants."""
    # Downwards, because a share cannot exceed the whole.
    slopes = [(at - _predicted(expressed, with_sustained(device, math.exp(-STEP)))) / STEP]
    for one in _trainer_constants():
        value = shipped()[one.name]
        other = with_values(expressed, {**shipped(), one.name: one.from_line(one.to_line(value) + STEP)})
        slopes.append(0.0 if other.trainer == expressed.trainer else (_predicted(other, device) - at) / STEP)
    return tuple(slopes)


def _factor(runs: Sequence[_Run], spread: float) -> float:
    """Return the factor of the sustained share in the posterior of the constants."""
    spreads = [spread, *(one.spread for one in _trainer_constants())]
    alike = Counter(one.run.model for one in runs)
    weight = np.array([alike[one.run.model] ** -0.5 for one in runs]) * EVIDENCE / TYPICAL_ERROR**2
    step = robust_posterior(
        np.array([one.slopes for one in runs]),
        np.array([one.error for one in runs]),
        weight,
        TYPICAL_ERROR,
        np.diag(np.array(spreads) ** -2.0),
        np.zeros(len(spreads)),
    )
    return math.exp(step[0])
