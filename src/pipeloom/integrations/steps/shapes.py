"""Tensors between stages: one tensor a boundary, whose shape is predicted by the receiver or sent ahead.

A stage of PyTorch may return several tensors of any type. They are sent as one. Their shapes follow from the sizes of
the step's inputs by an unknown rule. So both ends of a boundary note the shapes they have seen. They predict a shape if
all plausible rules that explain the earlier ones agree. Otherwise, the shape is sent ahead of the tensor.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pipeloom.errors import ExecutionError

Signature = tuple[int, ...]
"""Extents and item sizes of the tensors of a microbatch's inputs, in order."""


class Spread(NamedTuple):
    """Placements of a DTensor on a mesh, which is identified by the names of its dimensions."""

    mesh: tuple[str, ...]
    divided: tuple[int, ...]
    """By dimension of the mesh, the sharded dimension of the tensor; or `_REPLICATED` or `_PARTIAL`."""


class Meta(NamedTuple):
    """Shape and type of one tensor; of a DTensor those of its local shard, which is what is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spread: Spread | None = None
    whole: tuple[int, ...] | None = None
    """Shape of the whole DTensor, which does not follow from that of a shard if shards are unequal."""


class Flat(NamedTuple):
    """Shape and type of the one tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


MeshOf = Callable[[tuple[str, ...]], DeviceMesh]
"""Returns this rank's mesh by the names of its dimensions."""


Metas = tuple[Meta, ...]
"""Shapes and types of all outputs of a stage for one microbatch."""

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HEADER = 2048
"""Bytes of a header."""
_MOST_SEEN = 512
"""Most signatures that are noted; shapes of later ones are sent ahead."""
_MOST_STEPS = 64
"""Most lengths of the steps of a staircase that are tried; with more, what was seen says too little."""
_REPLICATED, _PARTIAL = -1, -2


def metas_of(outputs: Sequence[object], stage: int) -> Metas:
    """Return shapes and types of a stage's outputs, which must be tensors of types that can be sent."""
    metas = []
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor) or output.dtype not in _CODES:
            what = f"a {type(output).__name__}" if not isinstance(output, Tensor) else f"of {output.dtype}"
            raise ExecutionError(f"stage {stage}: output {number} is {what}; return tensors of floats or integers")
        spread, here, whole = None, output, None
        if isinstance(output, DTensor):
            spread, here, whole = _spread_of(output, stage), output._local_tensor, tuple(output.shape)
        metas.append(Meta(tuple(here.shape), here.dtype, spread, whole))
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
            raise ExecutionError(f"stage {stage} returns a DTensor placed as {placement}; redistribute it before")
    names = output.device_mesh.mesh_dim_names
    if names is None:
        raise ExecutionError(f"stage {stage} returns a DTensor over a mesh without names; give mesh_dim_names")
    return Spread(tuple(names), tuple(divided))


def _placement(divided: int) -> Placement:
    if divided == _REPLICATED:
        return Replicate()
    return Partial() if divided == _PARTIAL else Shard(divided)


def _local(output: Tensor) -> Tensor:
    """Return the local shard of a DTensor."""
    if not isinstance(output, DTensor):
        return output
    part: Tensor = output.to_local()
    # A shard that is still being gathered cannot be sent.
    return part.clone() if isinstance(part, AsyncCollectiveTensor) else part


def is_plain(metas: Metas) -> bool:
    """Return whether the boundary has one tensor of floats, which is sent as it is."""
    return len(metas) == 1 and metas[0].dtype.is_floating_point


def flat_meta(metas: Metas) -> Flat:
    """Return shape and type of the tensor that is sent."""
    if is_plain(metas):
        return Flat(metas[0].shape, metas[0].dtype)
    dtype = _common(metas)
    return Flat((sum(_length(meta, dtype) for meta in metas),), dtype)


