"""Basic modules: linear layers, norms, and compositions of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeloom.emulator import operators as ops
from pipeloom.emulator.size import INSTANCES
from pipeloom.emulator.tape import Tensor
from pipeloom.spec import architecture
from pipeloom.spec.architecture import ActivationStep, AverageStep, JoinStep, NormStep, VectorsStep


class Module(Protocol):
    """Interface of everything that maps one symbolic tensor to another."""

    def __call__(self, x: Tensor) -> Tensor:
        """Record the module's operators and return its output, of the input's shape unless the module says
        otherwise.
        """


@dataclass(frozen=True)
class Linear:
    """A linear layer that every device holds whole."""

    in_width: int
    out_width: int
    bias: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows of ``in_width`` to rows of ``out_width``."""
        return ops.linear(x, self.in_width, self.out_width, bias=self.bias)


class Norm(NormStep, frozen=True):
    """LayerNorm or RMSNorm."""

    kind: architecture.Norm = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.kind)


@dataclass(frozen=True)
class Sequential:
    """Modules in sequence."""

    parts: tuple[Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Call each on the result of the one before."""
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True)
class Residual:
    """``x + mixer(norm(x))``, the building block of transformers."""

    mixer: Module
    norm: architecture.Norm = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        y = self.mixer(ops.norm(x, self.norm))
        return x + (ops.dropout(y) if x.context.dropout else y)


@dataclass(frozen=True)
class Scaled:
    """A module whose output columns are multiplied by learned factors."""

    body: Module

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the module's output."""
        return ops.scale(self.body(x))


class Join(JoinStep, frozen=True):
    """Join ``factor`` rows into one of ``factor`` times the width."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return rows over ``factor``."""
        return ops.regroup(x, self.factor)


class Average(AverageStep, frozen=True):
    """Average groups of ``factor`` rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return rows over ``factor``."""
        return ops.average(x, self.factor)


class Activation(ActivationStep, frozen=True):
    """Elementwise function."""

    def __call__(self, x: Tensor) -> Tensor:
        return ops.activation(x)


class Vectors(VectorsStep, frozen=True):
    """``count`` learned vectors of the width. Only their weights count."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same tensor."""
        x.tape.parameter(self.count * x.width)
        return x


@dataclass(frozen=True)
class Emitting:
    """A module that emits its output's features as a stream, after ``tap``."""

    body: Module
    tap: Module

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the module's output."""
        y = self.body(x)
        return ops.hand_on(y, self.tap(y))


@dataclass(frozen=True)
class Taking:
    """A module to whose output a stream of its width is added."""

    body: Module

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the module's output."""
        y = self.body(x)
        return y + x.tape.input(y.width, y.rows, needs_gradient=y.needs_gradient)


@dataclass(frozen=True)
class Modulated:
    """``x + gate * mixer(modulate(norm(x)))`` of diffusion transformers (adaLN).

    Shift, scale and gate are one vector per instance each. With ``projection``, the block computes them from the
    condition with its own linear layer. Otherwise it only holds a table that is added to one shared by all blocks, as
    in adaLN-single.
    """

    mixer: Module
    norm: architecture.Norm = "layer"
    projection: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        width = int(x.width)
        condition = x.tape.input(width, INSTANCES, needs_gradient=False)
        if self.projection:
            three = ops.linear(ops.activation(condition), width, 3 * width, bias=True)
        else:
            x.tape.parameter(3 * width)
            three = x.tape.input(3 * width, INSTANCES, needs_gradient=False)
        y = self.mixer(ops.modulate(ops.norm(x, self.norm), three))
        return x + ops.modulate(y, three)
