"""Memory and weights for layers on ``meta``. Each rank creates only those of its own chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime.model.model import Model, saved_tensors
from pipeloom.spec import Layout


def give_weights(
    model: Model, layout: Layout, rank: int, device: torch.device | str = "cpu", *, fill: bool = True
) -> bool:
    """Create memory on a device and load weights for the layers of a rank's chunks that are on ``meta``.

    Call it before anything divides the layers and before the optimizer is made. ``model.pretrained`` loads the weights.
    Without ``fill``, the memory stays uninitialized, because a checkpoint will be loaded. Returns whether any layer was
    on ``meta``.

    Raises `InputError` if the model has no ``pretrained``, or the weights cannot be read.
    """
    return give_weights_to(model, layers_of_rank(layout, rank), device, fill=fill)


def layers_of_rank(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Yield module and number of every layer on a pipeline rank."""
    for chunk in layout.chunks:
        if chunk.rank == rank:
            for number in chunk.layer_numbers:
                yield chunk.module, number


def give_weights_to(
    model: Model, places: Iterable[tuple[str, int]] | None, device: torch.device | str = "cpu", *, fill: bool = True
) -> bool:
    """Do the same as `give_weights` for some layers, each given by module and number, or for all (None)."""
    tensors = give_memory(model, places, device)
    if tensors and fill:
        if model.pretrained is None:
            raise InputError(
                f"parameter {next(iter(tensors))!r}",
                "is on meta, and the model has no source of weights",
                "build the model with weights, or give Model.pretrained",
            )
        model.pretrained.fill(tensors)
    return bool(tensors)


def give_memory(
    model: Model, places: Iterable[tuple[str, int]] | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Create uninitialized memory for layers on ``meta``, each given by module and number, or for all (None).

    Tied parameters stay tied. Returns the tensors to fill by name: parameters and persistent buffers of the layers.
    """
    if places is None:
        places = [(module.name, number) for module in model.modules for number in range(len(module.layers))]
    layers = {place: model.module(place[0]).layers[place[1]] for place in dict.fromkeys(places)}
    empty = {place: layer for place, layer in layers.items() if any(p.is_meta for p in layer.parameters())}
    parameters = _tied_with_memory(model)
    for layer in empty.values():
        _replace(layer, parameters, device)
    if empty and model.tied:
        # Tied parameters stay tied, also in layers of other ranks.
        for module in model.modules:
            for layer in module.layers:
                _replace(layer, parameters, None)
    filled: dict[str, Tensor] = {}
    for (name, number), layer in empty.items():
        filled |= saved_tensors(layer, f"{name}.{number}")
    return filled


def _tied_with_memory(model: Model) -> dict[int, nn.Parameter]:
    """Return, by id of each parameter on ``meta``, the parameter with memory that it is tied to."""
    with_memory: dict[int, nn.Parameter] = {}
    for names in model.tied:
        parameters = [model.parameter(name) for name in names]
        real = next((p for p in parameters if not p.is_meta), None)
        if real is not None:
            with_memory |= {id(p): real for p in parameters if p.is_meta}
    return with_memory


def _replace(layer: nn.Module, parameters: dict[int, nn.Parameter], device: torch.device | str | None) -> None:
    """Replace parameters on ``meta`` by ones with memory. Without a device, only by those that exist already."""
    for part in layer.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in parameters and device is not None:
                parameters[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device), parameter.requires_grad
                )
            if id(parameter) in parameters:
                setattr(part, name, parameters[id(parameter)])
        for name, buffer in list(part.named_buffers(recurse=False)):
            if not buffer.is_meta or device is None:
                continue
            if name in part._non_persistent_buffers_set:
                where = f"buffer {name!r} of a {type(part).__name__}"
                raise InputError(where, "is on meta, and no file contains it", "compute it on the CPU")
            part.register_buffer(name, torch.empty_like(buffer, device=device))
