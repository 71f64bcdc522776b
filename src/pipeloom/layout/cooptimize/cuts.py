"""Cut a chain of layers by load, or by count as frameworks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.layout.cooptimize.kernels.fold import fold
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement
from pipeloom.layout.layouts import equal_layers
from pipeloom.taskgraph import IntArray


def from_zero(values: npt.ArrayLike) -> IntArray:
    """Return 0 and the cumulative sums of values."""
    sums: IntArray = np.concatenate([[0], np.cumsum(values)])
    return sums


def balanced_cuts(loads: IntArray, ranks: tuple[int, ...], thin: int = 0) -> tuple[int, ...]:
    """Cut a chain so that the ranks (not the chunks) of a given placement have similar loads.

    Chunks of overloaded ranks shrink and the others grow for several rounds; the best cuts are returned.
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
    """Move boundaries by single layers while that lowers the sum of the squared rank loads.

    Needed for many ranks with few layers each, since `balanced_cuts` leaves their loads more than 10 % apart. Stop
    after ``sweeps`` passes over all boundaries.
    """
    at, sizes = list(cuts), loads.tolist()
    rank = [0] * (max(ranks) + 1)
    for c, home in enumerate(ranks):
        rank[home] += sum(sizes[at[c] : at[c + 1]])
    for _ in range(sweeps):
        moved = False
        for c in range(1, len(ranks)):
            up, down = ranks[c - 1], ranks[c]
            for giver, taker, layer, step, count in (
                (up, down, at[c] - 1, -1, at[c] - at[c - 1]),
                (down, up, at[c], 1, at[c + 1] - at[c]),
            ):
                if giver != taker and count > 1 and rank[giver] - rank[taker] > sizes[layer]:
                    rank[giver] -= sizes[layer]
                    rank[taker] += sizes[layer]
                    at[c] += step
                    moved = True
                    break
        if not moved:
            break
    return tuple(at)


def stage_cuts(chain: LayerChain) -> tuple[int, ...]:
    """Cut into one stage per rank and minimize the largest sum of load, warm-up and cool-down, a lower bound of 1F1B.

    Filling each stage up to a limit is optimal for that limit: a stage that begins one layer later loses at most as
    much of its limit as it has less work. Bisection finds the minimum limit.
    """
    p, n = chain.num_ranks, chain.num_layers
    work, before, hop = _work_and_ends(chain)

    def cuts_for(limit: int) -> tuple[int, ...] | None:
        cuts = [0]
        for k in range(p):
            free = limit - before[cuts[-1]] - k * hop + work[cuts[-1]]
            end = min(int(np.searchsorted(work, free, side="right")) - 1, n - (p - k - 1))
            if end <= cuts[-1]:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == n else None

    found = cuts_for(_least(lambda limit: cuts_for(limit) is not None, int(work[-1] + before[-1]) + p * hop, 1))
    if found is None:
        raise InputError("layers", f"{n} cannot fill {p} stages", "use fewer ranks")
    return found


def folded(chain: LayerChain, ends: float = 1.0) -> PartitionPlacement:
    """Place two chunks per rank, down the ranks and up again, and minimize the largest sum of load, warm-up and
    cool-down.

    Warm-up and cool-down are weighted by ``ends``. The limit is found with a relative precision of 1e-5; for a given
    limit, `pipeloom.layout.cooptimize.kernels.fold` is exact. The last rank, and ranks whose second chunk would be
    empty, have one chunk.
    """
    p, n = chain.num_ranks, chain.num_layers
    work, before, hop = _work_and_ends(chain)
    before, hop = (before * ends).astype(np.int64), int(hop * ends)
    low, back = (np.zeros((p + 1, n + 1), np.int64) for _ in range(2))
    cuts = np.zeros((2, p), np.int64)
    total = int(work[-1])
    fits = _least(
        lambda limit: fold(work, before, limit, hop, low, back, cuts),
        total + int(before[-1]) + p * hop,
        total // p // 100_000 + 1,
    )
    if not fold(work, before, fits, hop, low, back, cuts):
        raise InputError("layers", f"{n} cannot fill {p} stages", "use fewer ranks")
    chunks = [(int(cuts[0, r]), r) for r in range(p)]
    chunks += [(int(cuts[1, r + 1]), r) for r in range(p - 2, -1, -1) if cuts[1, r + 1] < cuts[1, r]]
    return PartitionPlacement((*(first for first, _ in chunks), n), tuple(rank for _, rank in chunks))


