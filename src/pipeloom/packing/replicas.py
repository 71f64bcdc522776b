"""Assign the samples of a global batch to data-parallel replicas, so that none waits long for the slowest.

Loads decide first. Equal loads do not mean equal times: a long document delays a pipeline however few samples come with
it, and a share may not fit in memory. Samples are therefore moved from the replica that is predicted to be slowest to
faster ones, as long as the predicted time of the slowest falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pipeloom.errors import InputError, check_seed
from pipeloom.packing.loads import Loads
from pipeloom.packing.policies import assign_bins

Members = tuple[int, ...]
"""Positions of the samples of one replica, ascending."""
Predict = Callable[[Members, int], float | None]
"""Returns the time of a share on a replica, in any unit: infinity if it does not fit, None to end prediction."""

_EFFORT = 1000
_NO_LIMIT = np.iinfo(np.int64).max // 4
_TOLERANCE = 1.03
"""A slowest replica within this ratio of the mean is accepted; predictions are not more accurate."""
_GAIN = 0.998
"""An exchange must lower the slowest replica's time to this fraction."""
_STEPS = (1.0, 0.5, 0.25)
"""Fractions of the load difference between two replicas that are moved, tried in order until one helps."""
_LIGHT = 1e-6
"""Load of a sample without work, as a fraction of the smallest positive load."""
_DRAWS = 64
"""Random exchanges that are drawn to find one with the wanted load."""


def assign_to_replicas(loads: Loads, num_replicas: int, seed: int = 0) -> tuple[Members, ...]:
    """Divide the samples of a global batch among replicas with even work.

    Every replica's ranks wait for the slowest replica's gradients, so the heaviest one determines the time. Two loads
    are balanced at once: the backbone's, which all ranks have, and the load of a rank that also runs encoders.

    Returns
    -------
    tuple of tuple of int
        Positions of the samples of each replica, in order. Each replica has at least one sample.

    Raises
    ------
    InputError
        If there are fewer samples than replicas, or the seed is not an integer of at least 0.
    """
    check_seed("seed", seed)
    if not 1 <= num_replicas <= len(loads):
        raise InputError(
            "num_replicas",
            f"{num_replicas} is not in 1..{len(loads)}, the number of samples",
            "use fewer replicas, or larger batches",
        )
    first_rank = loads.backbone + loads.encoder_weight * loads.encoder
    rows = _positive(np.stack([loads.backbone, first_rank]))
    # No token budget applies here: every replica packs as many microbatches as it needs.
    tokens = np.ones(len(loads), np.int64)
    replica_of = assign_bins(tokens, rows, _NO_LIMIT, num_replicas, seed, _EFFORT)
    return tuple(tuple(np.flatnonzero(replica_of == replica).tolist()) for replica in range(num_replicas))


