"""Divide a library's forward pass into layers without knowing its code.

Each layer replays the library's own forward pass. Blocks and other parts with parameters that belong to earlier layers
are not run: they return the tensors that those layers sent, or zeros where nothing later depends on them. Which tensors
a layer needs follows from the graph that autograd builds in one recorded pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeloom.errors import InputError, PipeloomError
from pipeloom.integrations.transformers.hollow import HollowRun, hollow, now, run_with

Key = tuple[str, int, int]
"""Path of a part, number of its call in the forward pass, and number of the tensor in its flattened output."""
PROMPT: Key = ("encoder_hidden_states", 0, 0)
"""The prompt's embedding, if another module of the model computes it."""


class _Stopped(Exception):
    """Control flow, not an error: the layer's block has run."""


class Part(nn.Module):
    """Replaces a block or another part. ``real`` is the part itself in the layer that owns it, else None."""

    def __init__(self, path: str, real: nn.Module | None, like: nn.Module) -> None:
        super().__init__()
        self.path, self.real, self.outline = path, real, hollow(like, (), {})
        # A module, so that it moves to the layer's device. The layer that owns the part has its buffers in files.
        for module in self.outline.modules():
            module._non_persistent_buffers_set |= module._buffers.keys()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Let the running pass decide what the part returns."""
        return now().play(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced part, such as its number of heads or the dtype of its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "outline" not in self._modules:
                raise
            return getattr(self._modules["outline"], name)


@dataclass(frozen=True)
class Call:
    """One call of a part: the layer that runs it, and its output.

    ``shapes`` has the shape of each tensor of the flattened output and None for other values, which ``constants`` has.
    """

    layer: int
    is_block: bool
    spec: Any
    shapes: tuple[tuple[int, ...] | None, ...]
    constants: tuple[Any, ...]


Calls = Mapping[tuple[str, int], Call]


def is_real(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def real_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor of floating-point numbers. None for other values."""
    return tuple(value.shape) if is_real(value) else None


# ------------------------------------------------------------------ recording


@dataclass(frozen=True)
class Parts:
    """The parts of a model: blocks in the order of their calls, and other parts with parameters.

    ``rules`` has, for each block, the number of the flattened argument whose shape each tensor of its output has; None
    for outputs that are no tensors.
    """

    blocks: tuple[str, ...]
    others: tuple[str, ...]
    rules: Mapping[str, tuple[Any, tuple[int | None, ...]]]


