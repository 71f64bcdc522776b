"""Dealing a global batch to data-parallel replicas, so that none waits long for the slowest."""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InputError
from pipeloom.packing.loads import IntArray, Loads
from pipeloom.packing.policies import assign_bins

_EFFORT = 1000
_NO_LIMIT = np.iinfo(np.int64).max // 4


def deal(loads: Loads, num_replicas: int, seed: int = 0, *, encoder_weight: float = 1.0) -> tuple[tuple[int, ...], ...]:
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


def _members(replica_of: IntArray, replica: int) -> tuple[int, ...]:
    return tuple(np.flatnonzero(replica_of == replica).tolist())
