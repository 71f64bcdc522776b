"""The undivided model: one process, one pass over the whole batch. Every plan must agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.data.dataset import count_targets, load_part
from pipeloom.runtime.model.model import Emit, Model, Module, Part, check_emitted, empty_output, upstream_rows
from pipeloom.runtime.model.reduce import zero_missing
from pipeloom.runtime.model.weights import give_weights_to
from pipeloom.spec import Batch, TensorShape
from pipeloom.spec.model import num_instances


def run_undivided(model: Model, batch: Batch, samples: Sequence[Any], *, backward: bool = True) -> float:
    """Run the whole batch through the whole model, without pipeline, packing or sub-microbatches.

    Parameters
    ----------
    model : Model
        The model. Layers on ``meta`` get their weights.
    batch : Batch
        Metadata of ``samples`` in the same order.
    samples : sequence
        The user's samples of the batch.
    backward : bool
        Whether to add the gradients of the mean loss to ``.grad`` of the parameters, with zeros for a module
        without work in the batch. Parameters of frozen modules are set to need none.

    Returns
    -------
    float
        The loss: sum over all targets, divided by their number.
    """
    model.check_declared()
    give_weights_to(model, None)
    normalizer = count_targets(model, samples)
    if not normalizer > 0:
        raise InputError("samples", f"have {normalizer} {model.targets}", "give at least one")
    for module in model.modules:
        if module.frozen:
            for layer in module.layers:
                layer.requires_grad_(False)
    outputs: dict[str, Tensor] = {}
    streams = StreamsOf(model, batch)
    part: Part | None = None
    with torch.set_grad_enabled(backward):
        for module in model.modules:
            part = whole_part(module, batch, samples)
            upstream = [rows_of(outputs[name], model.module(name), module, batch, part) for name in module.after]
            outputs[module.name] = _forward(module, part, upstream, streams)
        assert part is not None
        losses = streams.losses
        if part.instances:
            losses.append(model.loss(outputs[model.modules[-1].name], part))
        if not losses:
            # Without work for the last module, only other layers may emit a loss.
            return 0.0
        loss = sum(losses[1:], losses[0]) / normalizer
    if backward and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        for module in model.modules:
            if not module.frozen:
                zero_missing(module.layers)
    return float(loss.detach())


def whole_part(module: Module, batch: Batch, samples: Sequence[Any]) -> Part:
    """Return the loaded part of a module for a whole batch."""
    instances = tuple(
        (position, index)
        for position, sample in enumerate(batch.samples)
        for index in range(num_instances(module.reads, sample))
    )
    return load_part(Part(tuple(samples), instances, batch.iteration), module.name)


def rows_of(
    output: Tensor, source: Module, module: Module, batch: Batch, part: Part, shape: TensorShape | None = None
) -> Tensor:
    """Return the rows of another module's output, or of a stream, that a module takes."""
    first, count = upstream_rows(source.spec, module.spec, batch.samples, 0, len(part.instances), shape)
    return output.narrow(0, first, count)


class StreamsOf:
    """Streams and losses that layers have emitted so far."""

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.ends = {end.stream: (module, end) for module in model.modules for end in module.spec.emits}
        self.found: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []

    def taken(self, module: Module, layer: int, part: Part) -> dict[str, Tensor]:
        """Return the streams with which a layer is called."""
        streams = {}
        for taken in module.spec.takes:
            if taken.layer != layer:
                continue
            source, end = self.ends[taken.stream]
            tensor = self.found.get(end.stream)
            if tensor is None:
                tensor = empty_output(end.output, torch.device("cpu"))
            elif source is not module:
                tensor = rows_of(tensor, source, module, self.batch, part, end.output)
            streams[end.stream] = tensor
        return streams

    def take_emitted(self, module: Module, layer: int, result: Tensor | Emit) -> Tensor:
        """Store what a layer emits, and return its output."""
        check_emitted(module, layer, result.streams if isinstance(result, Emit) else ())
        if not isinstance(result, Emit):
            return result
        self.found |= result.streams
        if result.loss is not None:
            self.losses.append(result.loss)
        return result.output


def _forward(module: Module, part: Part, upstream: Sequence[Tensor], streams: StreamsOf) -> Tensor:
    if not part.instances:
        return empty_output(module.spec.layers[-1].output, torch.device("cpu"))
    context = {} if module.context is None else module.context(part)
    inputs: Any = () if module.inputs is None else module.inputs(part)
    arguments = (*(inputs if isinstance(inputs, tuple) else (inputs,)), *upstream)
    for number, layer in enumerate(module.layers):
        x = streams.take_emitted(module, number, layer(*arguments, **context, **streams.taken(module, number, part)))
        arguments = (x,)
    return x
