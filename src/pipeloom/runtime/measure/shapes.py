"""Shapes and dtypes that a model does not declare, found by running its layers on a few samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime.launch.device import moved
from pipeloom.runtime.measure.reference import StreamsOf, rows_of, whole_part
from pipeloom.runtime.model.model import Emit, Model, Module, Shape, dtype_name, user_arguments, user_code
from pipeloom.runtime.model.random_state import RandomState
from pipeloom.spec import DTYPE_BYTES, Batch, ModelSpec, Sample, TensorShape, Workload
from pipeloom.spec.model import Dimension, num_instances

_MOST_TOKENS_A_ROW = 64
_MOST_SAMPLES = 3
"""Largest number of samples per module in the second trial."""


def find_shapes(
    model: Model,
    samples: Sequence[Any],
    metadata: Sequence[Sample],
    *,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
) -> Model:
    """Find undeclared shapes and dtypes of layer outputs and streams.

    Layers run on two trial parts, the second larger than the first. An extent that is the same in both is a number, any
    other one is ``"tokens"``, ``"instances"`` or a fraction of the tokens. Every layer then has its own shape, which
    training checks.

    Parameters
    ----------
    model : Model
        The model. Declared shapes stay. It is returned unchanged if all are declared.
    samples : sequence
        The user's samples. Every module must have work in some of them.
    metadata : sequence of Sample
        Sizes of ``samples``.
    device : torch.device or str
        Device on which layers run, one at a time.
    autocast : torch.dtype or None
        Precision of autocast regions in training, which determines dtypes.

    Raises
    ------
    InputError
        An extent does not follow from known sizes. The error names module, layer and extents.
    """
    if not model.undeclared:
        return model
    trials = [_Trial([samples[i] for i in chosen], _batch(metadata, chosen)) for chosen in _choose(model, metadata)]
    before = RandomState.now(torch.device(device))
    modules = list(model.modules)
    for number, module in enumerate(model.modules):
        so_far = replace(model, modules=tuple(modules))
        rows = [trial.run(so_far, module, torch.device(device), autocast) for trial in trials]
        modules[number] = _with_found_shapes(module, rows, module is model.modules[-1])
    before.set(torch.device(device))
    return replace(model, modules=tuple(modules))


def with_shapes(model: Model, spec: ModelSpec) -> Model:
    """Return the model with undeclared shapes from a spec that was made of it."""
    if not model.undeclared:
        return model
    modules = []
    for module, known in zip(model.modules, spec.modules, strict=True):
        layers = known.flat_layers
        emits: dict[int, dict[str, Shape | None]] = {}
        for end in known.emits:
            emits.setdefault(end.layer, {})[end.stream] = end.output
        hidden = [layer.output for layer in layers[:-1]]
        modules.append(replace(module, hidden=hidden, output=layers[-1].output, emits=emits))
    return replace(model, modules=tuple(modules))


@dataclass(frozen=True, slots=True)
class _Observed:
    """Shape and dtype of one tensor in one trial."""

    workload: Workload
    tensor: tuple[tuple[int, ...], torch.dtype]


_Row = tuple[list[_Observed], dict[str, _Observed]]
"""Outputs of all layers, and streams."""


class _Trial:
    """Samples on which modules run one after the other."""

    def __init__(self, samples: Sequence[Any], batch: Batch) -> None:
        self.samples, self.batch = samples, batch
        self.outputs: dict[str, Tensor] = {}
        self.found: dict[str, Tensor] = {}
        """Streams that earlier modules have emitted."""

    def run(self, model: Model, module: Module, device: torch.device, autocast: torch.dtype | None) -> _Row:
        """Run one module. The shapes of earlier ones are known."""
        streams = StreamsOf(model, self.batch)
        streams.found = self.found
        part = whole_part(module, self.batch, self.samples)
        workload = Workload(tuple(n for sample in self.batch.samples for n in module.spec.instance_lengths(sample)))
        where = f"module {module.name!r}"
        inputs, context = user_arguments(module, part)
        upstream = [rows_of(self.outputs[name], model.module(name), module, self.batch, part) for name in module.after]
        arguments = (*inputs, *upstream)
        outputs, emitted = [], {}
        for number, layer in enumerate(module.layers):
            taken = streams.taken(module, number, part)
            there, on_device = moved((arguments, {**context, **taken}), device)
            result = _run(layer, there, on_device, f"{where}.layers[{number}]", autocast)
            for name, tensor in result.streams.items() if isinstance(result, Emit) else ():
                emitted[name] = _Observed(workload, (tuple(tensor.shape), tensor.dtype))
            output: Any = streams.take_emitted(module, number, result)
            if isinstance(output, Tensor):
                outputs.append(_Observed(workload, (tuple(output.shape), output.dtype)))
            elif module is not model.modules[-1] or number < len(module.layers) - 1:
                raise InputError(f"{where}.layers[{number}]", f"returned a {type(output).__name__}", "return a tensor")
            arguments = (output,)
        self.outputs[module.name] = output
        return outputs, emitted


def _run(
    layer: nn.Module, arguments: tuple[Any, ...], context: dict[str, Any], where: str, autocast: torch.dtype | None
) -> Any:
    device = next((x.device for x in arguments if isinstance(x, Tensor)), torch.device("cpu"))
    layer.to(device)
    region = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    with torch.no_grad(), region, user_code(where):
        result = layer(*arguments, **context)
    if device.type != "cpu":
        layer.to("cpu")
    return result


def _batch(metadata: Sequence[Sample], chosen: Sequence[int]) -> Batch:
    # Ids may recur in several batches.
    return Batch(tuple(msgspec.structs.replace(metadata[i], id=str(i)) for i in chosen))


def _choose(model: Model, metadata: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Return the samples of the two trials: the smallest one with work for each module, and some more of each."""
    first: set[int] = set()
    more: set[int] = set()
    for module in model.modules:
        busy = [i for i, sample in enumerate(metadata) if num_instances(module.reads, sample)]
        busy.sort(key=lambda i: (metadata[i].sequence_tokens, i))
        if not busy:
            raise InputError(
                f"module {module.name!r}",
                f"has no work in the {len(metadata)} samples for finding shapes",
                "declare its `hidden` and `output`, or start with samples that have work for it",
            )
        first.add(busy[0])
        more.update(busy[:_MOST_SAMPLES])
    return sorted(first), sorted(more)


