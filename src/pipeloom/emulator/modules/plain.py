"""Modules that every model is made of: linear layers, norms, and how others are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeloom.emulator import operators as ops
from pipeloom.emulator.size import INSTANCES
from pipeloom.emulator.tape import Tensor


class Module(Protocol):
    """Anything that maps one symbolic tensor to another."""

    def __call__(self, x: Tensor) -> Tensor:
        """Record the module's operators and return its output."""
        ...


@dataclass(frozen=True)
class Linear:
    """A whole linear layer on every device."""

    in_width: int
    out_width: int
    bias: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Rows times ``in_width`` to rows times ``out_width``."""
        return ops.linear(x, self.in_width, self.out_width, bias=self.bias)


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm."""

    kind: ops.NormKind = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        return ops.norm(x, self.kind)


@dataclass(frozen=True)
class Sequential:
    """Modules one after another."""

    parts: tuple[Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Feed each the result of the one before."""
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True)
class Residual:
    """``x + mixer(norm(x))``, the building block of transformers."""

    mixer: Module
    norm: ops.NormKind = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        return x + self.mixer(ops.norm(x, self.norm))


@dataclass(frozen=True)
class Scaled:
    """What a module gives, each column times a learned factor."""

    body: Module

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape as the module's."""
        return ops.scale(self.body(x))


@dataclass(frozen=True)
class Join:
    """``factor`` rows as one of so many times the width."""

    factor: int

    def __call__(self, x: Tensor) -> Tensor:
        """Rows over ``factor``."""
        return ops.regroup(x, self.factor)


@dataclass(frozen=True)
class Average:
    """The mean of ``factor`` rows each."""

    factor: int

    def __call__(self, x: Tensor) -> Tensor:
        """Rows over ``factor``."""
        return ops.average(x, self.factor)


@dataclass(frozen=True)
class Activation:
    """Elementwise function."""

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        return ops.activation(x)


@dataclass(frozen=True)
class Vectors:
    """``count`` learned vectors of the width; only their weights count."""

    count: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        """The same tensor."""
        x.tape.parameter(self.count * x.width)
        return x


@dataclass(frozen=True)
class Emitting:
    """A module with a stream of its output's features, which go through ``tap`` and leave the layer."""

    body: Module
    tap: Module

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape as the module's."""
        y = self.body(x)
        return ops.hand_on(y, self.tap(y))


@dataclass(frozen=True)
class Taking:
    """A module to whose output a stream of its width is added."""

    body: Module

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape as the module's."""
        y = self.body(x)
        return y + x.tape.input(y.width, y.rows, needs_gradient=y.needs_gradient)


@dataclass(frozen=True)
class Modulated:
    """``x + gate * mixer(modulate(norm(x)))`` of diffusion transformers (adaLN).

    Shift, scale and gate are one vector per instance each. ``projection`` says whether the block computes
    them from the condition with a linear layer of its own; otherwise it only holds a table that is added to
    one shared by all blocks, as in adaLN-single.
    """

    mixer: Module
    norm: ops.NormKind = "layer"
    projection: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        width = int(x.width)
        condition = x.tape.input(width, INSTANCES, needs_gradient=False)
        if self.projection:
            three = ops.linear(ops.activation(condition), width, 3 * width, bias=True)
        else:
            x.tape.parameter(3 * width)
            three = x.tape.input(3 * width, INSTANCES, needs_gradient=False)
        y = self.mixer(ops.modulate(ops.norm(x, self.norm), three))
        return x + ops.modulate(y, three)
