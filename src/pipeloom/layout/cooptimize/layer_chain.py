"""A chain of layers as arrays, its partition and placement, and their task graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from pipeloom.cost.layers import LayerCost, LayerTable, StrategyEntry
from pipeloom.errors import InputError
from pipeloom.limits import MAX_LAYER_PASSES
from pipeloom.spec import Chunk, Layout, ModelSpec, ModuleLayout
from pipeloom.spec.layout import MOST_RANKS
from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Candidate,
    Edges,
    IntArray,
    PairLabel,
    Pairs,
    TaskGraph,
    Tasks,
    make_graph,
    to_ns,
)
from pipeloom.taskgraph.build import number_runs
from pipeloom.totals import check_work

MODULE = "lm"
"""Name of the single module of a layer table in layouts, instances and plans."""
NO_LIMIT = 2**60
"""Capacity in bytes of a rank without a limit."""
_ROUNDING_NS = 1
"""Largest difference between a duration and the same duration of the first candidate."""
_REPEATED = {
    "forward_ns": "ns of forward",
    "backward_ns": "ns of backward",
    "weight_ns": "ns of weight gradient",
    "activation_bytes": "bytes of activations",
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerChain:
    """Costs of layers by strategy as integer arrays, and the pipeline to run them on.

    Attributes
    ----------
    forward_ns, backward_ns, weight_ns : array, shape (num_layers, num_strategies)
        ``backward_ns`` is the input gradient of split layers, and the whole backward of others. ``weight_ns`` is 0 for
        layers that are not split.
    activation_bytes, gradient_bytes : array, shape (num_layers, num_strategies)
        Bytes held from the forward to the (input) backward, and from there to the weight gradient.
    delay_ns : int
        Time of a boundary transfer between ranks.
    strategies : tuple of tuple of str
        Strategy names of the candidates of every layer. Array rows are padded with the first candidate.
    update_ns : array, shape (num_layers,), or None
        Time that a layer adds after the last task of its rank. None: 0.
    """

    name: str
    layer_names: tuple[str, ...]
    num_ranks: int
    num_microbatches: int
    delay_ns: int
    forward_ns: IntArray
    backward_ns: IntArray
    weight_ns: IntArray
    activation_bytes: IntArray
    gradient_bytes: IntArray
    static_bytes: IntArray
    strategies: tuple[tuple[str, ...], ...]
    capacity_bytes: IntArray | None = None
    update_ns: IntArray | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.forward_ns)

    @property
    def total_ns(self) -> IntArray:
        """Time of forward and whole backward of one microbatch, by layer and strategy."""
        return self.forward_ns + self.backward_ns + self.weight_ns

    @property
    def headroom_bytes(self) -> IntArray:
        """Capacity of each rank; `NO_LIMIT` if there is none."""
        if self.capacity_bytes is None:
            return np.full(self.num_ranks, NO_LIMIT, np.int64)
        return self.capacity_bytes

    @property
    def end_ns(self) -> IntArray:
        """Time that every layer adds after the last task of its rank."""
        return np.zeros(self.num_layers, np.int64) if self.update_ns is None else self.update_ns

    @property
    def stride_ns(self) -> int:
        """Key difference between consecutive microbatches: the mean work per rank of one microbatch."""
        return max(1, int(self.total_ns[:, 0].sum()) // self.num_ranks)

    def with_capacity(self, capacity_bytes: npt.ArrayLike | None) -> LayerChain:
        """Return the chain with another memory limit: one number for all ranks, one per rank, or None."""
        if capacity_bytes is None:
            return replace(self, capacity_bytes=None)
        cap = np.asarray(capacity_bytes, dtype=np.int64)
        return replace(self, capacity_bytes=np.broadcast_to(cap, (self.num_ranks,)).copy())


@dataclass(frozen=True, slots=True)
class PartitionPlacement:
    """The chunks, ranks and strategies of the layers.

    Attributes
    ----------
    cuts : tuple of int
        First layer of every chunk, then the number of layers.
    ranks : tuple of int
        Rank of every chunk.
    strategies : tuple of int
        Index of the candidate of every layer. Empty: the first candidate of all layers.
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    strategies: tuple[int, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.ranks)

    def layers_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the first and last layer of every chunk on a rank."""
        runs = zip(pairwise(self.cuts), self.ranks, strict=True)
        return [(first, end - 1) for (first, end), home in runs if home == rank]

    def merged(self) -> PartitionPlacement:
        """Join adjacent chunks on the same rank."""
        keep = [i for i in range(self.num_chunks) if i == 0 or self.ranks[i] != self.ranks[i - 1]]
        cuts = (*(self.cuts[i] for i in keep), self.cuts[-1])
        return replace(self, cuts=cuts, ranks=tuple(self.ranks[i] for i in keep))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkCosts:
    """Sums over the layers of every chunk; arrays of shape (num_chunks,)."""

    forward_ns: IntArray
    backward_ns: IntArray
    weight_ns: IntArray
    activation_bytes: IntArray
    gradient_bytes: IntArray
    static_bytes: IntArray


def chain_of_layers(table: LayerTable, *, split: bool = False) -> LayerChain:
    """Convert a layer table into arrays. Every time is rounded once.

    Parameters
    ----------
    split : bool
        Whether to split the backwards of layers that have both parts into input and weight gradient.

    Raises
    ------
    InputError
        When a layer's strategy lacks the fields that its base has, or the first strategy does not repeat the layer's
        costs.
    """
    if table.num_ranks > MOST_RANKS:
        raise InputError("num_ranks", f"{table.num_ranks} is above {MOST_RANKS}")
    check_work(
        "num_microbatches", table.num_microbatches * len(table.layers), "passes through layers", MAX_LAYER_PASSES
    )
    rows = [_strategies(layer, split, f"layers[{i}]") for i, layer in enumerate(table.layers)]
    for i, row in enumerate(rows):
        for option in row:
            if sum(option[1:4]) * table.num_microbatches >= NO_LIMIT or max(option[4:6]) >= NO_LIMIT:
                raise InputError(f"layers[{i}]", "has times or bytes that exceed the supported range")
    most = max(len(row) for row in rows)
    cube = np.array([[c[1:6] for c in (*row, *[row[0]] * (most - len(row)))] for row in rows], dtype=np.int64)
    forward, backward, weight, activation, gradient = (np.ascontiguousarray(cube[:, :, i]) for i in range(5))
    capacity = table.memory_capacity_bytes
    chain = LayerChain(
        name=table.name,
        layer_names=tuple(layer.name for layer in table.layers),
        num_ranks=table.num_ranks,
        num_microbatches=table.num_microbatches,
        delay_ns=to_ns(table.boundary_s, "boundary_s"),
        forward_ns=forward,
        backward_ns=backward,
        weight_ns=weight,
        activation_bytes=activation,
        gradient_bytes=gradient,
        static_bytes=np.array([layer.held_bytes for layer in table.layers], dtype=np.int64),
        strategies=tuple(tuple(c.strategy for c in row) for row in rows),
        capacity_bytes=None if capacity is None else np.array(capacity, dtype=np.int64),
        update_ns=np.array([to_ns(layer.update_s, "update_s") for layer in table.layers], dtype=np.int64),
    )
    total = int(chain.total_ns.max(axis=1).sum())
    if total * table.num_microbatches + sum(chain.end_ns.tolist()) >= NO_LIMIT:
        raise InputError("layers", f"sum to {total / 1e9:g} s a microbatch, which exceeds the supported range")
    held = int(chain.activation_bytes.max(axis=1).sum() + chain.gradient_bytes.max(axis=1).sum())
    if held * table.num_microbatches + int(chain.static_bytes.sum()) >= NO_LIMIT:
        raise InputError("layers", f"hold {held} bytes a microbatch, which exceeds the supported range")
    return chain


def _strategies(layer: LayerCost, split: bool, where: str) -> list[Candidate]:
    split = split and layer.backward_s is None

    def made_of(strategy: str, costs: LayerCost | StrategyEntry, gradient_bytes: int | None, place: str) -> Candidate:
        inputs, weights = costs.backward_input_s, costs.backward_weight_s
        if costs.backward_s is not None:
            parts = (costs.backward_s, 0.0)
        elif inputs is None or weights is None:
            raise InputError(f"{place}.backward_s", "is missing", "set it, or both of its parts")
        else:
            parts = (inputs, weights) if split else (inputs + weights, 0.0)
        forward, backward, weight = (to_ns(seconds, where) for seconds in (costs.forward_s, *parts))
        held = costs.activation_bytes
        return Candidate(strategy, forward, backward, weight, held, held if gradient_bytes is None else gradient_bytes)

    found = [made_of("keep", layer, None, where)]
    for i, entry in enumerate(layer.candidates or ()):
        made = made_of(entry.strategy, entry, entry.weight_gradient_bytes, f"{where}.candidates[{i}]")
        if i == 0:
            _check_base(where, found[0], made)
            found[0] = made
        else:
            found.append(made)
    return found


def _check_base(where: str, base: Candidate, first: Candidate) -> None:
    """Raise `InputError` unless the first candidate repeats the costs of its layer, as in instances."""
    for field, word in _REPEATED.items():
        ours, stated = getattr(base, field), getattr(first, field)
        if abs(stated - ours) > (0 if field == "activation_bytes" else _ROUNDING_NS):
            raise InputError(
                f"{where}.candidates[0]",
                f"has {stated} {word}, the layer has {ours}",
                "the first entry repeats the values of the layer",
            )


def chunk_costs(chain: LayerChain, placement: PartitionPlacement) -> ChunkCosts:
    """Sum the layers of every chunk under their strategies."""
    rows = np.arange(chain.num_layers)
    chosen = np.array(placement.strategies or (0,) * chain.num_layers, dtype=np.int64)
    starts = np.array(placement.cuts[:-1], dtype=np.int64)

    def add(table: IntArray) -> IntArray:
        return np.add.reduceat(table[rows, chosen], starts)

    return ChunkCosts(
        forward_ns=add(chain.forward_ns),
        backward_ns=add(chain.backward_ns),
        weight_ns=add(chain.weight_ns),
        activation_bytes=add(chain.activation_bytes),
        gradient_bytes=add(chain.gradient_bytes),
        static_bytes=np.add.reduceat(chain.static_bytes, starts),
    )


def rank_static_bytes(chain: LayerChain, placement: PartitionPlacement) -> IntArray:
    """Return the bytes of weights, gradients and optimizer state on every rank."""
    static = np.zeros(chain.num_ranks, np.int64)
    np.add.at(static, np.array(placement.ranks), chunk_costs(chain, placement).static_bytes)
    return static


def rank_work_ns(chain: LayerChain, placement: PartitionPlacement) -> IntArray:
    """Return the work of one microbatch on every rank."""
    costs, work = chunk_costs(chain, placement), np.zeros(chain.num_ranks, np.int64)
    np.add.at(work, np.array(placement.ranks), costs.forward_ns + costs.backward_ns + costs.weight_ns)
    return work


def iteration_ns(chain: LayerChain, placement: PartitionPlacement, graph: TaskGraph, end_ns: IntArray) -> int:
    """Return the end of the iteration if tasks end at ``end_ns``: each rank updates its layers after its last task."""
    ends = np.zeros(chain.num_ranks, np.int64)
    np.maximum.at(ends, graph.rank, end_ns)
    np.add.at(ends, np.repeat(placement.ranks, np.diff(placement.cuts)), chain.end_ns)
    return int(ends.max())


def layout_of(num_ranks: int, placement: PartitionPlacement, model: ModelSpec | None = None) -> Layout:
    """Convert a placement into a `Layout`.

    No chunk may have layers of two modules. The layers of the chain are those of ``model``, in model order. None: one
    module with all layers.
    """
    modules: tuple[ModuleLayout, ...] = (ModuleLayout(MODULE),)
    ends = {MODULE: placement.cuts[-1]}
    if model is not None:
        modules = tuple(ModuleLayout.of(m) for m in model.modules)
        lengths = accumulate(len(m.flat_layers) for m in model.modules)
        ends = {m.name: end for m, end in zip(model.modules, lengths, strict=True)}
    chunks = []
    for (first, last), rank in zip(pairwise(placement.cuts), placement.ranks, strict=True):
        name = next(name for name, end in ends.items() if first < end)
        begin = max((end for end in ends.values() if end <= first), default=0)
        chunks.append(Chunk(name, (first - begin, last - 1 - begin), rank))
    return Layout(num_ranks=num_ranks, modules=modules, chunks=tuple(chunks))


def task_number(kind: int, chunk: int, microbatch: int, num_chunks: int, num_microbatches: int) -> int:
    """Return the number of a task in `graph_of`. ``kind`` is 0 for F, 1 for B or I, 2 for W.

    Weight gradients are numbered even for chunks without them; `graph_of` removes these gaps.
    """
    return (kind * num_chunks + chunk) * num_microbatches + microbatch


def graph_of(chain: LayerChain, placement: PartitionPlacement, *, delays_ns: Sequence[int] | None = None) -> TaskGraph:
    """Return the task graph of one iteration: every microbatch through all chunks and back.

    ``delays_ns`` has the delay after each chunk but the last. None: the delay of the chain.

    Tasks are ordered by kind, chunk and microbatch (`task_number`). If a layer does not use its first strategy, pairs
    have two candidates: the first strategy for all layers, and the strategies of the placement.
    """
    num, m = placement.num_chunks, chain.num_microbatches
    costs = chunk_costs(chain, placement)
    plain = chunk_costs(chain, replace(placement, strategies=()))
    split = np.flatnonzero(plain.weight_ns + costs.weight_ns)
    home = np.array(placement.ranks, dtype=np.int64)
    chunk = np.concatenate([np.tile(np.arange(num), 2), split])
    kind = np.concatenate(
        [
            np.full(num, FORWARD),
            np.where(np.isin(np.arange(num), split), INPUT_GRADIENT, BACKWARD),
            np.full(len(split), WEIGHT_GRADIENT),
        ]
    )
    duration = np.concatenate([plain.forward_ns, plain.backward_ns, plain.weight_ns[split]])
    microbatch = np.tile(np.arange(m), len(chunk))
    runs = np.array(number_runs(placement.ranks), np.int64)
    # Segments: a pass of one kind of a microbatch through a run of chunks in which no rank occurs twice.
    pass_id = ((kind * (runs.max() + 1) + runs[chunk]).repeat(m) * m + microbatch).astype(np.int64)
    pass_id = np.unique(pass_id, return_inverse=True)[1]
    pair = chunk.repeat(m) * m + microbatch
    forward = np.arange(num * m).reshape(num, m)
    backward = forward + num * m
    delays = chain.delay_ns if delays_ns is None else np.array(delays_ns, np.int64)
    hop = np.where(home[1:] != home[:-1], delays, 0).repeat(m)
    labels = tuple(PairLabel(c, i, 0) for c in range(num) for i in range(m))
    return make_graph(
        name=chain.name,
        num_ranks=chain.num_ranks,
        tasks=Tasks(
            kind=kind.repeat(m),
            rank=home[chunk].repeat(m),
            duration_ns=duration.repeat(m),
            pair=pair,
            pass_id=pass_id,
            microbatch=microbatch,
            module=np.zeros(len(pair), np.int64),
            module_names=(MODULE,),
        ),
        pairs=Pairs(
            activation_bytes=plain.activation_bytes.repeat(m),
            weight_gradient_bytes=plain.gradient_bytes.repeat(m),
            candidates=_candidates(chain, placement, plain, costs),
            labels=labels,
        ),
        edges=Edges(
            source=np.concatenate([forward[:-1].ravel(), backward[1:].ravel()]),
            target=np.concatenate([forward[1:].ravel(), backward[:-1].ravel()]),
            delay_ns=np.concatenate([hop, hop]),
        ),
        static_bytes=rank_static_bytes(chain, placement),
        capacity_bytes=chain.capacity_bytes,
    )


def _candidates(
    chain: LayerChain, placement: PartitionPlacement, plain: ChunkCosts, costs: ChunkCosts
) -> tuple[tuple[Candidate, ...], ...] | None:
    if not any(placement.strategies):
        return None
    found: list[tuple[Candidate, ...]] = []
    for c, (first, last) in enumerate(pairwise(placement.cuts)):
        base = _candidate(plain, c, "keep", tuple(chain.strategies[i][0] for i in range(first, last)))
        chosen = tuple(chain.strategies[i][placement.strategies[i]] for i in range(first, last))
        mixed = _candidate(costs, c, chosen[0] if len(set(chosen)) == 1 else "mixed", chosen)
        found += [(base, mixed)] * chain.num_microbatches
    return tuple(found)


def _candidate(costs: ChunkCosts, c: int, strategy: str, layers: tuple[str, ...]) -> Candidate:
    return Candidate(
        strategy,
        int(costs.forward_ns[c]),
        int(costs.backward_ns[c]),
        int(costs.weight_ns[c]),
        int(costs.activation_bytes[c]),
        int(costs.gradient_bytes[c]),
        layers,
    )
