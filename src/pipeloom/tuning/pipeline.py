"""TunedPipeline: a layout of whole encoders on the first rank and a backbone of one chunk a rank, ready to be tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeloom.cost import CostModel
from pipeloom.errors import InputError
from pipeloom.packing import Loads, budget_tokens
from pipeloom.spec import Batch, Layout, ModelSpec
from pipeloom.taskgraph import NS_PER_S
from pipeloom.tuning.kernels import Chain, Marginal
from pipeloom.tuning.table import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    NUM_ROWS,
    OUTPUT,
    CostTable,
    Features,
    FloatArray,
    IntArray,
    tabulate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_LIMIT = np.iinfo(np.int64).max // 4
_LENGTHS = (64, 512, 2048)


@dataclass(frozen=True, slots=True, eq=False)
class TunedPipeline:
    """Everything about tuning that does not change from batch to batch. Make it with `tuned_pipeline`.

    Attributes
    ----------
    backbone : tuple of CostTable
        One per rank.
    encoders : tuple of tuple of CostTable
        Per module before the backbone, its chunks in order.
    latency_s, seconds_per_byte : float
        Of a message between two ranks.
    """

    model: ModelSpec
    layout: Layout
    backbone: tuple[CostTable, ...]
    encoders: tuple[tuple[CostTable, ...], ...]
    latency_s: float
    seconds_per_byte: float
    static_bytes: IntArray
    capacity_bytes: IntArray
    trained: bool

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.layout.num_ranks

    def scaled(self, factors: Mapping[str, tuple[float, float]]) -> TunedPipeline:
        """The same with each module's seconds of (forward, backward) multiplied, as calibration learns them."""

        def scale(table: CostTable, name: str) -> CostTable:
            rows = np.ones(NUM_ROWS)
            rows[[FORWARD, BACKWARD]] = factors.get(name, (1.0, 1.0))
            return replace(
                table, values=table.values * rows[:, None, None], per_instance=table.per_instance * rows
            )

        names = [module.name for module in self.layout.modules]
        return replace(
            self,
            backbone=tuple(scale(table, names[-1]) for table in self.backbone),
            encoders=tuple(
                tuple(scale(table, name) for table in tables)
                for name, tables in zip(names, self.encoders, strict=False)
            ),
        )