def filled(chain: LayerChain, strategies: tuple[int, ...] = ()) -> PartitionPlacement | None:
    """Place at most one stage on each rank, in the order of the ranks, within the memory of each rank.

    The largest work of a rank is minimal, with the precision of `folded`. For a given limit of work, filling each rank
    in turn is optimal: a stage that begins one layer later ends no earlier. A rank that the next layer does not fit
    stays empty.

    ``strategies`` are those of a `PartitionPlacement`; the result has none. Return None if one microbatch of such
    stages does not fit.
    """
    n, rows = chain.num_layers, np.arange(chain.num_layers)
    chosen = np.array(strategies or (0,) * n, dtype=np.int64)
    work, static = from_zero(chain.total_ns[rows, chosen]), from_zero(chain.static_bytes)
    activation = from_zero(chain.activation_bytes[rows, chosen])
    gradient = from_zero(chain.gradient_bytes[rows, chosen])
    split = from_zero(chain.weight_ns[rows, 0] + chain.weight_ns[rows, chosen])
    capacity = chain.headroom_bytes

    def within(limit: int) -> PartitionPlacement | None:
        cuts, ranks = [0], []
        for rank in range(chain.num_ranks):
            first = cuts[-1]
            # As in `kernels.evaluate`, stages with split layers hold the larger of activations and gradients.
            gradients = np.where(split[first:] > split[first], gradient[first:] - gradient[first], 0)
            held = static[first:] - static[first] + np.maximum(activation[first:] - activation[first], gradients)
            fits = (held <= capacity[rank]) & (work[first:] - work[first] <= limit)
            end = first + int(fits.sum()) - 1
            if end > first:
                cuts.append(end)
                ranks.append(rank)
        return PartitionPlacement(tuple(cuts), tuple(ranks)) if cuts[-1] == n else None

    total = int(work[-1])
    least = _least(lambda limit: within(limit) is not None, total, total // chain.num_ranks // 100_000 + 1)
    return within(least)


def packed(chain: LayerChain, strategies: tuple[int, ...], most_chunks: int) -> Iterator[PartitionPlacement]:
    """Yield placements of several chunks per rank that fit, though no stages of consecutive ranks do.

    The layers are cut into chunks of equal bytes, a few per rank. The largest chunks choose their rank first: that with
    the least headroom that suffices, or that with the most headroom.
    """
    n, p, rows = chain.num_layers, chain.num_ranks, np.arange(chain.num_layers)
    chosen = np.array(strategies or (0,) * n, dtype=np.int64)
    held = chain.activation_bytes[rows, chosen]
    if chain.weight_ns.any():
        held = np.maximum(held, chain.gradient_bytes[rows, chosen])
    held = held + chain.static_bytes
    most = min(n, most_chunks)
    for num in sorted({*range(p, most, p), most}):
        cuts = balanced_cuts(held, tuple(range(num)))
        sizes = np.add.reduceat(held, cuts[:-1])
        for sign in (1, -1):
            free, ranks = chain.headroom_bytes.copy(), [0] * num
            for c in np.argsort(-sizes, kind="stable").tolist():
                choices = np.flatnonzero(free >= sizes[c])
                if not len(choices):
                    break
                ranks[c] = int(choices[(sign * free[choices]).argmin()])
                free[ranks[c]] -= sizes[c]
            else:
                yield PartitionPlacement(cuts, tuple(ranks)).merged()


def _work_and_ends(chain: LayerChain) -> tuple[IntArray, IntArray, int]:
    """Return cumulative sums of work and of warm-up plus cool-down, and what a boundary transfer adds to the latter."""
    work = from_zero(chain.total_ns[:, 0]) * chain.num_microbatches
    fillable = bool(chain.weight_ns.any())
    ends = chain.forward_ns[:, 0] if fillable else chain.forward_ns[:, 0] + chain.backward_ns[:, 0]
    return work, from_zero(ends), chain.delay_ns * (1 if fillable else 2)


def _least(enough: Callable[[int], bool], high: int, step: int) -> int:
    """Return the minimum sufficient limit with precision ``step``, or ``high`` if no lower limit suffices."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + step
    return high


def _shared_cuts(loads: IntArray, shares: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Cut where the cumulative load is closest to the cumulative shares, with at least one layer per chunk."""
    total = from_zero(loads)
    wanted = np.cumsum(shares) / shares.sum() * total[-1]
    num = len(shares)
    cuts = [0]
    for c in range(1, num):
        at = int(np.searchsorted(total, wanted[c - 1]))
        if at > 0 and wanted[c - 1] - total[at - 1] < total[min(at, len(loads))] - wanted[c - 1]:
            at -= 1
        cuts.append(min(max(at, cuts[-1] + 1), len(loads) - (num - c)))
    return (*cuts, len(loads))


EMBEDDING, HEAD = "embedding", "head"
"""Names of first and last layers that standard partitions add to the first and last chunk without counting them."""


def equal_cuts(chain: LayerChain, num_chunks: int) -> tuple[int, ...]:
    """Cut as frameworks do: equal numbers of layers per chunk, not counting embedding and head."""
    first, last = chain.layer_names[0] == EMBEDDING, chain.layer_names[-1] == HEAD
    counted = chain.num_layers - first - last
    if counted < num_chunks:
        return equal_layers(chain.num_layers, num_chunks)
    inner = equal_layers(counted, num_chunks)
    return (0, *(cut + first for cut in inner[1:-1]), chain.num_layers)
