"""Layers of models whose parts were found by running them.

The part before the blocks, and the part behind them, are the library's own forward pass of a sample. Each runs on a
copy of the model with the parameters of this part only. The blocks of all towers are replaced by probes, which return
the states of the encoders and stop the pass at the blocks of the language model. What reaches a block besides the state
is recorded. It is the block's context, or a stream if it depends on parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.hollow import Arguments, BlockReached, HollowRun, Probe, outputs_of, run_with
from pipeloom.integrations.transformers.indices import indices_on_host
from pipeloom.integrations.transformers.layers import LibraryLayer, has_mask, run_to_block
from pipeloom.integrations.transformers.packed import Calls
from pipeloom.runtime.model.model import Emit

Call = Callable[[Any], Any]
Where = tuple[Any, ...]


@dataclass(frozen=True)
class Stream:
    """A tensor that depends on parameters before a block, and that the block takes besides its input.

    Attributes
    ----------
    place : int
        Number of the block.
    where : tuple
        Keys and indices that lead to it in the arguments of the block. Empty for a tensor that is added to the state.
    axis : int or None
        Dimension of the rows. None for a tensor without one.
    """

    name: str
    place: int
    where: Where
    axis: int | None
    width: int
    source: int | None = None
    """Number of the block that computes it. None if it is computed before the blocks."""
    given: Where = ()
    """Keys and indices that lead to it in the outputs and arguments of that block after its call."""
    shape: tuple[int, ...] = ()
    """Its shape for one token, if a block computes it."""


@dataclass(frozen=True)
class Tower:
    """The blocks of an encoder or of the language model.

    Attributes
    ----------
    name : str
        Name of the module.
    path : str
        Path of the list of blocks.
    count : int
        Number of blocks that run.
    axis : int or None
        Dimension of tokens in the state. None: all dimensions but the last are rows.
    inner : tuple of int
        Blocks of an encoder whose state the language model takes besides the last one's.
    """

    name: str
    path: str
    count: int
    axis: int | None = None
    inner: tuple[int, ...] = ()
    streams: tuple[Stream, ...] = ()

    def inner_stream(self, place: int) -> str:
        """Return the name of the stream with the state after a block."""
        return f"{self.name}__{place}"

    @property
    def last_place(self) -> int:
        """The last block that takes a stream computed before the blocks; 0 if none does."""
        return max([each.place for each in self.streams if each.source is None], default=0)


def to_rows(state: Tensor, axis: int | None) -> Tensor:
    """Return a state as a matrix with one row per patch or token."""
    if axis is None:
        return state.reshape(-1, state.shape[-1])
    return state.movedim(axis, 0).reshape(state.shape[axis], -1)


def from_rows(rows: Tensor, shape: Sequence[int], axis: int | None) -> Tensor:
    """Return rows in the shape of the library's state."""
    if axis is None:
        return rows.reshape(tuple(shape))
    moved = [shape[axis], *(side for place, side in enumerate(shape) if place != axis)]
    return rows.reshape(moved).movedim(0, axis)


@dataclass
class Feed:
    """Gives the library's forward pass the states of an encoder's blocks, in the order in which it takes them.

    ``states`` has the rows of the states after blocks, by number of the block, and ``counts`` the rows of each
    instance.
    """

    states: Mapping[int, Tensor]
    counts: Sequence[int]
    taken: dict[int, int] = field(default_factory=dict)

    def take(self, place: int, x: Tensor) -> Tensor:
        """Return the state after a block in the shape of ``x``. States that are not needed keep their input."""
        if place not in self.states:
            return x
        begin = self.taken.get(place, 0)
        rows, count = self.states[place], x.numel() // x.shape[-1]
        if x.dim() == 3 and count > len(rows) - begin and len(x) == len(self.counts):
            # The library pads the images of a sample to one number of patches.
            padded = x.new_zeros(x.shape).to(rows.dtype)
            pieces = torch.split(rows, list(self.counts))
            return torch.stack([_padded(piece, each) for piece, each in zip(pieces, padded, strict=True)])
        self.taken[place] = begin + count
        return rows[begin : begin + count].reshape(x.shape)