def bundle(outputs: Sequence[Tensor], metas: Metas) -> Tensor:
    """Concatenate a stage's outputs to one tensor; gradients flow through it to outputs of floats.

    Integers are sent as the bits of floats, which are never computed with.
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
        padded = bits.new_zeros(_length(meta, dtype) * dtype.itemsize)
        padded[: bits.numel()] = bits
        pieces.append(padded.view(dtype))
    return torch.cat(pieces)


def unbundle(flat: Tensor, metas: Metas, mesh_of: MeshOf | None = None) -> tuple[Tensor, ...]:
    """Return the outputs that `bundle` concatenated; DTensors get the meshes that ``mesh_of`` returns."""
    found = (flat,) if is_plain(metas) else _pieces(flat, metas)
    return tuple(_spread(part, meta, mesh_of) for part, meta in zip(found, metas, strict=True))


def _spread(part: Tensor, meta: Meta, mesh_of: MeshOf | None) -> Tensor:
    if meta.spread is None:
        return part
    assert mesh_of is not None
    assert meta.whole is not None
    placements = [_placement(divided) for divided in meta.spread.divided]
    shape = torch.Size(meta.whole)
    # Shards arrive in contiguous memory.
    stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return DTensor.from_local(part, mesh_of(meta.spread.mesh), placements, run_check=False, shape=shape, stride=stride)


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
    """Return the number of elements of the common type that a tensor takes."""
    count = math.prod(meta.shape)
    return count if meta.dtype.is_floating_point else -(-count * meta.dtype.itemsize // dtype.itemsize)


def header(metas: Metas) -> Tensor:
    """Encode shapes and types as JSON of a fixed number of bytes."""
    text = msgspec.json.encode(metas, enc_hook=_CODES.__getitem__)
    if len(text) > _HEADER:
        raise ExecutionError(f"a stage returns {len(metas)} tensors, whose shapes exceed {_HEADER} bytes; return fewer")
    return torch.frombuffer(bytearray(text.ljust(_HEADER)), dtype=torch.uint8)


def empty_header() -> Tensor:
    """Return an empty buffer for a header."""
    return torch.empty(_HEADER, dtype=torch.uint8, device="cpu")


def read_header(text: Tensor) -> Metas:
    """Decode what `header` encoded."""
    return msgspec.json.decode(text.numpy().tobytes(), type=Metas, dec_hook=lambda _, code: _DTYPES[code])


class Boundary:
    """Shapes that were sent over one boundary. Both of its ends have noted the same ones.

    A shape is predicted if it was seen for the same inputs, or if every plausible rule gives the same one. The rules:
    an extent grows with those of the inputs, in an unknown way; or it is a staircase over one of them or over the sum
    or product of two, or a truncated line. Staircases cover proportional and shifted extents, padding, patches and
    strided convolutions. Inputs with an extent outside the range already seen have no prediction, since an extent may
    be constant or truncated outside it.
    """

    def __init__(self) -> None:
        self._seen: dict[Signature, Metas] = {}
        self._predicted: dict[Signature, Metas] = {}

    def predict(self, signature: Signature) -> Metas | None:
        """Return the shapes for a microbatch of these inputs, or None if they are uncertain."""
        known = self._seen.get(signature) or self._predicted.get(signature)
        if known is None and self._seen:
            known = self._by_rule(signature)
            if known is not None:
                if len(self._predicted) >= _MOST_SEEN:
                    self._predicted.clear()
                self._predicted[signature] = known
        return known

    def learn(self, signature: Signature, metas: Metas) -> None:
        """Note the shapes that were sent for a microbatch of these inputs."""
        if len(self._seen) < _MOST_SEEN:
            self._seen.setdefault(signature, metas)

    def _by_rule(self, signature: Signature) -> Metas | None:
        rows = [(inputs, metas) for inputs, metas in self._seen.items() if len(inputs) == len(signature)]
        if not rows:
            return None
        form = _form(rows[0][1])
        if any(_form(metas) != form for _, metas in rows):
            return None
        seen = [inputs for inputs, _ in rows]
        columns = zip(*seen, signature, strict=True)
        if any(not min(column) <= here <= max(column) for *column, here in columns):
            return None
        found = []
        for number in range(len(form)):
            meta = _predicted_meta(seen, [metas[number] for _, metas in rows], signature)
            if meta is None:
                return None
            found.append(meta)
        return tuple(found)


class Boundaries:
    """The boundaries of a chain of stages, as one rank knows them.

    Attributes
    ----------
    before : list of Boundary
        The boundary before each stage.
    crossed : list of int
        Boundaries between this rank and another, by the number of the stage that receives.
    crossed_by_images : list of int
        Those of them behind the stages of an encoder, which some images of a microbatch cross at a time.
    """

    def __init__(self, num_stages: int, mine: set[int], num_encoder: int = 0) -> None:
        self.before = [Boundary() for _ in range(num_stages)]
        crossed = [b for b in range(1, num_stages) if len(mine & {b - 1, b}) == 1]
        self.crossed = [b for b in crossed if b > num_encoder]
        self.crossed_by_images = [b for b in crossed if b <= num_encoder]

    def predict(self, signature: Signature, images: bool = False) -> list[Metas | None]:
        """Return the shapes at all boundaries for a microbatch of these inputs; None where they are unknown.

        ``images`` is whether the inputs are images that pass through an encoder, not a microbatch.
        """
        metas: list[Metas | None] = [None] * (len(self.before) + 1)
        for number in self.crossed_by_images if images else self.crossed:
            metas[number] = self.before[number].predict(signature)
        return metas

    def learn(self, signature: Signature, metas: Sequence[Metas | None], images: bool = False) -> None:
        """Note the shapes sent between this rank and others for a microbatch of these inputs."""
        for number in self.crossed_by_images if images else self.crossed:
            sent = metas[number]
            assert sent is not None
            self.before[number].learn(signature, sent)


def _form(metas: Metas) -> tuple[tuple[torch.dtype, int, Spread | None], ...]:
    return tuple((meta.dtype, len(meta.shape), meta.spread) for meta in metas)


def _predicted_meta(seen: Sequence[Signature], metas: Sequence[Meta], signature: Signature) -> Meta | None:
    """Return the shape of a tensor for other inputs; None if it is uncertain. For the parameters, see `_predicted`."""
    shape, whole = [], []
    for place in range(len(metas[0].shape)):
        rows = [((meta.whole or meta.shape)[place], meta.shape[place]) for meta in metas]
        extent = _predicted(seen, [extent for extent, _ in rows], signature)
        # How unequal shards are divided depends on the rank.
        if extent is None or any(shard != extent and (not shard or extent % shard) for extent, shard in rows):
            return None
        counts = {1 if shard == extent else extent // shard for extent, shard in rows}
        count = counts.pop()
        if counts or extent % count:
            return None
        shape.append(extent // count)
        whole.append(extent)
    return metas[0]._replace(shape=tuple(shape), whole=None if metas[0].whole is None else tuple(whole))


def _predicted(seen: Sequence[Signature], extents: Sequence[int], signature: Signature) -> int | None:
    """Return an extent for other inputs if all plausible rules that explain those seen agree on it; otherwise None."""
    between = _between(seen, extents, signature)
    if between is not None:
        return between
    columns = dict.fromkeys(zip(*seen, signature, strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(seen) <= len(varying):
        # Even a linear rule would not be determined.
        return None
    pairs = list(itertools.combinations(varying, 2))
    sums = [tuple(map(operator.add, *pair)) for pair in pairs]
    products = [tuple(map(operator.mul, *pair)) for pair in pairs]
    values: set[int | None] = set()
    for *numbers, here in [*varying, *sums, *products]:
        values.update(_on_staircases(numbers, extents, here))
        values.update(_truncated(numbers, extents, here))
    return values.pop() if len(values) == 1 else None


def _between(seen: Sequence[Signature], extents: Sequence[int], signature: Signature) -> int | None:
    """Return the extent of smaller and of larger inputs if it is the same; None if it differs or was not seen."""
    below = [(extent, inputs) for inputs, extent in zip(seen, extents, strict=True) if _within(inputs, signature)]
    above = [(extent, inputs) for inputs, extent in zip(seen, extents, strict=True) if _within(signature, inputs)]
    if not below or not above:
        return None
    (low, smaller), (high, larger) = max(below), min(above)
    if low != high:
        return None
    rows = zip(seen, extents, strict=True)
    grows = all(extent == low for each, extent in rows if _within(smaller, each) and _within(each, larger))
    return low if grows else None


def _within(inputs: Signature, others: Signature) -> bool:
    """Return whether no extent is larger than that of the others."""
    return all(map(operator.le, inputs, others))


def _truncated(numbers: Sequence[int], extents: Sequence[int], here: int) -> Iterator[int | None]:
    """Yield the extent at another number if extents are on a line up to the largest one, which truncates the line.

    A staircase through even extents may explain the truncated one as well, and be wrong at odd numbers. Yield None if
    the line is not at an integer.
    """
    top = max(extents)
    rows = sorted((number, extent) for number, extent in zip(numbers, extents, strict=True) if extent < top)
    if not rows or rows[0][0] == rows[-1][0]:
        return
    (first, base), (last, end) = rows[0], rows[-1]

    def times_run(number: int) -> int:
        """Return the extent of the line, times the numbers between its ends."""
        return base * (last - first) + (end - base) * (number - first)

    full = min(number for number, extent in zip(numbers, extents, strict=True) if extent == top)
    on_line = all(times_run(number) == extent * (last - first) for number, extent in rows)
    if on_line and times_run(full) > top * (last - first):
        extent, left = divmod(times_run(here), last - first)
        yield None if left else min(extent, top)


def _on_staircases(numbers: Sequence[int], extents: Sequence[int], here: int) -> Iterator[int | None]:
    """Yield the extents at another number on all staircases through those that were seen; None if there are too many.

    A staircase is ``offset + height * ((number + shift) // length)``. One of height and length divides the other.
    """
    rows = sorted(zip(numbers, extents, strict=True))
    (first, base), (last, top) = rows[0], rows[-1]
    run, common = last - first, math.gcd(*(extent - base for _, extent in rows))
    if not common:
        yield None
        return
    small = [each for each in range(1, math.isqrt(common) + 1) if common % each == 0]
    for height in {*small, *(common // each for each in small)}:
        levels = [(number, (extent - base) // height) for number, extent in rows]
        rise = (top - base) // height
        if rise <= 1:
            # One step may have any length, if there is one at all.
            if all(one <= other for (_, one), (_, other) in itertools.pairwise(levels)):
                yield None
            continue
        lengths = range(max(1, -(-(run + 1) // (rise + 1))), (run - 1) // (rise - 1) + 1)
        if len(lengths) > _MOST_STEPS:
            yield None
            continue
        for length in lengths:
            if height % length and length % height:
                continue
            shifts = [level * length - number for number, level in levels]
            least, most = max(shifts), min(shifts) + length - 1
            if least <= most:
                yield base + height * ((here + least) // length)
                yield base + height * ((here + most) // length)
