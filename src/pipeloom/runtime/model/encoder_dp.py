"""Encoder data parallelism over tensor ranks: each tensor-parallel rank runs a share of a module's instances.

Every rank holds all layers of such a module. Outside the module this is invisible: a chunk takes and returns whole
tensors that are the same on all of these ranks, and so do its gradients. All collectives are outside of autograd
graphs, in forwards and where input gradients are passed back. All ranks of the group reach them in the order of their
common plan. Recomputation and the second half of a split backward have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.packing import SubMicrobatch
from pipeloom.runtime.model.model import Model, upstream_rows
from pipeloom.spec import Layout, ModuleSpec, Sample, TensorShape, Workload
from pipeloom.spec.batch import split_instances

Rows = tuple[int, int]
"""First row and number of rows."""


class TensorRanks(NamedTuple):
    """The tensor-parallel ranks of a pipeline rank, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> TensorRanks:
        """Return the ranks of a group, seen from this process."""
        return TensorRanks(group, dist.get_rank(group), dist.get_world_size(group))


@dataclass(slots=True, eq=False)
class InstanceShare:
    """One tensor-parallel rank's share of a part in one chunk."""

    ranks: TensorRanks
    instances: Rows
    """Instances of the part."""
    output: tuple[Rows, ...]
    """Rows of the output of every rank."""
    inputs: tuple[tuple[Rows, ...], ...]
    """Rows of each upstream argument of every rank."""
    extents: list[int] = field(default_factory=list)
    """Number of rows of the whole upstream arguments, once they have arrived."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the output that this rank computes."""
        return self.output[self.ranks.rank][1]

    def cut(self, argument: int, whole: Tensor) -> Tensor:
        """Return this rank's rows of an upstream argument as a copy, so that the other rows can be freed."""
        self.extents.append(whole.shape[0])
        return whole.detach().narrow(0, *self.inputs[argument][self.ranks.rank]).clone()

    def own(self, gradient: Tensor) -> Tensor:
        """Return this rank's rows of the gradient of the output."""
        return gradient.narrow(0, *self.output[self.ranks.rank])

    def whole_output(self, own: Tensor) -> Tensor:
        """Gather the output of all ranks from each rank's rows."""
        return self._gathered(own, self.output)

    def whole_gradient(self, argument: int, own: Tensor) -> Tensor:
        """Gather or sum the gradient of an upstream argument from each rank's rows."""
        rows, extent = self.inputs[argument], self.extents[argument]
        if _in_turn(rows, extent):
            return self._gathered(own, rows)
        # Several ranks may take the rows of one sample, and some rows may be taken by none.
        whole = own.new_zeros((extent, *own.shape[1:]))
        whole.narrow(0, *rows[self.ranks.rank]).copy_(own)
        if whole.numel():
            dist.all_reduce(whole, group=self.ranks.group)
        return whole

    def _gathered(self, own: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Gather all ranks' rows in order."""
        most = max(count for _, count in rows)
        if most == 0:
            return own
        # All backends can gather pieces of equal size.
        sent = own.contiguous() if own.shape[0] == most else own.new_zeros((most, *own.shape[1:]))
        if sent.shape[0] != own.shape[0]:
            sent.narrow(0, 0, own.shape[0]).copy_(own)
        got = [torch.empty_like(sent) for _ in rows]
        dist.all_gather(got, sent, group=self.ranks.group)
        return torch.cat([piece.narrow(0, 0, count) for piece, (_, count) in zip(got, rows, strict=True)])


def _in_turn(rows: Sequence[Rows], extent: int) -> bool:
    """Return whether the ranks' rows are consecutive and complete."""
    end = 0
    for first, count in rows:
        if count and first != end:
            return False
        end += count
    return end == extent


class ChunkInput(NamedTuple):
    """An argument of a chunk: the output of the previous chunk, or of another module."""

    shape: TensorShape
    source: ModuleSpec | None = None
    samples: Sequence[Sample] = ()
    """Samples of the microbatch."""


class EncoderDataParallel:
    """Determines each tensor-parallel rank's share of modules with encoder data parallelism.

    ``group`` has the tensor-parallel ranks of this pipeline rank. None if there is one. Raises `InputError` if there is
    no group, or a module's tensors cannot be split by instances.
    """

    def __init__(self, model: Model, layout: Layout, group: dist.ProcessGroup | None) -> None:
        self.model = model.spec
        self.names = {name for name in layout.encoder_dp_modules if layout.uses_encoder_dp(name)}
        self.ranks: TensorRanks | None = None
        if not self.names:
            return
        self._check(model, layout)
        if group is None:
            raise InputError(
                f"module {min(self.names)!r}",
                f"uses encoder data parallelism over {layout.parallelism.tensor} ranks, but the executor has no group",
                'give Executor(tensor_group=mesh.device_mesh.get_group("tp"))',
            )
        self.ranks = TensorRanks.of(group)
        if self.ranks.size != layout.parallelism.tensor:
            raise InputError(
                "tensor_group",
                f"has {self.ranks.size} processes, the layout {layout.parallelism.tensor} tensor-parallel ranks",
            )

    def _check(self, model: Model, layout: Layout) -> None:
        for chunk in layout.chunks:
            shape = model.module(chunk.module).spec.flat_layers[chunk.layers[1]].output
            if chunk.module in self.names and not shape.is_rows:
                raise InputError(
                    f"module {chunk.module!r}",
                    f"uses encoder data parallelism, but layer {chunk.layers[1]} at the end of a chunk gives "
                    f"{list(shape.dims)}, which has no rows of single instances",
                    "set on_tensor_ranks = 'divided', or end no chunk there",
                )
        for names in model.tied:
            for name in names:
                if name.split(".", 1)[0] in self.names:
                    raise InputError(
                        f"parameter {name!r}",
                        "is tied to that of another layer, but its module uses encoder data parallelism, which sums "
                        "gradients in another way",
                        "set on_tensor_ranks = 'divided', or untie it",
                    )

    def share(
        self, module: ModuleSpec, part: SubMicrobatch, output: TensorShape, taken: Sequence[ChunkInput]
    ) -> InstanceShare:
        """Return this rank's share of a part in a chunk, which takes the arguments ``taken`` and returns ``output``."""
        assert self.ranks is not None
        lengths = part.workload.lengths
        runs = split_instances(lengths, self.ranks.size)

        def rows_of(shape: TensorShape) -> tuple[Rows, ...]:
            counts = [shape.resolve(Workload(lengths[first : first + count]))[0] for first, count in runs]
            return tuple(zip((0, *accumulate(counts)), counts, strict=False))

        def taken_of(what: ChunkInput) -> tuple[Rows, ...]:
            if what.source is None:
                return rows_of(what.shape)
            begin, _ = upstream_rows(what.source, module, what.samples, part.first, part.count)
            shares = []
            for first, count in runs:
                here, rows = upstream_rows(what.source, module, what.samples, part.first + first, count)
                shares.append((here - begin, rows) if count and rows else (0, 0))
            return tuple(shares)

        return InstanceShare(self.ranks, runs[self.ranks.rank], rows_of(output), tuple(map(taken_of, taken)))
