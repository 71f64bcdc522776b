"""Hollow models: a library's own forward pass runs with some of its parts replaced."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeloom.errors import PipeloomError

_MOST_REMEMBERED = 1024
"""Most calls of a part whose outputs are kept."""
_PARTS_AND_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
READ = "parameters"
"""Name of the value with what a hollow model reads in place of its parameters while it is traced: paths and leaves."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class BlockReached(Exception):
    """Control flow, not an error: the forward pass has reached the wanted block and is left."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


@dataclass(frozen=True)
class HollowRun:
    """Behavior of the replaced parts while a hollow model runs."""

    play: Callable[..., Any]
    """Called instead of a block with its `Probe`, the hidden state and other arguments. Returns the block's output. For
    a model that is divided by replay, called with each part and its arguments."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the packed sequences. None if no masks are needed."""
    tracing: bool = False
    """Whether the zeros in place of parameters require gradients, so that autograd shows what depends on them."""
    reuses: bool = False
    """Whether the run needs no values: what stands in place of parameters has none, and calls of parts marked by
    `remember_shapes` may return what they returned before."""
    values: dict[str, Any] = field(default_factory=dict)
    """Outputs of `ValueSource` parts, and values recorded by `note`, by name."""


class _Here(threading.local):
    running: HollowRun | None = None


_here = _Here()


def running() -> HollowRun | None:
    """Return the settings of the hollow model that runs in this thread, or None if none runs."""
    return _here.running


@contextmanager
def run_with(settings: HollowRun) -> Iterator[None]:
    """Apply these settings to hollow models inside the ``with`` block. Other models are not affected."""
    before, _here.running = _here.running, settings
    try:
        yield
    finally:
        _here.running = before


def now() -> HollowRun:
    """Return the settings of the hollow model that runs in this thread."""
    if _here.running is None:
        raise PipeloomError("a hollow model was called outside of its layers")
    return _here.running


class Probe(nn.Module):
    """Replaces a block. `probes` also derives it from the block's class, because the library looks for that class."""

    tower: str
    place: int
    extras: int
    """Number of outputs besides the hidden state."""
    state_name: str
    """Name of the argument that takes the hidden state."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``play``."""
        state, *others = args or (kwargs.pop(self.state_name),)
        output = now().play(self, state, (tuple(others), kwargs))
        return (output, *[None] * self.extras) if self.extras else output


class _Shapes(threading.local):
    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)


_shapes = _Shapes()


