"""Describe a model: modules, kinds of layers, parameters, and operations and saved bytes as functions of a workload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeloom.emulator import module_parameters
from pipeloom.emulator.build import layer_module, single_layer
from pipeloom.emulator.program import kept_tensors
from pipeloom.emulator.rules import PRODUCTS
from pipeloom.emulator.size import ZERO, Size
from pipeloom.emulator.tape import Context, Tape
from pipeloom.spec import Workload
from pipeloom.spec.architecture import Architecture, Layer, ModuleArchitecture, TracedLayer
from pipeloom.spec.model import Reads

UNITS: dict[Reads, str] = {"sequence": "token", "text": "token", "images": "patch", "videos": "patch", "audio": "frame"}
"""What one row is, by what a module reads. A frame is 20 ms of a recording."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that are equal.

    Attributes
    ----------
    count, parameters : int
        Number of these layers, and parameters of one.
    operations : Size
        Operations of the forward of one: of products, attention and scans.
    saved : dict of str to Size
        Bytes that one keeps for its backward: with fused kernels ("fused"), those in eager PyTorch ("eager"), and with
        fused kernels and selective recomputation ("selective").
    """

    name: str
    count: int
    parameters: int
    operations: Size
    saved: dict[str, Size]


@dataclass(frozen=True)
class ModuleDescription:
    """A module: what it reads, its kinds of layers, and its streams."""

    name: str
    reads: Reads
    parameters: int
    kinds: tuple[LayerKind, ...]
    emits: tuple[str, ...]
    takes: tuple[str, ...]
    joined: int
    """Rows that become one row of the output."""


def describe(architecture: Architecture) -> tuple[ModuleDescription, ...]:
    """Return the modules of a model."""
    parameters = module_parameters(architecture)
    return tuple(
        ModuleDescription(
            module.name,
            module.reads,
            parameters[module.name],
            _kinds(module),
            tuple(end.stream for end in module.emits),
            tuple(end.stream for end in module.takes),
            module.joined,
        )
        for module in architecture.modules
    )


def _kinds(module: ModuleArchitecture) -> tuple[LayerKind, ...]:
    counts: dict[Layer, int] = {}
    for each in module.layers:
        layer, count = single_layer(each)
        counts[layer] = counts.get(layer, 0) + count
    taken: dict[str, int] = {}
    out = []
    for layer, count in counts.items():
        plain = layer.name if isinstance(layer, TracedLayer) else type(layer).__name__.removesuffix("Layer").lower()
        taken[plain] = taken.get(plain, 0) + 1
        name = plain if taken[plain] == 1 else f"{plain} ({taken[plain]})"
        out.append(_kind(name, layer, count, first=layer == module.layers[0]))
    return tuple(out)


def _kind(name: str, layer: Layer, count: int, *, first: bool) -> LayerKind:
    fused, eager = _tape(layer, Context(), first), _tape(layer, Context(eager=True), first)
    saved = {"fused": _bytes(fused, "keep"), "eager": _bytes(eager, "keep"), "selective": _bytes(fused, "selective")}
    operations = _sum(r.forward.flops for r in fused.records if r.forward.kind in PRODUCTS)
    return LayerKind(name, count, round(sum(p.total for p in fused.parameters)), operations, saved)


def _tape(layer: Layer, context: Context, first: bool) -> Tape:
    module, width = layer_module(layer)
    tape = Tape(context)
    module(tape.input(width, needs_gradient=not first))
    return tape


def _bytes(tape: Tape, strategy: Any) -> Size:
    return _sum(tensor.num_bytes for tensor in kept_tensors(tape, strategy))


def _sum(sizes: Iterable[Size]) -> Size:
    return sum(sizes, ZERO)


def document(architecture: Architecture, length: int) -> dict[str, Any]:
    """Return the description as a JSON document, with totals of one instance of ``length`` tokens or patches."""
    work = Workload((length,))
    return {
        "model": architecture.name,
        "source": architecture.source,
        "length": length,
        "parameters": sum(module_parameters(architecture).values()),
        "modules": [_module(each, work) for each in describe(architecture)],
    }


def _module(module: ModuleDescription, work: Workload) -> dict[str, Any]:
    return {
        "name": module.name,
        "reads": module.reads,
        "unit": UNITS[module.reads],
        "parameters": module.parameters,
        "rows_joined": module.joined,
        "emits": list(module.emits),
        "takes": list(module.takes),
        "kinds": [
            {
                "name": kind.name,
                "count": kind.count,
                "parameters": kind.parameters,
                "operations": _counts(kind.operations, work),
                "saved_bytes": {name: _counts(size, work) for name, size in kind.saved.items()},
            }
            for kind in module.kinds
        ],
    }


def _counts(size: Size, work: Workload) -> dict[str, Any]:
    """Return coefficients of a count, its value for the workload, and its share of one token or patch."""
    value = size.of(work)
    return {
        "constant": size.one,
        "each_instance": size.instances,
        "each_row": size.tokens,
        "each_pair": size.token_pairs,
        "each_window_pair": [[window.length, window.slides, part] for window, part in size.windowed],
        "total": value,
        "of_one_row": value / work.num_tokens,
    }
