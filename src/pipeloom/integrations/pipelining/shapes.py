"""What crosses from one stage to the next: one tensor a boundary, whose shape is known before it comes, or comes first.

A stage of PyTorch's may hand on several tensors of any type; they travel as one. Its shapes follow from the sizes of
the step's inputs in a way that nobody states. So both ends of a boundary note what they have seen, and foretell the
shape where all simple rules that explain it say the same; where they do not, the shape is sent ahead of the tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pipeloom.errors import ExecutionError

Signature = tuple[int, ...]
"""Extents and types of a microbatch's inputs, one after the other."""


class Spread(NamedTuple):
    """How a DTensor lies over a mesh: by name of each of its dimensions, where that divides it."""

    mesh: tuple[str, ...]
    divided: tuple[int, ...]
    """The tensor's dimension; `_REPLICATED`, `_PARTIAL`: it is whole on every rank, or each has a summand."""


class Meta(NamedTuple):
    """Shape and type of one tensor; of a DTensor those of this rank's part, which alone travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spread: Spread | None = None


class Flat(NamedTuple):
    """Shape and type of the one tensor that travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype


MeshOf = Callable[[tuple[str, ...]], DeviceMesh]
"""This rank's mesh by the names of its dimensions."""


Metas = tuple[Meta, ...]
"""Of all tensors that a stage hands on for one microbatch."""

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HEADER = 256
"""Numbers of a header."""
_MOST_SEEN = 512
"""Signatures that are noted; later ones send their shapes ahead."""
_MOST_DIVISOR = 64
_REPLICATED, _PARTIAL = -1, -2


def metas_of(outputs: Sequence[object], stage: int) -> Metas:
    """Shapes and types of what a stage hands on.

    Raises
    ------
    ExecutionError
        Where it is no tensor, or of a type that does not travel.
    """
    metas = []
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor) or output.dtype not in _CODES:
            what = f"a {type(output).__name__}" if not isinstance(output, Tensor) else f"of {output.dtype}"
            raise ExecutionError(f"stage {stage}: output {number} is {what}; hand on tensors of floats or integers")
        spread, here = None, output
        if isinstance(output, DTensor):
            spread, here = _spread_of(output, stage), output._local_tensor
        metas.append(Meta(tuple(here.shape), here.dtype, spread))
    return tuple(metas)


def _spread_of(output: DTensor, stage: int) -> Spread:
    divided = []
    for placement in output.placements:
        if type(placement) is Shard:
            divided.append(placement.dim)
        elif type(placement) is Replicate:
            divided.append(_REPLICATED)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            divided.append(_PARTIAL)
        else:
            raise ExecutionError(f"stage {stage} hands on a DTensor placed as {placement}; redistribute it before")
    names = output.device_mesh.mesh_dim_names
    if names is None:
        raise ExecutionError(f"stage {stage} hands on a DTensor over a mesh without names; give mesh_dim_names")
    return Spread(tuple(names), tuple(divided))


def _placement(divided: int) -> Placement:
    if divided == _REPLICATED:
        return Replicate()
    return Partial() if divided == _PARTIAL else Shard(divided)


def _local(output: Tensor) -> Tensor:
    """Part of a DTensor on this rank."""
    if not isinstance(output, DTensor):
        return output
    part: Tensor = output.to_local()
    # One that is still being gathered cannot be sent.
    return part.clone() if isinstance(part, AsyncCollectiveTensor) else part


def is_plain(metas: Metas) -> bool:
    """Whether the boundary is one tensor of floats, which travels as it is."""
    return len(metas) == 1 and metas[0].dtype.is_floating_point


def flat_meta(metas: Metas) -> Flat:
    """Of what travels."""
    if is_plain(metas):
        return Flat(metas[0].shape, metas[0].dtype)
    dtype = _common(metas)
    return Flat((sum(_length(meta, dtype) for meta in metas),), dtype)


def bundle(outputs: Sequence[Tensor], metas: Metas) -> Tensor:
    """Make one tensor of all that a stage hands on; gradients flow through it to what has floats.

    Integers travel as the bits of floats, which nobody computes with.
    """
    if is_plain(metas):
        return _local(outputs[0])
    dtype = _common(metas)
    pieces = []
    for whole, meta in zip(outputs, metas, strict=True):
        output = _local(whole)
        if meta.dtype.is_floating_point:
            pieces.append(output.reshape(-1).to(dtype))
            continue
        bits = output.detach().contiguous().reshape(-1).view(torch.uint8)
        room = bits.new_zeros(_length(meta, dtype) * dtype.itemsize)
        room[: bits.numel()] = bits
        pieces.append(room.view(dtype))
    return torch.cat(pieces)


def unbundle(flat: Tensor, metas: Metas, mesh_of: MeshOf | None = None) -> tuple[Tensor, ...]:
    """Take apart what `bundle` made; DTensors come on the meshes that ``mesh_of`` gives."""
    found = (flat,) if is_plain(metas) else _pieces(flat, metas)
    return tuple(_spread(part, meta, mesh_of) for part, meta in zip(found, metas, strict=True))


def _spread(part: Tensor, meta: Meta, mesh_of: MeshOf | None) -> Tensor:
    if meta.spread is None:
        return part
    assert mesh_of is not None
    placements = [_placement(divided) for divided in meta.spread.divided]
    return DTensor.from_local(part, mesh_of(meta.spread.mesh), placements, run_check=False)


