"""The undivided model: one process, one pass over the whole batch. What every plan must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.model import Model, Module, Part, empty_output, upstream_rows
from pipeloom.runtime.reduce import zero_missing
from pipeloom.spec import Batch
from pipeloom.spec.model import num_instances


def run_undivided(model: Model, batch: Batch, samples: Sequence[Any], *, backward: bool = True) -> float:
    """Run the whole batch through the whole model, without pipeline, packing or sub-microbatches.

    Parameters
    ----------
    model : Model
    batch : Batch
        Metadata of ``samples``, in the same order.
    samples : sequence
    backward : bool
        Add the gradients of the mean loss to ``.grad`` of the parameters: zeros to a module that the batch has no
        work for. Those of frozen modules are marked as needing none.

    Returns
    -------
    float
        The loss: sum over all targets, divided by their number.
    """
    normaliser = float(sum(model.num_targets(sample) for sample in samples))
    if not normaliser > 0:
        raise InputError("samples", f"have {normaliser} {model.targets}", "give at least one")
    for module in model.modules:
        if module.frozen:
            for layer in module.layers:
                layer.requires_grad_(False)
    outputs: dict[str, Tensor] = {}
    idle: list[Module] = []
    part: Part | None = None
    with torch.set_grad_enabled(backward):
        for module in model.modules:
            part = _whole(module, batch, samples)
            given = [_rows(outputs[name], model.module(name), module, batch, part) for name in module.after]
            outputs[module.name] = _forward(module, part, given)
            if not part.instances:
                idle.append(module)
        assert part is not None
        if not part.instances:
            # Without work for the last module there is no loss.
            return 0.0
        loss = model.loss(outputs[model.modules[-1].name], part) / normaliser
    if backward:
        loss.backward()  # type: ignore[no-untyped-call]
        for module in idle:
            zero_missing(module.layers)
    return float(loss.detach())


def _whole(module: Module, batch: Batch, samples: Sequence[Any]) -> Part:
    return Part(
        tuple(samples),
        tuple(
            (position, index)
            for position, sample in enumerate(batch.samples)
            for index in range(num_instances(module.reads, sample))
        ),
    )


def _rows(output: Tensor, source: Module, module: Module, batch: Batch, part: Part) -> Tensor:
    """What the module takes of another one's output."""
    first, count = upstream_rows(source.spec, module.spec, batch.samples, 0, len(part.instances))
    return output.narrow(0, first, count)


def _forward(module: Module, part: Part, upstream: Sequence[Tensor]) -> Tensor:
    if not part.instances:
        return empty_output(module.spec, torch.device("cpu"))
    context = {} if module.context is None else module.context(part)
    given: Any = () if module.inputs is None else module.inputs(part)
    inputs = given if isinstance(given, tuple) else (given,)
    x: Tensor = module.layers[0](*inputs, *upstream, **context)
    for layer in module.layers[1:]:
        x = layer(x, **context)
    return x