def _padded(piece: Tensor, zeros: Tensor) -> Tensor:
    return torch.cat([piece, zeros[len(piece) :]])


@dataclass
class Recording:
    """What a forward pass gives the blocks of a tower."""

    states: list[Tensor] = field(default_factory=list)
    arguments: list[Arguments | None] = field(default_factory=list)
    """None for a block that this pass leaves out. Its state is that of the block before it."""
    changed: list[int] = field(default_factory=list)
    """Blocks that get another state than the block before them returned."""

    def leave_out(self, count: int) -> None:
        """Add blocks that the pass leaves out, until there are ``count``."""
        while self.states and len(self.states) < count:
            self.states.append(self.states[-1])
            self.arguments.append(None)


def reach(shell: nn.Module, call: Call, tower: Tower, last: int, feeds: Mapping[str, Feed], **run: Any) -> Recording:
    """Run a copy of the model up to a block, with zeros as states after the blocks before it, or raise `InputError`."""
    found = Recording()
    returned: tuple[Tensor | None, int] = None, 0

    def play(probe: Probe, x: Tensor, arguments: Arguments) -> Tensor:
        if probe.tower != tower.name:
            return feeds[probe.tower].take(probe.place, x) if probe.tower in feeds else x
        if probe.place < len(found.states):
            raise InputError("model", f"calls block {probe.place} of {tower.path!r} as number {len(found.states)}")
        nonlocal returned
        found.leave_out(min(probe.place, last + 1))
        if probe.place and (x is not returned[0] or x._version != returned[1]):
            found.changed.append(probe.place)
        if probe.place <= last:
            found.states.append(x)
            found.arguments.append(arguments)
        if probe.place >= last:
            raise BlockReached(x)
        # The library may change it in place, which some tensors with values do not allow.
        new = x if isinstance(x, FakeTensor) else torch.zeros_like(x)
        returned = new, new._version
        return new

    try:
        with run_with(HollowRun(play, **run)):
            call(shell)
    except BlockReached:
        return found
    if not found.states:
        raise InputError("model", f"does not reach block {last} of {tower.path!r}")
    found.leave_out(last + 1)
    return found


def _together(pieces: list[Tensor]) -> Tensor:
    """Concatenate tensors. One alone is not copied."""
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _apart(rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split a tensor into pieces of these sizes. One alone is the tensor, because the gradient of a split is copied."""
    return (rows,) if len(sizes) == 1 else torch.split(rows, sizes)


def tensors_in(value: Any, where: Where = ()) -> Iterator[tuple[Where, Tensor]]:
    """Yield the tensors in nested containers, each with the keys and indices that lead to it."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, (tuple, list)):
        for place, each in enumerate(value):
            yield from tensors_in(each, (*where, place))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, (*where, key))


def replaced(value: Any, where: Where, new: Any) -> Any:
    """Return nested containers with one entry replaced. Missing ones are added."""
    if not where:
        return new
    if isinstance(value, Mapping):
        return {**value, where[0]: replaced(value.get(where[0], ()), where[1:], new)}
    items = [*value, *[None] * (where[0] + 1 - len(value))]
    items[where[0]] = replaced(items[where[0]], where[1:], new)
    return tuple(items)


def entry(value: Any, where: Where) -> Any:
    """Return an entry of nested containers."""
    for key in where:
        value = value[key]
    return value


def call_block(block: nn.Module, state: Tensor, arguments: Arguments) -> Any:
    """Call a block. Return its outputs, and its arguments, which it may have changed."""
    args, kwargs = arguments
    return outputs_of(block(state, *args, **kwargs)), args, kwargs


