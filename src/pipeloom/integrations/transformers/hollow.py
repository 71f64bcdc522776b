"""A library's model with holes in it: its own forward runs, but only some of its parts are there."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import PipeloomError

_PARTS_AND_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Play = Callable[["Probe", Tensor, Arguments], Tensor]


class Reached(Exception):
    """A forward has come to the block that it was to come to: no error, it is left in the middle."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


@dataclass(frozen=True)
class Running:
    """What happens at the holes while a hollow model runs."""

    play: Play
    """Called for a block, with what stands for it, its input and its further arguments; gives what the block gives."""
    filling: Tensor | None = None
    """What parts give that stand before the blocks."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the packed sequences; None: masks are of no interest."""
    values: dict[str, Any] = field(default_factory=dict)
    """What parts give that are `Given`, and what `note` has noted, by name."""


class _Here(threading.local):
    running: Running | None = None


_here = _Here()


def running() -> Running | None:
    """Return what happens at the holes of the hollow model that runs in this thread; None: none runs."""
    return _here.running


@contextmanager
def run_with(now: Running) -> Iterator[None]:
    """Run hollow models so inside the block; others run as ever."""
    before, _here.running = _here.running, now
    try:
        yield
    finally:
        _here.running = before


def _now() -> Running:
    if _here.running is None:
        raise PipeloomError("a model with holes was called outside of its layers")
    return _here.running


class Probe(nn.Module):
    """Stands for a block. Also made a subclass of the block's class, by which the library finds blocks."""

    tower: str
    place: int
    extras: int
    """How many things the block gives beside its state."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the running model is to do at this block."""
        state, *others = args or (kwargs.pop("hidden_states"),)
        output = _now().play(self, state, (tuple(others), kwargs))
        return (output, *[None] * self.extras) if self.extras else output


class Filler(nn.Module):
    """Stands for a part before the blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give the filling, whatever is asked."""
        del args, kwargs
        return _now().filling


class EmbeddingFiller(nn.Module):
    """Stands for an embedding of positions: zeros, a number for each."""

    def forward(self, places: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Give zeros that take no memory."""
        del args, kwargs
        filling = _now().filling
        assert filling is not None
        return filling.new_zeros(()).expand(*places.shape, 1)


class ConvolutionFiller(nn.Module):
    """Stands for a convolution of images into patches: nothing, of the shape that it would have."""

    def __init__(self, convolution: nn.Module, width: int | None = None) -> None:
        super().__init__()
        given: Any = convolution
        self.width = width or given.out_channels
        padding = (0,) * len(given.stride) if given.padding == "valid" else given.padding
        self.sizes = tuple(zip(given.kernel_size, given.stride, padding, strict=True))
        # The library asks for its dtype.
        self.register_buffer("weight", given.weight.detach().new_empty(0, device="cpu"), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Give zeros that take no memory."""
        sides = [
            (side + 2 * padding - kernel) // stride + 1
            for side, (kernel, stride, padding) in zip(pixels.shape[2:], self.sizes, strict=True)
        ]
        return pixels.new_zeros(()).expand(len(pixels), self.width, *sides)


class Gap(nn.Module):
    """Stands for a part that is not to be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        del args, kwargs
        raise PipeloomError("the library's forward calls a part that lies in another layer")


class Given(nn.Module):
    """Stands for a part: gives values of the running model, one or, of several names, a tuple."""

    def __init__(self, names: str | tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give them; None where there are none."""
        del args, kwargs
        values = _now().values
        if isinstance(self.names, str):
            return values.get(self.names)
        return tuple(values.get(name) for name in self.names)


def note(part: nn.Module, names: tuple[str, ...]) -> None:
    """Have what a part gives noted as values of the running model."""
    part.register_forward_hook(partial(_note, names))


def _note(names: tuple[str, ...], part: nn.Module, given: Any, output: tuple[Any, ...]) -> None:
    del part, given
    _now().values.update(zip(names, output, strict=True))


def probes(tower: str, blocks: Sequence[nn.Module], extras: int = 0) -> nn.ModuleList:
    """Return a probe for every block of a tower, with the block's own plain attributes."""
    classes: dict[type, type] = {}
    out = nn.ModuleList()
    for place, block in enumerate(blocks):
        kind = type(block)
        if kind not in classes:
            classes[kind] = type(f"{kind.__name__}Probe", (Probe, kind), {"forward": Probe.forward, "__doc__": ""})
        probe: Any = object.__new__(classes[kind])
        nn.Module.__init__(probe)
        for name, value in vars(block).items():
            if not name.startswith("_") and not hasattr(nn.Module, name):
                setattr(probe, name, value)
        probe.tower, probe.place, probe.extras = tower, place, extras
        out.append(probe)
    return out


def hollow(model: nn.Module, keep: Sequence[str], swap: Mapping[str, nn.Module]) -> nn.Module:
    """Return a view on a model that has only some of its parts, which it shares.

    Parameters
    ----------
    model : torch.nn.Module
    keep : sequence of str
        Paths of modules or parameters that stay; of what has no parameters there is a copy.
    swap : mapping
        From the path of a module to what stands in its place.
    """
    return _hollow(model, "", tuple(keep), swap)


def _hollow(module: nn.Module, path: str, keep: tuple[str, ...], swap: Mapping[str, nn.Module]) -> nn.Module:
    new = copy.copy(module)
    state = vars(new)
    for name, value in list(state.items()):
        if name in _PARTS_AND_HOOKS:
            # Its own; those of the model stay as they are.
            state[name] = type(value)()
    # The library's mark that its hooks are on the blocks.
    state.pop("_output_capturing_hooks_installed", None)
    new._buffers.update(module._buffers)
    new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, parameter in module._parameters.items():
        new._parameters[name] = parameter if path + name in keep else None
    wanted = [*keep, *swap]
    for name, child in module._modules.items():
        here = path + name
        if child is None or here in keep:
            new._modules[name] = child
        elif here in swap:
            new._modules[name] = swap[here]
        elif any(each.startswith(here + ".") for each in wanted):
            new._modules[name] = _hollow(child, here + ".", keep, swap)
        elif any(True for _ in child.parameters()):
            new._modules[name] = Gap()
        else:
            # Each its own: a layer may be moved to another device.
            new._modules[name] = copy.deepcopy(child)
    return new
