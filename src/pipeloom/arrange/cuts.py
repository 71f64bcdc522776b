"""Where a chain of layers is cut: by load, or by count as frameworks do."""

from __future__ import annotations

import numpy as np

from pipeloom.arrange.layer_chain import LayerChain
from pipeloom.errors import InputError
from pipeloom.taskgraph import IntArray


def even_cuts(loads: IntArray, num_chunks: int) -> tuple[int, ...]:
    """Cut a chain where its cumulated load comes nearest to equal shares, every chunk having a layer."""
    total = np.concatenate([[0], np.cumsum(loads)])
    cuts = [0]
    for c in range(1, num_chunks):
        share = total[-1] * c / num_chunks
        at = int(np.searchsorted(total, share))
        if at > 0 and share - total[at - 1] < total[at] - share:
            at -= 1
        cuts.append(min(max(at, cuts[-1] + 1), len(loads) - (num_chunks - c)))
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