def call_without_numbers(block: nn.Module, state: Tensor, arguments: Arguments) -> Any:
    """As `call_block`, on the meta device. If the block fails, its outputs are empty."""
    values = {name: each.to("meta") for name, each in (*block.named_parameters(), *block.named_buffers())}
    # Copies, because a block may change its arguments.
    args, kwargs = tree_map_only(Tensor, lambda each: each.to("meta"), arguments)
    configs: list[Any] = [getattr(module, "config", None) for module in block.modules()]
    before = [(each, each._experts_implementation) for each in configs if hasattr(each, "_experts_implementation")]
    try:
        for each, _ in before:
            # The only one whose shapes depend on no numbers.
            each._experts_implementation = "batched_mm"
        output = functional_call(block, values, (state.detach().to("meta"), *args), kwargs)
    except Exception:
        output = ()
    finally:
        for each, implementation in before:
            each._experts_implementation = implementation
    return outputs_of(output), args, kwargs


def with_tokens(stream: Stream, count: int) -> tuple[int, ...]:
    """Return the shape of a stream for a number of tokens."""
    return tuple(count if place == stream.axis else side for place, side in enumerate(stream.shape))


# ------------------------------------------------------------------ arguments of one call


def filled(outer: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Return the arguments of a call. Only the shapes of pixels are known; zeros could look like padding."""
    ones = {name: like.new_ones(()).expand(shape) for name, shape in outer["shapes"].items()}
    return {**outer["values"], **ones}


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return further pixels in a data type. Other entries, such as times, stay as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() > 2 else tensor


def encoder_call(function: str, pixels: Tensor, given: Mapping[str, Any]) -> Call:
    """Return a call of the library's function for features."""
    given = {name: as_dtype(each, pixels.dtype) for name, each in given.items()}

    def call(shell: Any) -> Any:
        return attrgetter(function)(shell)(pixels, **given)

    return call


def sample_call(given: Mapping[str, Any]) -> Call:
    """Return a call of the model on one sample."""

    def call(shell: Any) -> Any:
        return shell(**given, use_cache=False)

    return call


# ------------------------------------------------------------------ layers


def _emitted(tower: Tower, found: Sequence[Recording]) -> dict[str, Tensor]:
    """Return the streams of several calls."""
    out = {}
    for stream in tower.streams:
        if stream.source is not None:
            continue
        pieces = []
        for each in found:
            arguments = each.arguments[stream.place]
            value: Tensor | None = each.states[stream.place]
            if stream.where:
                value = None if arguments is None else entry(arguments, stream.where)
            if value is None:
                # A sample without images. The empty sum connects the stream to the graph.
                state = to_rows(each.states[0], tower.axis)
                rows = 1 if stream.axis is None else len(state)
                pieces.append(state.new_zeros(rows, stream.width) + state[:0].sum())
                continue
            pieces.append(value.reshape(1, -1) if stream.axis is None else to_rows(value, stream.axis))
        out[stream.name] = torch.cat(pieces)
    return out


def _with_streams(tower: Tower, rows: Tensor, found: Sequence[Recording]) -> Tensor | Emit:
    streams = _emitted(tower, found)
    return Emit(rows, streams) if streams else rows


class _Shell(LibraryLayer):
    """A hollow model with the parts that run before or after the blocks."""

    shell: Any

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.shell = shell

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return parameter.removeprefix("shell.")


class InstanceFirst(_Shell):
    """The part before the blocks of an encoder."""

    def __init__(self, shell: nn.Module, tower: Tower) -> None:
        super().__init__(shell)
        self.tower = tower

    def forward(self, *pixels: Tensor, calls: tuple[Calls, ...], **tensors: Tensor) -> Tensor | Emit:
        """Embed the pixels of each call."""
        found = []
        with indices_on_host(pixels[0].device):
            for each, values in zip(calls, pixels, strict=True):
                outer = each.forward(tensors)
                call = encoder_call(outer["function"], values, outer["values"])
                found.append(reach(self.shell, call, self.tower, self.tower.last_place, {}))
        return _with_streams(self.tower, torch.cat([to_rows(each.states[0], None) for each in found]), found)


class SampleFirst(_Shell):
    """The part before the blocks of the language model, with what stands behind the blocks of the encoders."""

    def __init__(self, shell: nn.Module, tower: Tower, encoders: tuple[Tower, ...]) -> None:
        super().__init__(shell)
        self.tower, self.encoders = tower, encoders

    def forward(self, ids: Tensor, *upstream: Tensor, calls: tuple[Calls, ...], **tensors: Tensor) -> Tensor | Emit:
        """Run each sample up to the blocks. ``upstream`` holds the states of the encoders."""
        outers = [each.forward(tensors) for each in calls]
        lengths = [outer["tokens"] for outer in outers]
        pieces: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        empty: Any = 0.0
        for number, (encoder, rows) in enumerate(zip(self.encoders, upstream, strict=True)):
            states = {encoder.count - 1: rows}
            states |= {place: tensors.pop(encoder.inner_stream(place)) for place in encoder.inner}
            sizes = [sum(outer["rows"][number]) for outer in outers]
            for place, state in states.items():
                pieces[encoder.name, place] = torch.split(state, sizes)
                # The empty sum connects each encoder to the graph, so that it gets a gradient even without images.
                empty = empty + state[:0].sum()
        found = []
        for i, (outer, words) in enumerate(zip(outers, torch.split(ids, lengths), strict=True)):
            feeds = {
                encoder.name: Feed(
                    {place: pieces[encoder.name, place][i] for place in (*encoder.inner, encoder.count - 1)},
                    outer["rows"][number],
                )
                for number, encoder in enumerate(self.encoders)
            }
            like = upstream[0] if upstream else torch.zeros((), device=ids.device)
            call = sample_call({"input_ids": words[None], **filled(outer, like)})
            with indices_on_host(ids.device):
                found.append(reach(self.shell, call, self.tower, self.tower.last_place, feeds))
        rows = _together([to_rows(each.states[0], self.tower.axis) for each in found])
        if upstream:
            rows = rows + empty
        return _with_streams(self.tower, rows, found)


class SampleLast(_Shell):
    """The part behind the blocks of the language model.

    If ``alone``, the library runs it on a state alone. Otherwise, its forward pass needs the whole sample.
    """

    def __init__(self, shell: nn.Module, tower: Tower, *, alone: bool) -> None:
        super().__init__(shell)
        self.tower, self.alone = tower, alone

    def forward(
        self, x: Tensor, *, calls: tuple[Calls, ...], packs: tuple[Calls, ...] = (), **tensors: Tensor
    ) -> Tensor:
        """Return the logits of all samples."""
        outers = [each.forward(tensors) for each in (packs if packs and self.alone else calls)]
        logits = []
        for outer, rows in zip(outers, _apart(x, [outer["tokens"] for outer in outers]), strict=True):
            state = from_rows(rows, outer["shape"], self.tower.axis)

            def play(probe: Probe, given: Tensor, _: Arguments, state: Tensor = state) -> Tensor:
                return state if probe.tower == self.tower.name else given

            given = filled(outer, x.detach())
            if self.alone:
                embeddings = x.new_zeros(()).expand(1, outer["tokens"], outer["width"])
                given = {"inputs_embeds": embeddings, **outer.get("behind", {})}
            with run_with(HollowRun(play)), indices_on_host(x.device):
                out = self.shell(**given, use_cache=False)
            logits.append(out.logits[0])
        return _together(logits)


class InstanceBetween(_Shell):
    """What the library computes between two blocks of an encoder. ``place`` is the second one."""

    def __init__(self, shell: nn.Module, tower: Tower, place: int) -> None:
        super().__init__(shell)
        self.tower, self.place = tower, place

    def forward(self, x: Tensor, outer: Mapping[str, Any]) -> Tensor:
        """Map the rows of one call."""

        def play(probe: Probe, given: Tensor, _: Arguments) -> Tensor:
            if probe.tower != self.tower.name:
                return given
            if probe.place == self.place:
                raise BlockReached(given)
            last = probe.place == self.place - 1
            # Copies, because the library may change the state in place.
            return from_rows(x.clone(), outer["shape"], self.tower.axis) if last else torch.zeros_like(given)

        call = encoder_call(outer["function"], x.new_ones(()).expand(outer["pixels"]), outer["values"])
        with indices_on_host(x.device):
            return to_rows(run_to_block(partial(call, self.shell), HollowRun(play)), self.tower.axis)


class TowerBlock(LibraryLayer):
    """A block of the library, called once for each recorded call of the library's forward pass.

    The context has the recorded calls of each instance or sample, and ``packs`` if there is one for all of them. A
    block without attention has no mask that separates the samples, so it is called for each.
    """

    def __init__(self, inner: nn.Module, place: int, tower: Tower, entry: InstanceBetween | None = None) -> None:
        super().__init__()
        self.inner, self.place, self.tower, self.entry = inner, place, tower, entry
        self.streams = tuple(each for each in tower.streams if each.place == place)
        self.gives = {each.name: each for each in tower.streams if each.source == place}

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        if parameter.startswith("entry."):
            return parameter.removeprefix("entry.shell.")
        return f"{self.tower.path}.{self.place}.{parameter.removeprefix('inner.')}"

    def forward(
        self, x: Tensor, *, calls: tuple[Calls, ...], packs: tuple[Calls, ...] = (), **tensors: Tensor
    ) -> Tensor | Emit:
        """Map the rows of all calls."""
        num_samples = len(calls)
        if packs and has_mask(packs[0].blocks[self.place]):
            calls = packs
        # One row per sample.
        single = [num_samples // len(calls)] * len(calls)
        # Numbers only, so that the tensors need not be filled in.
        outers = [each.outer for each in calls]
        lengths = [outer["tokens"] for outer in outers]
        given = {
            each.name: torch.split(tensors.pop(each.name), single if each.axis is None else lengths)
            for each in self.streams
        }
        out = []
        given_on: dict[str, list[Tensor]] = {name: [] for name in self.gives}
        for i, (each, rows) in enumerate(zip(calls, _apart(x, lengths), strict=True)):
            arguments = each.block(self.place, tensors)
            if arguments is None:
                # The library leaves the block out. The empty sums connect the streams to the graph.
                out.append(rows + sum(given[name][i][:0].sum() for name in given))
                continue
            rows = rows if self.entry is None else self.entry(rows, each.forward(tensors))
            state = from_rows(rows, outers[i]["shape"], self.tower.axis)
            for stream in self.streams:
                shape = outers[i]["streams"].get(stream.name)
                if shape is None:
                    state = state + given[stream.name][i][:0].sum()
                    continue
                value = from_rows(given[stream.name][i], shape, stream.axis)
                if stream.where:
                    arguments = replaced(arguments, stream.where, value)
                else:
                    state = state + value
            called = call_block(self.inner, state, arguments)
            output = called[0][0]
            if output.shape != state.shape:
                raise InputError(
                    f"block {self.place} of {self.tower.path!r}",
                    f"maps a state of shape {tuple(state.shape)} to {tuple(output.shape)}",
                )
            out.append(to_rows(output, self.tower.axis))
            for name, pieces in given_on.items():
                pieces.append(to_rows(entry(called, self.gives[name].given), self.gives[name].axis))
        found = _together(out)
        streams = {name: torch.cat(pieces) for name, pieces in given_on.items()}
        if self.place in self.tower.inner:
            streams[self.tower.inner_stream(self.place)] = found
        return Emit(found, streams) if streams else found


def width_of(shape: Sequence[int], axis: int | None) -> int:
    """Return the number of entries of a row of a state."""
    return shape[-1] if axis is None else math.prod(shape) // shape[axis]