def _positive(rows: np.ndarray) -> np.ndarray:
    """Return the loads with a small one for each sample without work, so that the replicas share these samples too.

    Otherwise all of them would fit equally well on the first of the lightest replicas, and others could stay empty.
    """
    least = rows.min(where=rows > 0, initial=np.inf)
    light = _LIGHT * least if np.isfinite(least) else 1.0
    return np.where(rows.max(axis=0) > 0, rows, light)


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """An assignment of samples to replicas.

    Attributes
    ----------
    members : tuple of tuple of int
        Positions of the samples of each replica, ascending.
    predicted : tuple of float
        Predicted time of each share; empty if prediction ended before every share had one.
    """

    members: tuple[Members, ...]
    predicted: tuple[float, ...] = ()

    @property
    def slowest(self) -> float:
        """The predicted time of the slowest replica; infinite if there are no predictions."""
        return max(self.predicted, default=float("inf"))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replica of every sample, in the order of the batch."""
        replica_of = {i: replica for replica, share in enumerate(self.members) for i in share}
        return tuple(replica_of[i] for i in range(len(replica_of)))


def assign_by_time(loads: Loads, num_replicas: int, predict: Predict, seed: int = 0) -> ReplicaAssignment:
    """Divide the samples of a global batch among replicas so that the slowest is predicted to be as fast as possible.

    Starts from the assignment by loads (`assign_to_replicas`). Then the slowest and the fastest replica exchange
    samples whose load would roughly equalize their times; if that does not help, the slowest and the next fastest do. A
    share keeps its other samples, so a replica with a long document gives away others.

    Parameters
    ----------
    predict : callable
        Must return the same time for the same share and replica. None ends the exchanges, so ``predict`` determines the
        number of its calls.

    Returns
    -------
    ReplicaAssignment
        Never predicted to be slower than the assignment by loads, and deterministic for the same predictions. A
        replica that is predicted to be slow at everything receives less work.

    Raises
    ------
    InputError
        If there are fewer samples than replicas.
    """
    first = assign_to_replicas(loads, num_replicas, seed)
    predicted: list[float] = []
    for replica, members in enumerate(first):
        took = predict(members, replica) if num_replicas > 1 else None
        if took is None:
            return ReplicaAssignment(first)
        predicted.append(took)
    assignment = _Assignment(loads, list(first), predicted, np.random.default_rng(seed))
    while assignment.improve(predict):
        pass
    return ReplicaAssignment(tuple(assignment.members), tuple(assignment.predicted))


@dataclass
class _Assignment:
    """An assignment of samples to replicas under improvement."""

    loads: Loads
    members: list[Members]
    predicted: list[float]
    random: np.random.Generator
    tried: set[tuple[int, int, Members, Members]] = field(default_factory=set)

    def improve(self, predict: Predict) -> bool:
        """Make the slowest replica faster by one exchange; return False if none helps or none is needed."""
        order = np.argsort(self.predicted, kind="stable").tolist()
        slow = order[-1]
        mean = float(np.mean(self.predicted))
        if np.isfinite(mean) and self.predicted[slow] <= _TOLERANCE * mean:
            return False
        for part in _STEPS:
            for fast in order[:-1]:
                pair = self.exchanged(slow, fast, part)
                if pair is None or (slow, fast, *pair) in self.tried:
                    continue
                self.tried.add((slow, fast, *pair))
                times = []
                for replica, members in zip((slow, fast), pair, strict=True):
                    took = predict(members, replica)
                    if took is None:
                        return False
                    times.append(took)
                    if took >= _GAIN * self.predicted[slow]:
                        break
                else:
                    self.members[slow], self.members[fast] = pair
                    self.predicted[slow], self.predicted[fast] = times
                    return True
        return False

    def exchanged(self, slow: int, fast: int, part: float) -> tuple[Members, Members] | None:
        """Return both shares after about ``part`` of the load difference has moved; None if no exchange can.

        Exchanges are drawn at random, and the one whose loads are nearest to the wanted ones is returned.
        """
        a, b = np.array(self.members[slow]), np.array(self.members[fast])
        rows = np.stack([self.loads.backbone, self.loads.encoder])
        both = rows[:, a].sum(axis=1) + rows[:, b].sum(axis=1)
        wanted = part * both * self._excess(slow, fast)
        unit = np.where(both > 0, both, 1.0)
        best, least = None, float("inf")
        for draw in range(_DRAWS):
            moving = self.random.permutation(a)
            # Every other draw also moves samples back.
            returning = self.random.permutation(b)[: int(self.random.integers(1, min(4, len(b)) + 1)) * (draw % 2)]
            back = rows[:, returning].sum(axis=1)
            moved = (np.cumsum(rows[:, moving], axis=1) - (back + wanted)[:, None]) / unit[:, None]
            off = np.abs(moved).sum(axis=0)
            # The slower replica keeps at least one sample.
            off = off[: len(a) if len(returning) else len(a) - 1]
            if len(off) and off.min() < least:
                best, least = (moving[: int(off.argmin()) + 1], returning), float(off.min())
        if best is None:
            return None
        moving, returning = best
        return (
            tuple(sorted((set(a.tolist()) - set(moving.tolist())) | set(returning.tolist()))),
            tuple(sorted((set(b.tolist()) - set(returning.tolist())) | set(moving.tolist()))),
        )

    def _excess(self, slow: int, fast: int) -> float:
        """Return the fraction of two replicas' load whose move would equalize their times if times were loads."""
        a, b = self.predicted[slow], self.predicted[fast]
        if not np.isfinite(a):
            return 0.25
        return (a - b) / (2 * (a + b))
