"""Instances of a module's part dealt to the tensor-parallel ranks of a pipeline rank, each of which has all its layers.

Outside of the module nothing shows of it: a chunk takes whole tensors, alike on all of these ranks, and gives such, and
so it is with their gradients. All collectives are outside of the graphs of autograd, in forwards and where gradients of
inputs are handed back; all ranks of the group come to these in the order of their one plan. Recomputation and the
second half of a split backward have none.
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
from pipeloom.spec.batch import dealt

Rows = tuple[int, int]
"""The first, and how many."""


class TensorRanks(NamedTuple):
    """The tensor-parallel ranks of a pipeline rank, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> TensorRanks:
        """Those of a group, seen from this process."""
        return TensorRanks(group, dist.get_rank(group), dist.get_world_size(group))


@dataclass(slots=True, eq=False)
class InstanceShare:
    """What one tensor-parallel rank has of one part in one chunk.

    Attributes
    ----------
    instances : Rows
        Of the part.
    output : tuple of Rows
        Rows of the output, of every rank.
    inputs : tuple of tuple of Rows
        Rows of each upstream argument, of every rank.
    """

    ranks: TensorRanks
    instances: Rows
    output: tuple[Rows, ...]
    inputs: tuple[tuple[Rows, ...], ...]
    extents: list[int] = field(default_factory=list)
    """Rows of the whole upstream arguments, once they are there."""

    @property
    def num_rows(self) -> int:
        """Rows of the output that are made here."""
        return self.output[self.ranks.rank][1]

    def cut(self, argument: int, whole: Tensor) -> Tensor:
        """Cut this rank's rows out of an upstream argument: a copy, which does not hold the others'."""
        self.extents.append(whole.shape[0])
        return whole.detach().narrow(0, *self.inputs[argument][self.ranks.rank]).clone()

    def own(self, gradient: Tensor) -> Tensor:
        """Cut this rank's rows out of the gradient of the output."""
        return gradient.narrow(0, *self.output[self.ranks.rank])

    def whole_output(self, own: Tensor) -> Tensor:
        """The output of all ranks, from this one's rows of it."""
        return self._gathered(own, self.output)

    def whole_gradient(self, argument: int, own: Tensor) -> Tensor:
        """The gradient of an upstream argument, from what this rank adds to its own rows of it."""
        rows, extent = self.inputs[argument], self.extents[argument]
        if _in_turn(rows, extent):
            return self._gathered(own, rows)
        # A sample's rows may be taken by several ranks, and others by none.
        whole = own.new_zeros((extent, *own.shape[1:]))
        whole.narrow(0, *rows[self.ranks.rank]).copy_(own)
        if whole.numel():
            dist.all_reduce(whole, group=self.ranks.group)
        return whole

    def _gathered(self, own: Tensor, rows: Sequence[Rows]) -> Tensor:
        """All ranks' rows, one after the other."""
        most = max(count for _, count in rows)
        if most == 0:
            return own
        # Pieces of one size are what all backends gather.
        sent = own.contiguous() if own.shape[0] == most else own.new_zeros((most, *own.shape[1:]))
        if sent.shape[0] != own.shape[0]:
            sent.narrow(0, 0, own.shape[0]).copy_(own)
        got = [torch.empty_like(sent) for _ in rows]
        dist.all_gather(got, sent, group=self.ranks.group)
        return torch.cat([piece.narrow(0, 0, count) for piece, (_, count) in zip(got, rows, strict=True)])


def _in_turn(rows: Sequence[Rows], extent: int) -> bool:
    """Whether ranks have rows one after the other, and all of them."""
    end = 0
    for first, count in rows:
        if count and first != end:
            return False
        end += count
    return end == extent


class ChunkInput(NamedTuple):
    """What a chunk takes as one argument: of the chunk before it, or of another module."""

    shape: TensorShape
    source: ModuleSpec | None = None
    samples: Sequence[Sample] = ()
    """Of the microbatch."""


class EncoderDataParallel:
    """Says what each tensor-parallel rank has of the parts of dealt modules.

    Parameters
    ----------
    group : ProcessGroup or None
        The tensor-parallel ranks of this pipeline rank; None: there is one.

    Raises
    ------
    InputError
        When a dealt module's tensors cannot be cut by instances, or there is no group to deal to.
    """

    def __init__(self, model: Model, layout: Layout, group: dist.ProcessGroup | None) -> None:
        self.model = model.spec
        self.names = {name for name in layout.dealt if layout.deals(name)}
        self.ranks: TensorRanks | None = None
        if not self.names:
            return
        self._check(model, layout)
        if group is None:
            raise InputError(
                f"module {min(self.names)!r}",
                f"is dealt to {layout.parallelism.tensor} tensor-parallel ranks, and the executor knows none of them",
                'give ExecutorOptions(tensor_group=mesh.device_mesh.get_group("tp"))',
            )
        self.ranks = TensorRanks.of(group)
        if self.ranks.size != layout.parallelism.tensor:
            raise InputError(
                "ExecutorOptions.tensor_group",
                f"has {self.ranks.size} processes, the layout {layout.parallelism.tensor} tensor-parallel ranks",
            )

    def _check(self, model: Model, layout: Layout) -> None:
        for chunk in layout.chunks:
            shape = model.module(chunk.module).spec.flat_layers[chunk.layers[1]].output
            if chunk.module in self.names and not shape.is_rows:
                raise InputError(
                    f"module {chunk.module!r}",
                    f"is dealt, and layer {chunk.layers[1]} at the end of a chunk gives {list(shape.dims)}: rows of "
                    "single instances cannot be told",
                    "leave on_tensor_ranks 'divided', or end no chunk there",
                )
        for names in model.tied:
            for name in names:
                if name.split(".", 1)[0] in self.names:
                    raise InputError(
                        f"parameter {name!r}",
                        "is one with that of another layer (tied), and its module is dealt: gradients of both sorts "
                        "would meet in it",
                        "leave on_tensor_ranks 'divided', or share nothing",
                    )

    def share(
        self, module: ModuleSpec, part: SubMicrobatch, output: TensorShape, taken: Sequence[ChunkInput]
    ) -> InstanceShare:
        """What this rank has of a part in one chunk.

        Parameters
        ----------
        output : TensorShape
            Of the chunk.
        taken : sequence of ChunkInput
            What the chunk takes, by argument.
        """
        assert self.ranks is not None
        lengths = part.workload.lengths
        runs = dealt(lengths, self.ranks.size)

        def rows_of(shape: TensorShape) -> tuple[Rows, ...]:
            counts = [shape.resolve(Workload(lengths[first : first + count]))[0] for first, count in runs]
            return tuple(zip((0, *accumulate(counts)), counts, strict=False))

        def taken_of(what: ChunkInput) -> tuple[Rows, ...]:
            if what.source is None:
                return rows_of(what.shape)
            begin, _ = upstream_rows(what.source, module, what.samples, part.first, part.count)
            found = []
            for first, count in runs:
                here, rows = upstream_rows(what.source, module, what.samples, part.first + first, count)
                found.append((here - begin, rows) if count and rows else (0, 0))
            return tuple(found)

        return InstanceShare(self.ranks, runs[self.ranks.rank], rows_of(output), tuple(map(taken_of, taken)))
