"""Orders of microbatches to begin with: simple rules, and PipeTune's permutations of clusters."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from pipeloom.tuning.kernels import Chain
from pipeloom.tuning.table import IntArray

MOST_CLUSTERS = 6


def latencies(chain: Chain) -> tuple[IntArray, IntArray]:
    """Time of every microbatch in the encoders, and on all ranks together."""
    num = len(chain.part_start) - 1
    home = np.repeat(np.arange(num), np.diff(chain.part_start))
    encoder = np.bincount(home, weights=chain.part_forward + chain.part_backward, minlength=num).astype(np.int64)
    return encoder, encoder + chain.forward.sum(axis=1) + chain.backward.sum(axis=1)


def simple_orders(chain: Chain) -> IntArray:
    """As packed; by encoder work; and light ones at both ends, where pipelines fill and drain: one order a row."""
    encoder, total = latencies(chain)
    rising = np.argsort(total, kind="stable")
    by_encoder = np.argsort(encoder, kind="stable")
    ends = [np.concatenate([each[::2], each[1::2][::-1]]) for each in (by_encoder, rising)]
    return np.stack([np.arange(len(total)), by_encoder, *ends])


def clusters(chain: Chain, most: int = MOST_CLUSTERS) -> list[IntArray]:
    """Microbatches of like latency: the sorted latencies, cut at their widest gaps (PipeTune section 5.2)."""
    _, total = latencies(chain)
    rising = np.argsort(total, kind="stable")
    gaps = np.diff(total[rising])
    widest = np.sort(np.argsort(-gaps, kind="stable")[: most - 1])
    cuts = [k + 1 for k in widest.tolist() if gaps[k] > 0]
    return np.split(rising, cuts)


def cluster_orders(chain: Chain) -> IntArray:
    """Every order of the clusters, microbatches of one cluster side by side: at most 720 rows."""
    return np.stack([np.concatenate(arrangement) for arrangement in permutations(clusters(chain))])