def _with_found_shapes(module: Module, rows: Sequence[_Row], with_loss: bool) -> Module:
    """Return the module with the found shapes where none is declared. An output for the loss alone may be anything."""
    last = len(module.layers) - 1
    shapes = [
        _shape(f"module {module.name!r}, layer {number}", [outputs[number] for outputs, _ in rows])
        for number in range(last if with_loss else last + 1)
    ]
    if with_loss:
        ends = [outputs[last] for outputs, _ in rows if len(outputs) > last]
        try:
            shapes.append(_shape("", ends))
        except (InputError, IndexError):
            shapes.append(TensorShape(("tokens",)))
    emits: dict[int, dict[str, Shape | None]] = {}
    for layer, streams in module.emits.items():
        for name, shape in streams.items():
            where = f"module {module.name!r}.emits[{layer}], {name!r}"
            emits.setdefault(layer, {})[name] = shape or _shape(where, [emitted[name] for _, emitted in rows])
    return replace(
        module,
        hidden=shapes[:-1] if module.hidden is None else module.hidden,
        output=shapes[-1] if module.output is None else module.output,
        emits=emits,
    )


def _shape(where: str, found: Sequence[_Observed]) -> TensorShape:
    """Return the shape that a tensor has in all trials."""
    shapes = [each.tensor[0] for each in found]
    dtype = dtype_name(found[0].tensor[1])
    if len({len(shape) for shape in shapes}) > 1:
        raise InputError(where, f"has shapes {' and '.join(map(str, shapes))}", "give each part as many dimensions")
    if dtype not in DTYPE_BYTES:
        raise InputError(where, f"is of {dtype}", f"one of {', '.join(sorted(DTYPE_BYTES))} is supported")
    dims: list[Dimension] = []
    for place, extents in enumerate(zip(*shapes, strict=True)):
        workloads = [each.workload for each in found]
        alike = len(set(extents)) == 1
        # If both trials are the same for this module, rows grow and other extents do not.
        grows = not alike or (place == 0 and len(set(workloads)) == 1)
        symbol = _symbol(extents, workloads) if grows else None
        if symbol is None and not alike:
            described = " and ".join(
                f"{n} for lengths {list(w.lengths)}" for n, w in zip(extents, workloads, strict=True)
            )
            raise InputError(
                where,
                f"dimension {place} is {described}",
                "declare its shape, or correct the sizes in the samples' metadata",
            )
        dims.append(extents[0] if symbol is None else symbol)
    return TensorShape(tuple(dims), dtype)


def _symbol(extents: Sequence[int], workloads: Sequence[Workload]) -> str | None:
    """Return the symbolic extent that agrees with all trials."""
    words = ["tokens", "instances", *(f"tokens/{n}" for n in range(2, _MOST_TOKENS_A_ROW + 1))]
    for word in words:
        shape = TensorShape((word,))
        if all(shape.resolve(work) == (extent,) for work, extent in zip(workloads, extents, strict=True)):
            return word
    return None
