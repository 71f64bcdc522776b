"""Assign a global batch to data-parallel replicas and tune each, minimizing the time of the slowest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pipeloom.packing import PackingSpec, assign_by_time, assign_to_replicas
from pipeloom.spec import Batch
from pipeloom.tuning.pipeline import TunedPipeline, batch_sizes
from pipeloom.tuning.spec import TuningSpec
from pipeloom.tuning.tune import TuningResult, tune

_TRIAL_EFFORT = 0.1
_TRIALS = 6
"""Number of assignments that are tuned as a trial, per replica."""


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """The share of one replica: sample positions in the global batch, the samples as a batch, and its tuning."""

    members: tuple[int, ...]
    batch: Batch
    tuned: TuningResult


def tune_replicas(
    pipeline: TunedPipeline,
    batch: Batch,
    num_replicas: int,
    packing: PackingSpec | int,
    spec: TuningSpec | None = None,
    seed: int = 0,
) -> tuple[Replica, ...]:
    """Assign a global batch to replicas and tune each.

    Samples are assigned by the simulated times of the shares (`pipeloom.packing.assign_by_time`). All replicas wait for
    the slowest, so its time is minimized.

    Parameters
    ----------
    pipeline : TunedPipeline
        Pipeline of one replica; all replicas are equal.
    batch : Batch
        The global batch.
    packing : PackingSpec or int
        See `tune`.

    Raises
    ------
    InputError, InfeasibleError
        Same as `tune`, or if there are fewer samples than replicas.
    """
    spec = spec or TuningSpec()
    trial = msgspec.structs.replace(spec, effort=min(spec.effort, _TRIAL_EFFORT))
    left = _TRIALS * num_replicas

    def predict(members: tuple[int, ...], _replica: int) -> float | None:
        nonlocal left
        if not left:
            return None
        left -= 1
        return tune(pipeline, batch.part(members), packing, trial, seed).planned_ns

    def tuned(assignments: Iterable[tuple[int, ...]]) -> tuple[Replica, ...]:
        return tuple(
            Replica(members, part := batch.part(members), tune(pipeline, part, packing, spec, seed))
            for members in assignments
        )

    def slowest(replicas: Iterable[Replica]) -> int:
        return max(replica.tuned.planned_ns for replica in replicas)

    loads = batch_sizes(pipeline, batch).loads
    found = assign_by_time(loads, num_replicas, predict, seed)
    # Trials are short: with full tuning, the initial assignment may still be faster.
    assignments = dict.fromkeys((found.members, assign_to_replicas(loads, num_replicas, seed)))
    return tuple(sorted(min(map(tuned, assignments), key=slowest), key=lambda replica: replica.members))
