"""The undivided model: one process, one pass over the whole batch. What every plan must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.model import Model, Module, Part, empty_output
from pipeloom.spec import Batch


def run_undivided(model: Model, batch: Batch, samples: Sequence[Any], *, backward: bool = True) -> float:
    """Run the whole batch through the whole model, without pipeline, packing or sub-microbatches.

    Parameters
    ----------
    model : Model
    batch : Batch
        Metadata of ``samples``, in the same order.
    samples : sequence
    backward : bool
        Add the gradients of the mean loss to ``.grad`` of the parameters. Those of frozen modules are marked
        as needing none.

    Returns
    -------
    float
        The loss: sum over all targets, divided by their number.
    """
    normaliser = float(sum(model.num_targets(sample) for sample in samples))
    if not normaliser > 0:
        raise InputError("samples", f"have {normaliser} targets", "give at least one")
    for module in model.modules:
        if module.frozen:
            for layer in module.layers:
                layer.requires_grad_(False)
    outputs: dict[str, Tensor] = {}
    part: Part | None = None
    with torch.set_grad_enabled(backward):
        for module in model.modules:
            part = _whole(module, batch, samples)
            outputs[module.name] = _forward(module, part, outputs)
        assert part is not None
        loss = model.loss(outputs[model.modules[-1].name], part) / normaliser
    if backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _whole(module: Module, batch: Batch, samples: Sequence[Any]) -> Part:
    return Part(
        tuple(samples),
        tuple(
            (position, index)
            for position, sample in enumerate(batch.samples)
            for index in range(len(module.spec.instance_lengths(sample)))
        ),
    )


def _forward(module: Module, part: Part, outputs: dict[str, Tensor]) -> Tensor:
    if not part.instances:
        return empty_output(module.spec, torch.device("cpu"))
    context = {} if module.context is None else module.context(part)
    given: Any = () if module.inputs is None else module.inputs(part)
    inputs = given if isinstance(given, tuple) else (given,)
    x: Tensor = module.layers[0](*inputs, *(outputs[source] for source in module.after), **context)
    for layer in module.layers[1:]:
        x = layer(x, **context)
    return x