def _pieces(flat: Tensor, metas: Metas) -> tuple[Tensor, ...]:
    found, begin = [], 0
    for meta in metas:
        length = _length(meta, flat.dtype)
        piece = flat.narrow(0, begin, length)
        begin += length
        if meta.dtype.is_floating_point:
            found.append(piece.to(meta.dtype).view(meta.shape))
        else:
            num_bytes = math.prod(meta.shape) * meta.dtype.itemsize
            bits = piece.detach().clone().view(torch.uint8)[:num_bytes]
            found.append(bits.view(meta.dtype).view(meta.shape))
    return tuple(found)


def _common(metas: Metas) -> torch.dtype:
    floats = [meta.dtype for meta in metas if meta.dtype.is_floating_point]
    return reduce(torch.promote_types, floats) if floats else torch.float32


def _length(meta: Meta, dtype: torch.dtype) -> int:
    """Numbers of the common type that a tensor takes."""
    count = math.prod(meta.shape)
    return count if meta.dtype.is_floating_point else -(-count * meta.dtype.itemsize // dtype.itemsize)


def header(metas: Metas) -> Tensor:
    """Write shapes and types as numbers of a fixed count."""
    numbers = [len(metas)]
    for meta in metas:
        numbers += [_CODES[meta.dtype], len(meta.shape), *meta.shape]
        names, divided = meta.spread or ((), ())
        numbers.append(len(names))
        for name, each in zip(names, divided, strict=True):
            numbers += [each, len(name), *map(ord, name)]
    if len(numbers) > _HEADER:
        raise ExecutionError(f"a stage hands on {len(metas)} tensors; hand on fewer, {_HEADER} numbers tell of them")
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def empty_header() -> Tensor:
    """Room for a header."""
    return torch.empty(_HEADER, dtype=torch.int64)


def read_header(numbers: Tensor) -> Metas:
    """Read what `header` wrote."""
    left = iter(numbers.tolist())
    metas = []
    for _ in range(next(left)):
        dtype, count = _DTYPES[next(left)], next(left)
        shape = tuple(itertools.islice(left, count))
        axes = []
        for _ in range(next(left)):
            divided, length = next(left), next(left)
            axes.append(("".join(map(chr, itertools.islice(left, length))), divided))
        spread = Spread(tuple(name for name, _ in axes), tuple(each for _, each in axes)) if axes else None
        metas.append(Meta(shape, dtype, spread))
    return tuple(metas)


class Boundary:
    """What is known of the shapes that go over one boundary; both of its ends know the same.

    A shape is foretold where it was seen, or where every rule that explains all that was seen gives the same: that an
    extent is always the same number, or in proportion to one extent of the inputs or to the product of two, or that
    rounded up or down, or apart from it by a number.
    """

    def __init__(self) -> None:
        self._seen: dict[Signature, Metas] = {}
        self._foretold: dict[Signature, Metas] = {}

    def foretell(self, signature: Signature) -> Metas | None:
        """What will go over it for a microbatch of these inputs; None: that is not certain."""
        known = self._seen.get(signature) or self._foretold.get(signature)
        if known is None and self._seen:
            known = self._by_rule(signature)
            if known is not None:
                if len(self._foretold) >= _MOST_SEEN:
                    self._foretold.clear()
                self._foretold[signature] = known
        return known

    def learn(self, signature: Signature, metas: Metas) -> None:
        """Note what went over it."""
        if len(self._seen) < _MOST_SEEN:
            self._seen.setdefault(signature, metas)

    def _by_rule(self, signature: Signature) -> Metas | None:
        rows = [(inputs, metas) for inputs, metas in self._seen.items() if len(inputs) == len(signature)]
        if not rows:
            return None
        form = _form(rows[0][1])
        if any(_form(metas) != form for _, metas in rows):
            return None
        found = []
        for number, first in enumerate(rows[0][1]):
            shape = []
            for place in range(len(first.shape)):
                column = [(inputs, metas[number].shape[place]) for inputs, metas in rows]
                values = set(_values(column, signature))
                if len(values) != 1:
                    return None
                shape.append(values.pop())
            found.append(first._replace(shape=tuple(shape)))
        return tuple(found)


def _form(metas: Metas) -> tuple[tuple[torch.dtype, int, Spread | None], ...]:
    return tuple((meta.dtype, len(meta.shape), meta.spread) for meta in metas)


def _values(column: Sequence[tuple[Signature, int]], signature: Signature) -> Iterator[int]:
    """What each rule that explains a column of extents gives for other inputs."""
    _, first = column[0]
    if all(extent == first for _, extent in column):
        yield first
    places = [(i,) for i in range(len(signature))]
    for factors in [*places, *itertools.combinations(range(len(signature)), 2)]:
        rows = [(math.prod(inputs[i] for i in factors), extent) for inputs, extent in column]
        here, (base, _) = math.prod(signature[i] for i in factors), rows[0]
        if base and all(extent * base == first * number for number, extent in rows) and first * here % base == 0:
            yield first * here // base
        if len(factors) == 1:
            apart = first - base
            if all(extent - number == apart for number, extent in rows) and here + apart >= 0:
                yield here + apart
        for divisor in range(2, _MOST_DIVISOR if first and base >= first else 0):
            for up in (0, divisor - 1):
                if all((number + up) // divisor == extent for number, extent in rows):
                    yield (here + up) // divisor
