"""Cost tables of chunks, computed once offline (PipeTune A.4), to estimate thousands of microbatches at once.

PipeTune profiles an encoder by its number of images, and a backbone stage by sequence length for attention and by
total length for everything else. Here, a chunk is probed on a grid of total tokens and mean (token-weighted) sequence
length. This covers both cases, since attention is linear in the mean length for equal tokens. The cost per sequence is
determined by a difference and stored separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeloom.cost import CostModel
from pipeloom.spec import Chunk, Workload
from pipeloom.tuning.kernels.workloads import Features, interpolate

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FORWARD, BACKWARD, ACTIVATION, OUTPUT, RESERVE = 0, 1, 2, 3, 4
"""Rows of an estimate: forward seconds, backward seconds, activation bytes, output bytes, and bytes to reserve for a
pass and its messages."""
NUM_ROWS = 5
_NUM_NODES = 32
"""Number of grid nodes along the tokens, denser for small workloads."""


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Costs of one or more chunks on a grid.

    Attributes
    ----------
    tokens : array, shape (num_nodes,)
        Total tokens of the grid nodes, increasing.
    mean_length : array, shape (num_nodes, num_lengths)
        Token-weighted mean length at each probe, increasing along each row.
    values : array, shape (num_chunks, NUM_ROWS, num_nodes, num_lengths)
        Costs at each probe without the cost per sequence.
    """

    tokens: FloatArray
    mean_length: FloatArray
    values: FloatArray
    per_instance: FloatArray

    def estimate(self, features: Features) -> FloatArray:
        """Return the costs of many workloads, shape (num_chunks, NUM_ROWS, num_workloads). Empty workloads cost 0."""
        out = np.empty((*self.per_instance.shape, len(features.tokens)))
        interpolate(self.tokens, self.mean_length, self.values, self.per_instance, features, out)
        return out


def tabulate(
    costs: CostModel,
    chunks: Sequence[Chunk],
    max_tokens: int,
    lengths: Sequence[int],
    *,
    num_messages: int | None = None,
) -> CostTable:
    """Tabulate the costs of the chunks of one module.

    Parameters
    ----------
    max_tokens : int
        Maximum number of tokens in a workload.
    lengths : sequence of int
        Two or more increasing sequence lengths up to the maximum length.
    num_messages : int or None
        Number of outputs to reserve memory for, in addition to the workspace of a pass. None: no reserve.
    """

    def probe(lengths: tuple[int, ...]) -> FloatArray:
        return _probe(costs, chunks, Workload(lengths), num_messages)

    unit = max(1, round(float(np.mean(lengths))) // 6)
    # Three sequences of 4 units, or one of 6 and three of 2: equal tokens and squares, but different numbers.
    even, uneven = (4 * unit,) * 48, ((6 * unit,) + (2 * unit,) * 3) * 16
    per_instance = np.maximum((probe(uneven) - probe(even)) / 16, 0.0)
    smallest = max(2, min(32, max_tokens // 2))
    nodes = np.unique(np.geomspace(smallest, max(max_tokens, smallest * 2), _NUM_NODES).astype(np.int64))
    values = np.empty((len(chunks), NUM_ROWS, len(nodes), len(lengths)))
    mean_length = np.empty((len(nodes), len(lengths)))
    for i, tokens in enumerate(nodes.tolist()):
        for j, length in enumerate(lengths):
            workload = _sequences(tokens, length)
            mean_length[i, j] = sum(n * n for n in workload) / tokens
            values[:, :, i, j] = probe(workload) - per_instance * len(workload)
        # Small totals have no long sequences. Equal probes would give no slope for the interpolation.
        for j in range(1, len(lengths)):
            if mean_length[i, j] <= mean_length[i, j - 1]:
                mean_length[i, j] = mean_length[i, j - 1] + 1e-3
                values[:, :, i, j] = values[:, :, i, j - 1]
    return CostTable(nodes.astype(float), mean_length, values, per_instance)


def _sequences(tokens: int, length: int) -> tuple[int, ...]:
    whole, rest = divmod(tokens, length)
    return (length,) * whole + ((rest,) if rest else ())


def _probe(costs: CostModel, chunks: Sequence[Chunk], workload: Workload, num_messages: int | None) -> FloatArray:
    rows = np.zeros((len(chunks), NUM_ROWS))
    for row, chunk in zip(rows, chunks, strict=True):
        base = costs.chunk_costs(chunk, workload)[0]
        output = costs.boundary_bytes(chunk, workload)
        row[:RESERVE] = base.forward_s, base.backward_s, base.activation_bytes, output
        if num_messages is not None:
            row[RESERVE] = costs.workspace_bytes(chunk, workload) + num_messages * output
    return rows