def tuned_pipeline(
    model: ModelSpec,
    layout: Layout,
    costs: CostModel,
    *,
    max_tokens: int,
    max_length: int,
    capacity_bytes: int | None = None,
) -> TunedPipeline:
    """Tabulate a layout's costs: once, before training.

    Parameters
    ----------
    model : ModelSpec
    layout : Layout
        All chunks of every module but the last on rank 0; chunk p of the last one on rank p.
    costs : CostModel
        Its base strategy is used.
    max_tokens : int
        Largest microbatch, in tokens of the backbone.
    max_length : int
        Longest sequence.
    capacity_bytes : int or None
        Memory of each rank; None: no limit.

    Raises
    ------
    InputError
        For another layout.
    """
    check_layout(layout)
    static = np.zeros(layout.num_ranks, np.int64)
    for chunk in layout.chunks:
        static[chunk.rank] += costs.static_bytes(chunk)
    lengths = tuple(n for n in _LENGTHS if n < max_length)
    lengths = (*lengths, max_length) if lengths else (max(1, max_length // 2), max(2, max_length))
    encoders = []
    for module in layout.modules[:-1]:
        # An image may have many more patches than tokens; tables go on linearly beyond their end.
        chunks = [layout.chunks[i] for i in layout.chunks_of(module.name)]
        encoders.append(tuple(tabulate(costs, chunk, 2 * max_tokens, lengths) for chunk in chunks))
    last = layout.modules[-1].name
    backbone = tuple(tabulate(costs, layout.chunks[i], max_tokens, lengths) for i in layout.chunks_of(last))
    small, large = 1 << 20, 1 << 26
    per_byte = (costs.transfer_s(large) - costs.transfer_s(small)) / (large - small)
    latency = costs.transfer_s(small) - per_byte * small
    return TunedPipeline(
        model, layout, backbone, tuple(encoders), latency, per_byte, static,
        np.full(layout.num_ranks, _NO_LIMIT if capacity_bytes is None else capacity_bytes, np.int64),
        any(layout.has_backward(module.name) for module in layout.modules[:-1]),
    )  # fmt: skip


def check_layout(layout: Layout) -> None:
    """Refuse a layout that is not encoders on the first rank and a backbone of one chunk a rank."""
    *encoders, backbone = layout.modules
    for module in encoders:
        ranks = {layout.chunks[i].rank for i in layout.chunks_of(module.name)}
        if ranks != {0} or module.on_ranks != "pipelined":
            raise InputError(
                f"layout: module {module.name!r}", f"lies on ranks {sorted(ranks)}, not whole on rank 0",
                "tune a layout of arrange.encoder_first, or plan without [tuning]",
            )  # fmt: skip
    homes = [layout.chunks[i].rank for i in layout.chunks_of(backbone.name)]
    if homes != list(range(layout.num_ranks)):
        raise InputError(
            f"layout: module {backbone.name!r}", f"has chunks on ranks {homes}, not one on each in order",
            "tune a layout of arrange.encoder_first, or plan without [tuning]",
        )  # fmt: skip
    trained = {layout.has_backward(module.name) for module in encoders}
    if len(trained) > 1:
        raise InputError(
            "layout.modules", "some encoders have a backward and others none", "freeze all or none"
        )


@dataclass(frozen=True, slots=True, eq=False)
class BatchSizes:
    """Lengths of a batch's sequences as flat arrays, so that any packing's features are sums.

    Attributes
    ----------
    loads : Loads
        Seconds of every sample on the backbone's mean rank, and of its encoders' parts on the first rank.
    length : tuple of array, per module
        Length of every sequence.
    owner : tuple of array, per module
        Its sample.
    """

    loads: Loads
    length: tuple[IntArray, ...]
    owner: tuple[IntArray, ...]


def batch_sizes(pipeline: TunedPipeline, batch: Batch) -> BatchSizes:
    """Read a batch once."""
    lengths, owners = [], []
    for module in pipeline.layout.modules:
        spec = pipeline.model.module(module.name)
        each = [spec.instance_lengths(sample) for sample in batch.samples]
        lengths.append(np.array([n for here in each for n in here], np.int64))
        owners.append(np.repeat(np.arange(len(each)), [len(here) for here in each]))
    num = len(batch.samples)
    backbone = _marginal(pipeline.backbone, lengths[-1], owners[-1], num) / pipeline.num_ranks
    encoder = np.zeros(num)
    for tables, length, owner in zip(pipeline.encoders, lengths, owners, strict=False):
        encoder += _marginal(tables, length, owner, num)
    loads = Loads(budget_tokens(batch, pipeline.model), backbone, encoder)
    return BatchSizes(loads, tuple(lengths), tuple(owners))


def _marginal(tables: Sequence[CostTable], length: IntArray, owner: IntArray, num: int) -> FloatArray:
    """Seconds that each sample adds to a large workload, forward and backward."""
    rows = _differences(tables, length, owner, num, tables[0].tokens[-1] / 2)
    return np.asarray((rows[:, FORWARD] + rows[:, BACKWARD]).sum(axis=0))


def _differences(
    tables: Sequence[CostTable], length: IntArray, owner: IntArray, num: int, size: float
) -> FloatArray:
    """What each sample adds to a workload of ``size`` tokens and the batch's composition: (table, row, sample)."""
    if not len(length):
        return np.zeros((len(tables), NUM_ROWS, num))
    here = _sums(length, owner, num)
    share = size / max(float(here.tokens.sum()), 1.0)
    rest = Features(
        *(np.full(num, float(x.sum()) * share) for x in (here.instances, here.tokens, here.pairs))
    )
    more = Features(rest.instances + here.instances, rest.tokens + here.tokens, rest.pairs + here.pairs)
    return np.stack([np.maximum(table.estimate(more) - table.estimate(rest), 0.0) for table in tables])


def marginal_of(pipeline: TunedPipeline, sizes: BatchSizes, num_microbatches: int) -> Marginal:
    """What every sample adds to a microbatch, where there are so many."""
    num = len(sizes.loads)

    def added(tables: Sequence[CostTable], length: IntArray, owner: IntArray) -> FloatArray:
        return _differences(tables, length, owner, num, float(length.sum()) / num_microbatches)

    rows = added(pipeline.backbone, sizes.length[-1], sizes.owner[-1]).transpose(1, 2, 0)
    delay = _ns(rows[OUTPUT] * pipeline.seconds_per_byte)
    delay[:, -1] = 0
    parts = np.zeros((NUM_ROWS, num))
    for tables, length, owner in zip(pipeline.encoders, sizes.length, sizes.owner, strict=False):
        here = added(tables, length, owner)
        parts[:OUTPUT] += here[:, :OUTPUT].sum(axis=0)
        parts[OUTPUT] += here[-1, OUTPUT]
    return Marginal(
        sizes.loads.tokens, _ns(rows[FORWARD]), _ns(rows[BACKWARD]), _whole(rows[ACTIVATION]), delay,
        _ns(parts[FORWARD]), _ns(parts[BACKWARD]) * pipeline.trained, _whole(parts[ACTIVATION]), _whole(parts[OUTPUT]),
    )  # fmt: skip


def chain_of(pipeline: TunedPipeline, sizes: BatchSizes, bin_of: IntArray) -> Chain:
    """Costs of a packing, without making it: microbatch m holds the samples whose ``bin_of`` is m."""
    num = int(bin_of.max()) + 1
    features = _sums(sizes.length[-1], bin_of[sizes.owner[-1]], num)
    rows = np.stack([table.estimate(features) for table in pipeline.backbone], axis=-1)
    delay = _ns(pipeline.latency_s + rows[OUTPUT] * pipeline.seconds_per_byte)
    delay[:, -1] = 0
    parts = [
        _encoder_parts(tables, length, bin_of[owner], num, module.sub_microbatch)
        for tables, length, owner, module in zip(
            pipeline.encoders, sizes.length, sizes.owner, pipeline.layout.modules, strict=False
        )
    ]
    home = np.concatenate([home for home, _ in parts]) if parts else np.zeros(0, np.int64)
    costs = np.concatenate([rows for _, rows in parts], axis=1) if parts else np.zeros((NUM_ROWS, 0))
    order = np.argsort(home, kind="stable")
    start = np.zeros(num + 1, np.int64)
    np.cumsum(np.bincount(home, minlength=num), out=start[1:])
    costs = costs[:, order]
    return Chain(
        _ns(rows[FORWARD]), _ns(rows[BACKWARD]), _whole(rows[ACTIVATION]), delay, start,
        _ns(costs[FORWARD]), _ns(costs[BACKWARD]) * pipeline.trained, _whole(costs[ACTIVATION]),
        _whole(costs[OUTPUT]), pipeline.static_bytes, pipeline.capacity_bytes, pipeline.trained,
    )  # fmt: skip


def _encoder_parts(
    tables: Sequence[CostTable], length: IntArray, home: IntArray, num: int, limit: int | None
) -> tuple[IntArray, FloatArray]:
    """Microbatch and costs of every part of one encoder, cut as `pipeloom.packing.pack` cuts them."""
    order = np.argsort(home, kind="stable")
    length, home = length[order], home[order]
    count = np.bincount(home, minlength=num)
    parts = (count > 0).astype(np.int64) if limit is None else -(-count // limit)
    small, large = np.divmod(count, np.maximum(parts, 1))
    place = np.arange(len(home)) - (np.cumsum(count) - count)[home]
    # The first ``large`` parts of a microbatch have one instance more than the others.
    edge = (large * (small + 1))[home]
    inside = np.where(
        place < edge, place // (small + 1)[home], large[home] + (place - edge) // np.maximum(small, 1)[home]
    )
    part = (np.cumsum(parts) - parts)[home] + inside
    total = int(parts.sum())
    features = _sums(length, part, total)
    rows = np.zeros((NUM_ROWS, total))
    for table in tables:
        here = table.estimate(features)
        rows[:OUTPUT] += here[:OUTPUT]
        rows[OUTPUT] = here[OUTPUT]
    return np.repeat(np.arange(num), parts), rows


def _sums(length: IntArray, home: IntArray, num: int) -> Features:
    lengths = length.astype(float)
    return Features(
        np.bincount(home, minlength=num).astype(float),
        np.bincount(home, weights=lengths, minlength=num).astype(float),
        np.bincount(home, weights=lengths**2, minlength=num).astype(float),
    )


def _whole(values: FloatArray) -> IntArray:
    return np.ascontiguousarray(values.astype(np.int64))


def _ns(seconds: FloatArray) -> IntArray:
    return np.ascontiguousarray(np.rint(seconds * NS_PER_S).astype(np.int64))
