"""Cost tables for tuning a layout with encoders on the first rank and one backbone chunk per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.cost import CostModel, between_s, rank_static_bytes
from pipeloom.errors import InputError
from pipeloom.packing import Loads, budget_tokens
from pipeloom.spec import Batch, Layout, ModelSpec
from pipeloom.taskgraph import MAX_S, NS_PER_S
from pipeloom.tuning.kernels.anneal import Marginal
from pipeloom.tuning.kernels.chain import Chain
from pipeloom.tuning.kernels.workloads import Features, sum_parts, sum_sizes
from pipeloom.tuning.table import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    NUM_ROWS,
    OUTPUT,
    RESERVE,
    CostTable,
    FloatArray,
    IntArray,
    tabulate,
)

NO_LIMIT = int(np.iinfo(np.int64).max // 4)
_LENGTHS = (64, 512, 2048)


@dataclass(frozen=True, slots=True, eq=False)
class TunedPipeline:
    """The state of tuning that is the same for all batches. Create it with `tuned_pipeline`.

    Attributes
    ----------
    backbone : CostTable
        Costs of the backbone chunks, in rank order.
    encoders : tuple of CostTable
        Costs of each module before the backbone, with its chunks in order.
    latency_s, seconds_per_byte : array, shape (num_ranks,)
        Cost of a message from each rank to the next; 0 for the last rank.
    """

    model: ModelSpec
    layout: Layout
    backbone: CostTable
    encoders: tuple[CostTable, ...]
    latency_s: FloatArray
    seconds_per_byte: FloatArray
    static_bytes: IntArray
    capacity_bytes: IntArray
    trained: bool

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.layout.num_ranks

    def scaled(self, factors: Mapping[str, tuple[float, float]], slowness: Sequence[float] = ()) -> TunedPipeline:
        """Return a copy with (forward, backward) times scaled by module and by rank, from calibration."""

        def scale(table: CostTable, name: str) -> CostTable:
            chunks = [self.layout.chunks[i] for i in self.layout.chunks_of(name)]
            rows = np.ones((len(chunks), NUM_ROWS))
            rows[:, [FORWARD, BACKWARD]] = factors.get(name, (1.0, 1.0))
            for row, chunk in zip(rows, chunks, strict=True):
                row[[FORWARD, BACKWARD]] *= slowness[chunk.rank] if chunk.rank < len(slowness) else 1.0
            return replace(table, values=table.values * rows[:, :, None, None], per_instance=table.per_instance * rows)

        names = [module.name for module in self.layout.modules]
        return replace(
            self,
            backbone=scale(self.backbone, names[-1]),
            encoders=tuple(scale(table, name) for name, table in zip(names, self.encoders, strict=False)),
        )

    def with_reserve(self, reserve_bytes: Sequence[int]) -> TunedPipeline:
        """Return a copy with a memory reserve on every rank. Empty: no reserve."""
        return replace(self, capacity_bytes=self.capacity_bytes - np.array(reserve_bytes or 0, np.int64))


def tuned_pipeline(
    model: ModelSpec,
    layout: Layout,
    costs: CostModel,
    *,
    max_tokens: int,
    max_length: int,
    capacity_bytes: int | None = None,
    num_messages: int | None = None,
) -> TunedPipeline:
    """Tabulate the costs of a layout, once before training.

    Parameters
    ----------
    layout : Layout
        All chunks of the encoders on rank 0, and chunk p of the backbone on rank p.
    costs : CostModel
        Costs of the layers; only the base strategy is used.
    max_tokens : int
        Maximum number of backbone tokens in a microbatch.
    max_length : int
        Maximum sequence length.
    capacity_bytes : int or None
        Memory of each rank; None: no limit.
    num_messages : int or None
        Reserve the workspace of a computation and this number of its outputs, as in
        `taskgraph.iteration.workspace_bytes`. None: no reserve, so that all memory is for activations.

    Raises
    ------
    InputError
        The layout has another form.
    """
    check_layout(layout)
    static = rank_static_bytes(costs, layout)
    lengths = tuple(n for n in _LENGTHS if n < max_length)
    lengths = (*lengths, max_length) if lengths else (max(1, max_length // 2), max(2, max_length))

    def table(module: str, most: int) -> CostTable:
        chunks = [layout.chunks[i] for i in layout.chunks_of(module)]
        messages = None if capacity_bytes is None else num_messages
        return tabulate(costs, chunks, most, lengths, num_messages=messages)

    # An image may have many more patches than tokens; tables are extrapolated linearly.
    encoders = tuple(table(module.name, 2 * max_tokens) for module in layout.modules[:-1])
    backbone = table(layout.modules[-1].name, max_tokens)
    small, large = 1 << 20, 1 << 26
    per_byte, latency = np.zeros(layout.num_ranks), np.zeros(layout.num_ranks)
    for rank in range(layout.num_ranks - 1):
        slow, quick = (between_s(costs, size, rank, rank + 1) for size in (large, small))
        per_byte[rank] = (slow - quick) / (large - small)
        latency[rank] = quick - per_byte[rank] * small
    return TunedPipeline(
        model,
        layout,
        backbone,
        encoders,
        latency,
        per_byte,
        static,
        np.full(layout.num_ranks, NO_LIMIT if capacity_bytes is None else capacity_bytes, np.int64),
        any(layout.has_backward(module.name) for module in layout.modules[:-1]),
    )


def is_chain(layout: Layout) -> bool:
    """Return whether `check_layout` accepts a layout."""
    try:
        check_layout(layout)
    except InputError:
        return False
    return True


def check_layout(layout: Layout) -> None:
    """Raise `InputError` unless encoders are on the first rank and the backbone has one chunk per rank."""
    *encoders, backbone = layout.modules
    for module in encoders:
        if module.name in layout.encoder_dp_modules:
            raise InputError(
                f"layout: module {module.name!r}",
                "uses encoder data parallelism over tensor ranks, which tuning does not support",
                "leave on_tensor_ranks 'divided', or tuning.order at 'search'",
            )
        ranks = {layout.chunks[i].rank for i in layout.chunks_of(module.name)}
        if ranks != {0} or module.on_ranks != "pipelined":
            raise InputError(
                f"layout: module {module.name!r}",
                f"lies on ranks {sorted(ranks)}, not whole on rank 0",
                "tune a layout of layout.encoder_first, or leave tuning.order at 'search'",
            )
    homes = [layout.chunks[i].rank for i in layout.chunks_of(backbone.name)]
    # Compare the length first, since a file may declare any number of ranks.
    if len(homes) != layout.num_ranks or homes != list(range(layout.num_ranks)):
        raise InputError(
            f"layout: module {backbone.name!r}",
            f"has chunks on ranks {homes}, not one on each in order",
            "tune a layout of layout.encoder_first, or leave tuning.order at 'search'",
        )
    trained = {layout.has_backward(module.name) for module in encoders}
    if len(trained) > 1:
        raise InputError("layout.modules", "some encoders have a backward and others none", "freeze all or none")


@dataclass(frozen=True, slots=True, eq=False)
class BatchSizes:
    """Sequence lengths of a batch as flat arrays, so that the features of any packing are sums.

    Attributes
    ----------
    loads : Loads
        Seconds of every sample in the backbone on an average rank, and in the encoders on the first rank.
    length : tuple of array, per module
        Length of every sequence.
    owner : tuple of array, per module
        Sample of every sequence.
    """

    loads: Loads
    length: tuple[IntArray, ...]
    owner: tuple[IntArray, ...]


def batch_sizes(pipeline: TunedPipeline, batch: Batch) -> BatchSizes:
    """Return the sizes of a batch."""
    lengths, owners = [], []
    for module in pipeline.layout.modules:
        spec = pipeline.model.module(module.name)
        each = [spec.instance_lengths(sample) for sample in batch.samples]
        lengths.append(np.array([n for here in each for n in here], np.int64))
        owners.append(np.repeat(np.arange(len(each)), [len(here) for here in each]))
    num = len(batch.samples)
    backbone = _marginal(pipeline.backbone, lengths[-1], owners[-1], num) / pipeline.num_ranks
    encoder = np.zeros(num)
    for table, length, owner in zip(pipeline.encoders, lengths, owners, strict=False):
        encoder += _marginal(table, length, owner, num)
    loads = Loads(budget_tokens(batch, pipeline.model), backbone, encoder)
    return BatchSizes(loads, tuple(lengths), tuple(owners))


def _marginal(table: CostTable, length: IntArray, owner: IntArray, num: int) -> FloatArray:
    """Return the seconds that each sample adds to a large workload, forward and backward."""
    rows = _differences(table, sum_sizes(length, owner, np.arange(num), num), table.tokens[-1] / 2)
    return np.asarray((rows[:, FORWARD] + rows[:, BACKWARD]).sum(axis=0))


def _differences(table: CostTable, each: Features, size: float) -> FloatArray:
    """Return what each sample adds to a workload of ``size`` tokens with the composition of the batch.

    The shape is (chunk, row, sample).
    """
    share = size / max(float(each.tokens.sum()), 1.0)
    rest = Features(*(np.full(1, float(x.sum()) * share) for x in each))
    more = Features(*(x + y for x, y in zip(rest, each, strict=True)))
    return np.maximum(table.estimate(more) - table.estimate(rest), 0.0)


def marginal_of(pipeline: TunedPipeline, sizes: BatchSizes, num_microbatches: int) -> Marginal:
    """Return what every sample adds to a microbatch of average size."""
    every = np.arange(len(sizes.loads))

    def added(table: CostTable, length: IntArray, owner: IntArray) -> FloatArray:
        return _differences(table, sum_sizes(length, owner, every, len(every)), float(length.sum()) / num_microbatches)

    rows = added(pipeline.backbone, sizes.length[-1], sizes.owner[-1]).transpose(1, 2, 0)
    parts = np.zeros((NUM_ROWS, len(every)))
    for table, length, owner in zip(pipeline.encoders, sizes.length, sizes.owner, strict=False):
        parts += _in_turn(added(table, length, owner))
    return Marginal(sizes.loads.tokens, **_numbers(pipeline, rows, parts, rows[OUTPUT] * pipeline.seconds_per_byte))


def _numbers(pipeline: TunedPipeline, rows: FloatArray, parts: FloatArray, delay_s: FloatArray) -> dict[str, IntArray]:
    """Return the fields that `Marginal` and `Chain` share, from the costs of the backbone and of encoder parts."""
    return {
        "forward": _ns(rows[FORWARD]),
        "backward": _ns(rows[BACKWARD]),
        "activation": _whole(rows[ACTIVATION]),
        "delay": _ns(delay_s),
        "part_forward": _ns(parts[FORWARD]),
        "part_backward": _ns(parts[BACKWARD]) * pipeline.trained,
        "part_bytes": _whole(parts[ACTIVATION]),
        "part_output": _whole(parts[OUTPUT]),
    }


def chain_of(pipeline: TunedPipeline, sizes: BatchSizes, bin_of: IntArray) -> Chain:
    """Return the costs of a packing in which microbatch m has the samples whose ``bin_of`` is m."""
    num = int(bin_of.max()) + 1
    rows = pipeline.backbone.estimate(sum_sizes(sizes.length[-1], sizes.owner[-1], bin_of, num)).transpose(1, 2, 0)
    delay_s = pipeline.latency_s + rows[OUTPUT] * pipeline.seconds_per_byte
    reserve = rows[RESERVE].max(axis=0)
    starts, costs = [np.zeros(num + 1, np.int64)], [np.zeros((NUM_ROWS, 0))]
    for table, length, owner, module in zip(
        pipeline.encoders, sizes.length, sizes.owner, pipeline.layout.modules, strict=False
    ):
        start, features = sum_parts(length, owner, bin_of, num, module.sub_microbatch or 0)
        starts.append(start)
        costs.append(_in_turn(table.estimate(features)))
    parts = np.concatenate(costs, axis=1)
    reserve[0] = max(reserve[0], parts[RESERVE].max(initial=0.0))
    if len(pipeline.encoders) > 1:
        homes = [np.repeat(np.arange(num), np.diff(start)) for start in starts]
        parts = parts[:, np.argsort(np.concatenate(homes), kind="stable")]
    return Chain(
        **_numbers(pipeline, rows, parts, delay_s),
        part_start=np.sum(starts, axis=0),
        static=pipeline.static_bytes,
        capacity=pipeline.capacity_bytes - np.ceil(reserve).astype(np.int64),
        trained=pipeline.trained,
    )


def _in_turn(rows: FloatArray) -> FloatArray:
    """Combine the costs of consecutive chunks of a module: sums, the last output and the maximum reserve."""
    total = rows.sum(axis=0)
    total[OUTPUT] = rows[-1, OUTPUT]
    total[RESERVE] = rows[:, RESERVE].max(axis=0)
    return np.asarray(total)


def _whole(values: FloatArray) -> IntArray:
    return np.ascontiguousarray(values.astype(np.int64))


def _ns(seconds: FloatArray) -> IntArray:
    """Convert to integer nanoseconds whose sum fits into 64 bits."""
    if not seconds.sum() < MAX_S:
        problem = f"times of a batch sum to {seconds.sum():g} s, which is not below {MAX_S:g} s"
        raise InputError(
            "tuning", problem, "give smaller times for the layers in the profile or the links of the cluster"
        )
    return np.ascontiguousarray(np.rint(seconds * NS_PER_S).astype(np.int64))
