"""Initial orders of microbatches: simple rules, and PipeTune's permutations of clusters."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from pipeloom.tuning.kernels.chain import Chain
from pipeloom.tuning.table import IntArray

MOST_CLUSTERS = 6


def latencies(chain: Chain) -> tuple[IntArray, IntArray]:
    """Return the time of every microbatch in the encoders, and in total on all ranks, in ns."""
    num = len(chain.part_start) - 1
    home = np.repeat(np.arange(num), np.diff(chain.part_start))
    encoder = np.bincount(home, weights=chain.part_forward + chain.part_backward, minlength=num).astype(np.int64)
    return encoder, encoder + chain.forward.sum(axis=1) + chain.backward.sum(axis=1)


def simple_orders(chain: Chain) -> IntArray:
    """Return one order per row: as packed, by encoder work, and with light microbatches at both ends."""
    encoder, total = latencies(chain)
    rising = np.argsort(total, kind="stable")
    by_encoder = np.argsort(encoder, kind="stable")
    ends = [np.concatenate([each[::2], each[1::2][::-1]]) for each in (by_encoder, rising)]
    return np.stack([np.arange(len(total)), by_encoder, *ends])


def clusters(chain: Chain) -> list[IntArray]:
    """Cluster microbatches by cutting the sorted latencies at their widest gaps (PipeTune section 5.2)."""
    _, total = latencies(chain)
    rising = np.argsort(total, kind="stable")
    gaps = np.diff(total[rising])
    widest = np.sort(np.argsort(-gaps, kind="stable")[: MOST_CLUSTERS - 1])
    cuts = [k + 1 for k in widest.tolist() if gaps[k] > 0]
    return np.split(rising, cuts)


def cluster_orders(chain: Chain) -> IntArray:
    """Return every permutation of the clusters, with the microbatches of a cluster adjacent: at most 720 rows."""
    return np.stack([np.concatenate(arrangement) for arrangement in permutations(clusters(chain))])
