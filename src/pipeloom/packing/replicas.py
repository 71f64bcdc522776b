"""Dealing a global batch to data-parallel replicas, so that none waits long for the slowest.

By loads first. Equal loads are not quite equal times: a long document holds a pipeline up however little comes with it,
and a share may have no room in memory. So samples are then moved from the replica that is predicted to be slowest to
faster ones, as long as the predicted time of the slowest falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pipeloom.errors import InputError
from pipeloom.packing.loads import IntArray, Loads
from pipeloom.packing.policies import assign_bins

Members = tuple[int, ...]
"""Positions of the samples of one replica, ascending."""
Predict = Callable[[Members, int], float | None]
"""What a share takes a replica, in any unit; infinite where it does not fit, None: predict no more."""

_EFFORT = 1000
_NO_LIMIT = np.iinfo(np.int64).max // 4
_NEAR = 1.03
"""A slowest replica so near to the mean is left alone: predictions are not better than that."""
_GAIN = 0.998
"""What an exchange must make of the slowest replica's time."""
_STEPS = (1.0, 0.5, 0.25)
"""Parts of what would even two replicas out that are moved between them, one after the other until one helps."""
_DRAWS = 64
"""Exchanges of samples that are drawn to find one of the wanted load."""


def deal(loads: Loads, num_replicas: int, seed: int = 0, *, encoder_weight: float = 1.0) -> tuple[Members, ...]:
    """Divide the samples of a global batch among replicas, even in work.

    Every replica's ranks wait for the slowest one's gradients, so what counts is the heaviest replica. Two loads are
    evened out at once: the backbone's, which all ranks have, and that of a rank that has encoders beside it.

    Parameters
    ----------
    loads : Loads
        Of all samples.
    num_replicas : int
    seed : int
    encoder_weight : float
        Backbone work of the ranks without encoders against that of the encoders' rank; with ``r`` ranks and one
        unit for both loads, ``r`` where the encoders are whole on one rank. 0 evens out the backbone alone.

    Returns
    -------
    tuple of tuple of int
        Positions of the samples of every replica, in order.

    Raises
    ------
    InputError
        When there are fewer samples than replicas.
    """
    if not 1 <= num_replicas <= len(loads):
        raise InputError(
            "num_replicas",
            f"{num_replicas} is not in 1..{len(loads)}, the number of samples",
            "use fewer replicas, or larger batches",
        )
    first_rank = loads.backbone + encoder_weight * loads.encoder
    rows = np.stack([loads.backbone, first_rank])
    # The budget is of tokens, and here there is none: every replica packs as many microbatches as it needs.
    tokens = np.ones(len(loads), np.int64)
    replica_of = assign_bins(tokens, rows, _NO_LIMIT, num_replicas, seed, _EFFORT)
    return tuple(_members(replica_of, replica) for replica in range(num_replicas))


