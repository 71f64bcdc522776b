"""Where a chain of layers is cut: by load, or by count as frameworks do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.layout.cooptimise import kernels
from pipeloom.layout.cooptimise.layer_chain import LayerChain, PartitionPlacement
from pipeloom.taskgraph import IntArray


def balanced_cuts(loads: IntArray, ranks: tuple[int, ...], thin: int = 0) -> tuple[int, ...]:
    """Cut a chain for a given placement so that ranks, not chunks, have equal loads as nearly as this finds.

    Chunks of overloaded ranks (one has a heavy head) shrink, the others grow, a few times over; the best is kept.
    The first ``thin`` chunks have one layer.
    """
    home = np.array(ranks)
    rest = loads[thin:]
    share = np.ones(len(ranks) - thin)
    best: tuple[int, tuple[int, ...]] | None = None
    for _ in range(12):
        cuts = (*range(thin), *(thin + cut for cut in _shared_cuts(rest, share)))
        chunk = np.add.reduceat(loads, np.array(cuts[:-1]))
        rank = np.zeros(int(home.max()) + 1, np.int64)
        np.add.at(rank, home, chunk)
        if best is None or int(rank.max()) < best[0]:
            best = (int(rank.max()), cuts)
        share = np.maximum(share * (rank.mean() / np.maximum(rank[home[thin:]], 1)), 1e-6)
    assert best is not None
    return best[1]


def settled_cuts(loads: IntArray, ranks: tuple[int, ...], cuts: tuple[int, ...], sweeps: int = 200) -> tuple[int, ...]:
    """Move boundaries by single layers while that lowers the sum of the squares of the ranks' loads.

    What many ranks with few layers each need: shares alone leave them more than a tenth apart. At
    most ``sweeps`` times over all boundaries.
    """
    at, sizes = list(cuts), loads.tolist()
    rank = [0] * (max(ranks) + 1)
    for c, home in enumerate(ranks):
        rank[home] += sum(sizes[at[c] : at[c + 1]])
    for _ in range(sweeps):
        moved = False
        for c in range(1, len(ranks)):
            up, down = ranks[c - 1], ranks[c]
            for giver, taker, layer, step, room in (
                (up, down, at[c] - 1, -1, at[c] - at[c - 1]),
                (down, up, at[c], 1, at[c + 1] - at[c]),
            ):
                if giver != taker and room > 1 and rank[giver] - rank[taker] > sizes[layer]:
                    rank[giver] -= sizes[layer]
                    rank[taker] += sizes[layer]
                    at[c] += step
                    moved = True
                    break
        if not moved:
            break
    return tuple(at)


def stage_cuts(chain: LayerChain) -> tuple[int, ...]:
    """Cut into one stage a rank with the least possible largest sum of load, head and tail: what 1F1B needs at least.

    Filling each stage as far as a limit allows is optimal for that limit, since a stage that begins a layer later
    has at most as much less room as it has less to do; the least limit is found by halving.
    """
    p, n = chain.num_ranks, chain.num_layers
    work, before, hop = _work_and_ends(chain)

    def fill(limit: int) -> tuple[int, ...] | None:
        cuts = [0]
        for k in range(p):
            room = limit - before[cuts[-1]] - k * hop + work[cuts[-1]]
            end = min(int(np.searchsorted(work, room, side="right")) - 1, n - (p - k - 1))
            if end <= cuts[-1]:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == n else None

    found = fill(_least(lambda limit: fill(limit) is not None, int(work[-1] + before[-1]) + p * hop, 1))
    if found is None:
        raise InputError("layers", f"{n} cannot fill {p} stages", "use fewer ranks")
    return found


def folded(chain: LayerChain, ends: float = 1.0) -> PartitionPlacement:
    """Two chunks a rank, down the ranks and up again, with the least possible largest sum of load, head and tail.

    Heads and tails count ``ends`` times. The limit is found to 1/100,000; for a limit,
    `pipeloom.layout.cooptimise.kernels.fold` is exact. Where a rank's second chunk would have no layer, it has one
    chunk, and so has the last rank.
    """
    p, n = chain.num_ranks, chain.num_layers
    work, before, hop = _work_and_ends(chain)
    before, hop = (before * ends).astype(np.int64), int(hop * ends)
    low, back = (np.zeros((p + 1, n + 1), np.int64) for _ in range(2))
    cuts = np.zeros((2, p), np.int64)
    total = int(work[-1])
    fits = _least(
        lambda limit: kernels.fold(work, before, limit, hop, low, back, cuts),
        total + int(before[-1]) + p * hop,
        total // p // 100_000 + 1,
    )
    if not kernels.fold(work, before, fits, hop, low, back, cuts):
        raise InputError("layers", f"{n} cannot fill {p} stages", "use fewer ranks")
    chunks = [(int(cuts[0, r]), r) for r in range(p)]
    chunks += [(int(cuts[1, r + 1]), r) for r in range(p - 2, -1, -1) if cuts[1, r + 1] < cuts[1, r]]
    return PartitionPlacement((*(first for first, _ in chunks), n), tuple(rank for _, rank in chunks))


def _work_and_ends(chain: LayerChain) -> tuple[IntArray, IntArray, int]:
    """Running sums of all microbatches' work and of heads and tails, and what a boundary transfer adds to these."""
    work = np.concatenate([[0], np.cumsum(chain.total_ns[:, 0])]) * chain.num_microbatches
    fillable = bool(chain.weight_ns.any())
    ends = chain.forward_ns[:, 0] if fillable else chain.forward_ns[:, 0] + chain.backward_ns[:, 0]
    return work, np.concatenate([[0], np.cumsum(ends)]), chain.delay_ns * (1 if fillable else 2)