class Recording:
    """Runs all parts but the blocks, and records shapes. With ``is_traced``, it also records dependencies."""

    def __init__(self, parts: Parts, own: Mapping[str, nn.Parameter], is_traced: bool) -> None:
        self.parts, self.own, self.is_traced = parts, own, is_traced
        self.places = {path: number for number, path in enumerate(parts.blocks)}
        self.calls: dict[tuple[str, int], Call] = {}
        self.tensors: dict[Key, Tensor] = {}
        self.targets: dict[int, list[Tensor]] = {}
        self._done = 0
        self._numbers: Counter[str] = Counter()

    def call(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `Part`."""
        number, is_block = self._numbers[part.path], part.path in self.places
        self._numbers[part.path] += 1
        flat, _ = tree_flatten((args, kwargs))
        layer = self._done + 1 if self._done or is_block else 0
        self.targets.setdefault(layer, []).extend(filter(is_real, flat))
        if is_block:
            if self.places[part.path] != self._done:
                raise InputError("model", f"calls its blocks in another order for some samples, at {part.path!r}")
            self._done += 1
            spec, sources = self.parts.rules[part.path]
            found = [None if each is None else flat[each].detach() for each in sources]
        else:
            assert part.real is not None
            found, spec = tree_flatten(part.real(*args, **kwargs))
        shapes = tuple(map(real_shape, found))
        constants = tuple(None if is_real(each) else each for each in found)
        self.calls[part.path, number] = Call(layer, is_block, spec, shapes, constants)
        for place, each in enumerate(found):
            if self.is_traced and isinstance(each, Tensor) and is_real(each):
                self.tensors[part.path, number, place] = leaf = each.detach().clone().requires_grad_()
                found[place] = leaf.clone()
        return tree_unflatten(found, spec)

    def needs(self) -> list[tuple[set[Key], set[str]]]:
        """Return the tensors of earlier layers and the parameters of containers that each layer needs."""
        keys, names, out = list(self.tensors), list(self.own), []
        inputs = [*self.tensors.values(), *self.own.values()]
        for layer in range(len(self.parts.blocks) + 2):
            targets = [each for each in self.targets.get(layer, ()) if each.requires_grad]
            grads: Sequence[Tensor | None] = ()
            if targets:
                sums = torch.stack([each.sum() for each in targets]).sum()
                grads = torch.autograd.grad(sums, inputs, allow_unused=True, retain_graph=True)
            used = {number for number, each in enumerate(grads) if each is not None}
            needed = {key for number, key in enumerate(keys) if number in used and self._layer(key) < layer}
            out.append((needed, {name for number, name in enumerate(names, len(keys)) if number in used}))
        return out

    def _layer(self, key: Key) -> int:
        return 0 if key == PROMPT else self.calls[key[:2]].layer


def record(model: nn.Module, parts: Parts, run: Callable[[nn.Module], Any], prompt: Tensor | None = None) -> Recording:
    """Record a pass of a model whose parts are `Part` modules. ``prompt`` is the input that has the key `PROMPT`."""
    is_traced = torch.is_grad_enabled()
    recording = Recording(parts, dict(own_parameters(model)), is_traced)
    if prompt is not None:
        recording.tensors[PROMPT] = prompt
    with run_with(HollowRun(recording.call)):
        output = run(model)
    if recording._done != len(parts.blocks):
        raise InputError("model", f"calls {recording._done} of its {len(parts.blocks)} blocks")
    recording.targets.setdefault(len(parts.blocks) + 1, []).append(output)
    return recording


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model that belong to no `Part`, with their names."""
    for path, module in model.named_modules():
        if not any(isinstance(each, Part) for each in _above(model, path)):
            for name, parameter in module.named_parameters(recurse=False):
                yield (f"{path}.{name}" if path else name), parameter


def _above(model: nn.Module, path: str) -> Iterator[nn.Module]:
    module = model
    yield module
    for name in path.split(".") if path else ():
        module = module.get_submodule(name)
        yield module


# ------------------------------------------------------------------ division


@dataclass(frozen=True)
class Division:
    """What each layer owns, takes and passes on. Layer 0 runs before the blocks, the last layer after them.

    Attributes
    ----------
    own : tuple of tuple of str
        Parts other than blocks, and parameters of containers, that each layer owns.
    rows : tuple of tuple of Key
        Tensors that each layer but the last passes to the next one as rows, because they grow with the sample or come
        from a block.
    streams : mapping
        Name of each tensor of fixed size that goes to other layers directly.
    takes : tuple of tuple of Key
        Streams that each layer takes.
    """

    parts: Parts
    own: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[Key, ...], ...]
    streams: Mapping[Key, str]
    takes: tuple[tuple[Key, ...], ...]
    makes: Mapping[Key, int]
    scaled: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    """Dimensions of tensors that grow with the width of the model."""
    ratio: tuple[int, int] = (1, 1)
    """Width of the model, and that of the model that was recorded."""

    def shapes(self, recording: Recording) -> dict[tuple[str, int], Call]:
        """Return the recorded calls with the shapes of the model, which may be wider than the recorded one."""
        real, small = self.ratio
        if real == small:
            return dict(recording.calls)
        out = {}
        for (path, number), call in recording.calls.items():
            shapes = []
            for place, shape in enumerate(call.shapes):
                wide = self.scaled.get((path, number, place), ())
                sides = enumerate(shape or ())
                grown = tuple(side // small * real if at in wide else side for at, side in sides)
                shapes.append(None if shape is None else grown)
            out[path, number] = Call(call.layer, call.is_block, call.spec, tuple(shapes), call.constants)
        return out


def divide(parts: Parts, recordings: Sequence[Recording], ratio: tuple[int, int]) -> Division:
    """Find what each layer needs from recordings of samples of several sizes."""
    first, *others = recordings
    needs = first.needs()
    for each in others:
        found = each.needs()
        if each.calls.keys() != first.calls.keys():
            raise InputError("model", "calls other parts for other samples")
        needs = [(a | c, b | d) for (a, b), (c, d) in zip(needs, found, strict=True)]
    makes = {key: first._layer(key) for key in first.tensors}
    streams: dict[Key, str] = {}
    scaled: dict[Key, tuple[int, ...]] = {}
    for key in first.tensors:
        shapes = [tuple(each.tensors[key].shape) for each in recordings]
        if len({len(shape) for shape in shapes}) > 1:
            raise InputError("model", f"has a part {key[0]!r} whose output has other dimensions for other samples")
        fixed = [len(set(sides)) == 1 for sides in zip(*shapes, strict=True)]
        used = any(key in needed for needed, _ in needs)
        if used and all(fixed) and key != PROMPT and not first.calls[key[:2]].is_block:
            streams[key] = f"shared__{len(streams)}"
        width = ratio[1]
        scaled[key] = tuple(at for at, side in enumerate(shapes[0]) if fixed[at] and side and side % width == 0)
    count = len(needs)
    rows, own = [], []
    for layer in range(count):
        later = set().union(*(needed for needed, _ in needs[layer + 1 :])) if layer + 1 < count else set()
        rows.append(tuple(key for key in makes if key in later and key not in streams and makes[key] <= layer))
        here = {path for (path, _), call in first.calls.items() if call.layer == layer and not call.is_block}
        own.append((*sorted(here), *sorted(needs[layer][1])))
    takes = tuple(tuple(key for key in streams if key in needed) for needed, _ in needs)
    return Division(parts, tuple(own), tuple(rows), streams, takes, makes, scaled, ratio)


# ------------------------------------------------------------------ replay


class Replay:
    """Runs the parts of one layer, and returns the given values of earlier ones.

    ``values`` has the tensors of earlier layers. Those of this layer are added to it.
    """

    def __init__(self, calls: Calls, layer: int, block: nn.Module | None, values: dict[Key, Tensor], like: Tensor):
        self.calls, self.layer, self.block, self.values, self.like = calls, layer, block, values, like
        self._numbers: Counter[str] = Counter()

    def call(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `Part`."""
        number = self._numbers[part.path]
        self._numbers[part.path] += 1
        call = self.calls.get((part.path, number))
        if call is None:
            raise PipeloomError(f"the library's forward pass calls {part.path!r} once more than it did before")
        if call.layer > self.layer:
            raise _Stopped
        if call.layer < self.layer:
            return self._earlier(part.path, number, call)
        real = self.block if call.is_block else part.real
        assert real is not None
        output = real(*args, **kwargs)
        flat, _ = tree_flatten(output)
        for place, (each, shape) in enumerate(zip(flat, call.shapes, strict=True)):
            if shape is not None and tuple(each.shape) != shape:
                problem = f"returned the shape {tuple(each.shape)}, expected is {shape}"
                raise InputError(f"model.{part.path}", problem, "give from_diffusers examples of all sizes")
            if shape is not None:
                self.values[part.path, number, place] = each
        if call.is_block:
            raise _Stopped
        return output

    def _earlier(self, path: str, number: int, call: Call) -> Any:
        found = list(call.constants)
        for place, shape in enumerate(call.shapes):
            if shape is not None:
                value = self.values.get((path, number, place))
                found[place] = self.like.new_zeros(()).expand(shape) if value is None else value
            elif isinstance(found[place], Tensor):
                found[place] = found[place].to(self.like.device)
        return tree_unflatten(found, call.spec)


def replay(shell: nn.Module, running: Replay, run: Callable[[nn.Module], Any]) -> Any:
    """Run a layer. Return the output of the forward pass, or None if the layer ends at its block."""
    with run_with(HollowRun(running.call)):
        try:
            return run(shell)
        except _Stopped:
            return None


def num_rows(shape: tuple[int, ...], width: int) -> int:
    """Return how many rows of a width hold a tensor."""
    return -(-prod(shape) // width)


def to_rows(tensors: Sequence[Tensor], width: int, count: int, like: Tensor) -> Tensor:
    """Return tensors as rows of a width. The rest of ``count`` rows is zero."""
    flat = []
    for each in tensors:
        numbers = each.reshape(-1).to(like.dtype)
        rest = num_rows(tuple(each.shape), width) * width - numbers.numel()
        flat.append(torch.cat([numbers, numbers.new_zeros(rest)]) if rest else numbers)
    rest = count * width - sum(each.numel() for each in flat)
    return torch.cat([*flat, like.new_zeros(rest)]).reshape(count, width)


def from_rows(rows: Tensor, shapes: Sequence[tuple[int, ...]], width: int) -> list[Tensor]:
    """Return the tensors of `to_rows`."""
    out, begin, flat = [], 0, rows.reshape(-1)
    for shape in shapes:
        out.append(flat[begin : begin + prod(shape)].reshape(shape))
        begin += num_rows(shape, width) * width
    return out