@dataclass(frozen=True, slots=True)
class Dealt:
    """A dealing.

    Attributes
    ----------
    members : tuple of tuple of int
        Positions of the samples of every replica, ascending.
    predicted : tuple of float
        What each share takes; empty where the predictions ended before there was one for each.
    """

    members: tuple[Members, ...]
    predicted: tuple[float, ...] = ()

    @property
    def slowest(self) -> float:
        """What all replicas wait for; infinite where nothing is known."""
        return max(self.predicted, default=float("inf"))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replica of every sample, in the order of the batch."""
        replica_of = {i: replica for replica, share in enumerate(self.members) for i in share}
        return tuple(replica_of[i] for i in range(len(replica_of)))


def deal_by_time(loads: Loads, num_replicas: int, predict: Predict, seed: int = 0) -> Dealt:
    """Divide the samples of a global batch among replicas so that the slowest is predicted to be as fast as can be.

    Dealt by loads first (`deal`); then the slowest replica and the fastest exchange samples, about as much load as
    would even their times out, and where that does not help the slowest and the next. What a share holds beside the
    samples that move stays, so that a replica with a long document gives away the others.

    Parameters
    ----------
    loads : Loads
        Of all samples.
    num_replicas : int
    predict : callable
        The same share must always be predicted to take a replica as long. Its None ends the exchanges: how often it is
        asked is up to the one who gives it.
    seed : int

    Returns
    -------
    Dealt
        Never predicted to be slower than the dealing by loads. With the same predictions, always the same. A replica
        that is predicted to be slow at everything has less.

    Raises
    ------
    InputError
        When there are fewer samples than replicas.
    """
    first = deal(loads, num_replicas, seed)
    predicted: list[float] = []
    for replica, members in enumerate(first):
        took = predict(members, replica) if num_replicas > 1 else None
        if took is None:
            return Dealt(first)
        predicted.append(took)
    dealing = _Dealing(loads, list(first), predicted, np.random.default_rng(seed))
    while dealing.improve(predict):
        pass
    return Dealt(tuple(dealing.members), tuple(dealing.predicted))


@dataclass
class _Dealing:
    """A dealing that is being changed."""

    loads: Loads
    members: list[Members]
    predicted: list[float]
    random: np.random.Generator
    tried: set[tuple[int, int, Members, Members]] = field(default_factory=set)

    def improve(self, predict: Predict) -> bool:
        """Make the slowest replica faster by one exchange; False where none helps, or there is no need."""
        order = np.argsort(self.predicted, kind="stable").tolist()
        slow = order[-1]
        mean = float(np.mean(self.predicted))
        if np.isfinite(mean) and self.predicted[slow] <= _NEAR * mean:
            return False
        for part in _STEPS:
            for quick in order[:-1]:
                pair = self.exchanged(slow, quick, part)
                if pair is None or (slow, quick, *pair) in self.tried:
                    continue
                self.tried.add((slow, quick, *pair))
                times = []
                for replica, members in zip((slow, quick), pair, strict=True):
                    took = predict(members, replica)
                    if took is None:
                        return False
                    times.append(took)
                    if took >= _GAIN * self.predicted[slow]:
                        break
                else:
                    self.members[slow], self.members[quick] = pair
                    self.predicted[slow], self.predicted[quick] = times
                    return True
        return False

    def exchanged(self, slow: int, quick: int, part: float) -> tuple[Members, Members] | None:
        """Both shares after about so much load has gone from one to the other; None where nothing can.

        Exchanges are drawn, and the one is taken whose loads are nearest to what is wanted.
        """
        a, b = np.array(self.members[slow]), np.array(self.members[quick])
        rows = np.stack([self.loads.backbone, self.loads.encoder])
        both = rows[:, a].sum(axis=1) + rows[:, b].sum(axis=1)
        wanted = part * both * self._excess(slow, quick)
        unit = np.where(both > 0, both, 1.0)
        best, least = None, float("inf")
        for draw in range(_DRAWS):
            given = self.random.permutation(a)
            # Every other draw takes something back.
            taken = self.random.permutation(b)[: int(self.random.integers(1, min(4, len(b)) + 1)) * (draw % 2)]
            back = rows[:, taken].sum(axis=1)
            moved = (np.cumsum(rows[:, given], axis=1) - (back + wanted)[:, None]) / unit[:, None]
            off = np.abs(moved).sum(axis=0)
            # The slower one keeps something.
            off = off[: len(a) if len(taken) else len(a) - 1]
            if len(off) and off.min() < least:
                best, least = (given[: int(off.argmin()) + 1], taken), float(off.min())
        if best is None:
            return None
        given, taken = best
        return (
            tuple(sorted((set(a.tolist()) - set(given.tolist())) | set(taken.tolist()))),
            tuple(sorted((set(b.tolist()) - set(taken.tolist())) | set(given.tolist()))),
        )

    def _excess(self, slow: int, quick: int) -> float:
        """Part of two replicas' load that would even out their times if these were the loads."""
        a, b = self.predicted[slow], self.predicted[quick]
        if not np.isfinite(a):
            return 0.25
        return (a - b) / (2 * (a + b))


def _members(replica_of: IntArray, replica: int) -> Members:
    return tuple(np.flatnonzero(replica_of == replica).tolist())