def shape_only(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without values. What is computed from it has no values either, and costs no arithmetic."""
    with _shapes.mode:
        return torch.empty(tuple(shape), dtype=dtype)


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor of `shape_only`."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def remember_shapes(part: nn.Module) -> None:
    """Remember the outputs of a part for inputs without values, so that runs that reuse them need not call it."""
    known: OrderedDict[Any, tuple[list[Any], Any]] = OrderedDict()
    forward, usual = part.forward, getattr(getattr(part, "config", None), "return_dict", None)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Only some callers ask for what is the default.
        given = {name: each for name, each in kwargs.items() if name != "return_dict" or each is not usual}
        leaves, spec = tree_flatten((args, given))
        if not any(isinstance(each, FakeTensor) for each in leaves):
            return forward(*args, **kwargs)
        key = spec, tuple(map(_key, leaves))
        if now().reuses and key in known:
            return tree_unflatten(list(map(_restored, known[key][0])), known[key][1])
        output = forward(*args, **kwargs)
        outputs, made = tree_flatten(output)
        known[key] = list(map(_kept, outputs)), made
        if len(known) > _MOST_REMEMBERED:
            known.popitem(last=False)
        return output

    part.forward = call


def _kept(leaf: Any) -> Any:
    return _Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, FakeTensor) else leaf


def _restored(leaf: Any) -> Any:
    return shape_only(leaf.shape, leaf.dtype) if isinstance(leaf, _Shape) else leaf


def _key(leaf: Any) -> Any:
    if isinstance(leaf, FakeTensor):
        return tuple(leaf.shape), leaf.dtype
    return (tuple(leaf.shape), tuple(leaf.flatten().tolist())) if isinstance(leaf, Tensor) else leaf


class ValueSource(nn.Module):
    """Replaces a part. Its output is the running model's value of a name, or a tuple of values for several names."""

    def __init__(self, names: str | tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values; None for each missing one."""
        del args, kwargs
        values = now().values
        if isinstance(self.names, str):
            return values.get(self.names)
        return tuple(values.get(name) for name in self.names)


def note(part: nn.Module, names: tuple[str, ...]) -> None:
    """Record the outputs of a part as values of the running model."""
    part.register_forward_hook(partial(_note, names))


def _note(names: tuple[str, ...], part: nn.Module, given: Any, output: tuple[Any, ...]) -> None:
    del part, given
    now().values.update(zip(names, output, strict=True))


def state_name(block: nn.Module) -> str:
    """Return the name of the argument of a block that takes the hidden state: the first one."""
    return next(iter(inspect.signature(block.forward).parameters))


def outputs_of(output: Any) -> tuple[Any, ...]:
    """Return the outputs of a block as a tuple, the state first."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def probes(tower: str, blocks: Sequence[nn.Module], extras: int = 0) -> nn.ModuleList:
    """Return a probe for each block of a tower, with the block's plain attributes."""
    classes: dict[type, type] = {}
    out = nn.ModuleList()
    for place, block in enumerate(blocks):
        kind = type(block)
        if kind not in classes:
            own = {"forward": Probe.forward, "state_name": state_name(block), "__doc__": ""}
            classes[kind] = type(f"{kind.__name__}Probe", (Probe, kind), own)
        probe: Any = object.__new__(classes[kind])
        nn.Module.__init__(probe)
        for name, value in vars(block).items():
            if not name.startswith("_") and not hasattr(nn.Module, name):
                setattr(probe, name, value)
        probe.tower, probe.place, probe.extras = tower, place, extras
        out.append(probe)
    return out


def hollow(model: nn.Module, keep: Container[str], swap: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """Return a copy of a model that runs, with zeros that take no memory in place of most parameters.

    The modules and parameters with paths in ``keep`` are shared, the modules with paths in ``swap`` are replaced.
    ``path`` is that of the copied module, with a dot behind it.
    """
    # A copy also of modules without parameters, for each layer, because a layer may be moved to another device.
    new, gone = _bare_copy(model), {}
    new._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
    for name, parameter in model._parameters.items():
        if parameter is None or path + name in keep:
            new._parameters[name] = parameter
        else:
            gone[name] = tuple(parameter.shape)
            like = torch.empty(0, dtype=parameter.dtype, device="cpu")
            new.register_buffer(f"like_{name}", like, persistent=False)
    # As properties, because a parameter would belong to the layer.
    properties: dict[str, Any] = {
        name: property(partial(_zeros, path + name, f"like_{name}", shape)) for name, shape in gone.items()
    }
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if floating is not None and hasattr(type(model), "dtype"):
        # The library reads these from the parameters.
        new.register_buffer("like_all", torch.empty(0, dtype=floating, device="cpu"), persistent=False)
        properties |= {name: property(partial(_like, name)) for name in ("dtype", "device")}
        properties["parameters"] = _parameters_or_like
    if properties:
        # The library looks up classes by their full name.
        kind = type(model)
        names = {"__doc__": "", "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        new.__class__ = type(kind.__name__, (kind,), properties | names)
    for name, child in model._modules.items():
        here = path + name
        if here in swap:
            new._modules[name] = swap[here]
        elif child is None or here in keep:
            new._modules[name] = child
        else:
            new._modules[name] = hollow(child, keep, swap, f"{here}.")
    return new


def _parameters_or_like(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    """Return the parameters. If there are none, the library gets a tensor to read the dtype from."""
    like = module._buffers["like_all"]
    assert like is not None
    found: list[Tensor] = list(nn.Module.parameters(module, recurse))
    return iter(found or [like])


def _like(name: str, module: nn.Module) -> Any:
    return getattr(module._buffers["like_all"], name)


def _zeros(path: str, like: str, shape: tuple[int, ...], module: nn.Module) -> Tensor:
    run, kept = running(), module._buffers[like]
    assert kept is not None
    if run is not None and run.reuses:
        return shape_only(shape, kept.dtype)
    if run is None or not run.tracing:
        return kept.new_zeros(()).expand(shape)
    zero = kept.new_zeros((), requires_grad=kept.is_floating_point())
    run.values.setdefault(READ, []).append((path, zero))
    return zero.expand(shape)


def _bare_copy(module: nn.Module) -> nn.Module:
    """Return a copy with the buffers of a module, but without its parameters, submodules and hooks."""
    new = copy.copy(module)
    state = vars(new)
    for name, value in list(state.items()):
        if name in _PARTS_AND_HOOKS:
            # A new dictionary: the model's own must not change.
            state[name] = type(value)()
    # With this mark, the library would not install its hooks on the new blocks.
    state.pop("_output_capturing_hooks_installed", None)
    new._buffers.update(module._buffers)
    return new
