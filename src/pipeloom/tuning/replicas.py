"""Deal a global batch to data-parallel replicas so that the slowest, each tuned for itself, is as fast as can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from pipeloom.packing import Loads, deal
from pipeloom.spec import Batch
from pipeloom.tuning.pipeline import TunedPipeline, batch_sizes
from pipeloom.tuning.spec import TuningSpec
from pipeloom.tuning.tune import Tuned, tune

_TRIAL_EFFORT = 0.1
_ROUNDS = 6


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

    Dealt by loads first, with the first rank's counted or not; the better of these is improved by dealing the samples
    of the slowest and the fastest replica anew, where simulation says that it helps. All replicas wait for the slowest,
    so that one counts.

    Parameters
    ----------
    pipeline : TunedPipeline
        Of one replica; all are alike.
    batch : Batch
        The global batch.
    num_replicas : int
    token_budget : int
    spec : TuningSpec or None
    seed : int

    Raises
    ------
    InputError, InfeasibleError
        As `tune`; or there are fewer samples than replicas.
    """
    spec = spec or TuningSpec()
    trial = msgspec.structs.replace(spec, effort=min(spec.effort, _TRIAL_EFFORT))
    loads = batch_sizes(pipeline, batch).loads

    def planned(members: tuple[int, ...], how: TuningSpec = trial) -> Replica:
        own = Batch(tuple(batch.samples[i] for i in members), batch.iteration)
        return Replica(members, own, tune(pipeline, own, token_budget, how, seed))

    def slowest(replicas: Iterable[Replica]) -> int:
        return max(replica.tuned.planned_ns for replica in replicas)

    dealings = [
        [planned(members) for members in deal(loads, num_replicas, seed, encoder_weight=weight)]
        for weight in (0.0, 1.0)
    ]
    best = first = min(dealings, key=slowest)
    for attempt in range(_ROUNDS if num_replicas > 1 else 0):
        best.sort(key=lambda replica: replica.tuned.planned_ns)
        pool = (*best[0].members, *best[-1].members)
        pair = [
            planned(tuple(sorted(pool[i] for i in members)))
            for members in deal(_some(loads, pool), 2, seed + attempt + 1)
        ]
        if slowest(pair) < best[-1].tuned.planned_ns:
            best = [*best[1:-1], *pair]
    # Trials are short: what began it may still be the faster once both are tuned in earnest.
    finals = [
        [planned(replica.members, spec) for replica in each] for each in ([best] if best is first else [best, first])
    ]
    return tuple(sorted(min(finals, key=slowest), key=lambda replica: replica.members))


def _some(loads: Loads, members: tuple[int, ...]) -> Loads:
    index = np.array(members)
    return Loads(loads.tokens[index], loads.backbone[index], loads.encoder[index])