def _least(enough: Callable[[int], bool], high: int, step: int) -> int:
    """Least limit that is enough, to ``step``; ``high`` where none below it is."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + step
    return high


def _shared_cuts(loads: IntArray, shares: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Cut where the cumulated load comes nearest to the cumulated shares, every chunk having a layer."""
    total = np.concatenate([[0], np.cumsum(loads)])
    wanted = np.cumsum(shares) / shares.sum() * total[-1]
    num = len(shares)
    cuts = [0]
    for c in range(1, num):
        at = int(np.searchsorted(total, wanted[c - 1]))
        if at > 0 and wanted[c - 1] - total[at - 1] < total[min(at, len(loads))] - wanted[c - 1]:
            at -= 1
        cuts.append(min(max(at, cuts[-1] + 1), len(loads) - (num - c)))
    return (*cuts, len(loads))


def equal_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Cut into chunks of equally many layers; where they do not divide, the first chunks have one more."""
    if not 1 <= num_chunks <= num_layers:
        raise InputError(
            "layers", f"{num_layers} cannot fill {num_chunks} chunks", "use fewer ranks or chunks per rank"
        )
    sizes = [num_layers // num_chunks + (c < num_layers % num_chunks) for c in range(num_chunks)]
    return tuple(int(x) for x in np.concatenate([[0], np.cumsum(sizes)]))


EMBEDDING, HEAD = "embedding", "head"
"""Names of first and last layers that standard partitions add to the first and last chunk, uncounted."""


def equal_cuts(chain: LayerChain, num_chunks: int) -> tuple[int, ...]:
    """Cut as frameworks do: equally many layers a chunk, where embedding and head are no layers."""
    first, last = chain.layer_names[0] == EMBEDDING, chain.layer_names[-1] == HEAD
    counted = chain.num_layers - first - last
    if counted < num_chunks:
        return equal_layers(chain.num_layers, num_chunks)
    inner = equal_layers(counted, num_chunks)
    return (0, *(cut + first for cut in inner[1:-1]), chain.num_layers)
