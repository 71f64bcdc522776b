"""Deal a global batch to data-parallel replicas so that the slowest, each tuned for itself, is as fast as can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pipeloom.packing import deal, deal_by_time
from pipeloom.spec import Batch
from pipeloom.tuning.pipeline import TunedPipeline, batch_sizes
from pipeloom.tuning.spec import TuningSpec
from pipeloom.tuning.tune import Tuned, tune

_TRIAL_EFFORT = 0.1
_TRIALS = 6
"""Shares tuned for a trial, for every replica."""


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """What one replica runs: its samples (positions in the global batch), as a batch of its own, and how."""

    members: tuple[int, ...]
    batch: Batch
    tuned: Tuned


def tune_replicas(
    pipeline: TunedPipeline,
    batch: Batch,
    num_replicas: int,
    token_budget: int,
    spec: TuningSpec | None = None,
    seed: int = 0,
) -> tuple[Replica, ...]:
    """Divide a global batch among replicas and tune each.

    Dealt by what the recurrence says that shares take (`pipeloom.packing.deal_by_time`). All replicas wait for the
    slowest, so that one counts.

    Parameters
    ----------
    pipeline : TunedPipeline
        Of one replica; all are alike.
    batch : Batch
        The global batch.

    Raises
    ------
    InputError, InfeasibleError
        As `tune`; or there are fewer samples than replicas.
    """
    spec = spec or TuningSpec()
    trial = msgspec.structs.replace(spec, effort=min(spec.effort, _TRIAL_EFFORT))
    left = _TRIALS * num_replicas

    def predict(members: tuple[int, ...], _replica: int) -> float | None:
        nonlocal left
        if not left:
            return None
        left -= 1
        return tune(pipeline, batch.part(members), token_budget, trial, seed).planned_ns

    def tuned(dealings: Iterable[tuple[int, ...]]) -> tuple[Replica, ...]:
        return tuple(
            Replica(members, part := batch.part(members), tune(pipeline, part, token_budget, spec, seed))
            for members in dealings
        )

    def slowest(replicas: Iterable[Replica]) -> int:
        return max(replica.tuned.planned_ns for replica in replicas)

    loads = batch_sizes(pipeline, batch).loads
    found = deal_by_time(loads, num_replicas, predict, seed)
    # Trials are short: what began it may still be the faster once both are tuned in earnest.
    dealings = dict.fromkeys((found.members, deal(loads, num_replicas, seed)))
    return tuple(sorted(min(map(tuned, dealings), key=slowest), key=lambda replica: replica.members))
