"""Memory and weights for layers on ``meta``: a rank gives them to those of its own chunks and to no others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime.model.model import Model, saved_tensors
from pipeloom.spec import Layout


def give_weights(
    model: Model, layout: Layout, rank: int, device: torch.device | str = "cpu", *, fill: bool = True
) -> bool:
    """Give the layers of a rank's chunks that are on ``meta`` memory and weights; others stay as they are.

    Call it before anything divides the layers, and before the optimiser is made.

    Parameters
    ----------
    model : Model
        Its ``pretrained`` says where the weights lie.
    rank : int
        The pipeline rank.
    device : torch.device or str
        Where the memory is.
    fill : bool
        False: whatever is in that memory stays, for a checkpoint is going to be read.

    Returns
    -------
    bool
        Whether anything was on ``meta``.

    Raises
    ------
    InputError
        When nothing says where the weights are, or they cannot be read.
    """
    places = [
        (chunk.module, number)
        for chunk in layout.chunks
        if chunk.rank == rank
        for number in range(chunk.layers[0], chunk.layers[1] + 1)
    ]
    return give_weights_to(model, places, device, fill=fill)


def give_weights_to(
    model: Model, places: Iterable[tuple[str, int]], device: torch.device | str = "cpu", *, fill: bool = True
) -> bool:
    """As `give_weights`, to some layers: module and number of each."""
    given = give_memory(model, places, device)
    if fill:
        _fill(model, given)
    return bool(given)


def give_all_weights(model: Model) -> None:
    """Give all layers that are on ``meta`` memory and weights, in this process, on the CPU."""
    _fill(model, give_memory(model))


def _fill(model: Model, given: dict[str, Tensor]) -> None:
    if not given:
        return
    if model.pretrained is None:
        raise InputError(
            f"parameter {next(iter(given))!r}",
            "is on meta, and nothing says where its weights are",
            "build the model with weights, or give Model.pretrained",
        )
    model.pretrained.fill(given)


def give_memory(
    model: Model, places: Iterable[tuple[str, int]] | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Give layers that are on ``meta`` memory, with anything in it. Tied parameters stay tied.

    Parameters
    ----------
    places : iterable of (str, int) or None
        Module and number of each layer; None: all layers.

    Returns
    -------
    dict
        What is to be filled, by name: parameters and saved buffers of layers that were on ``meta``.
    """
    if places is None:
        places = [(module.name, number) for module in model.modules for number in range(len(module.layers))]
    layers = {place: model.module(place[0]).layers[place[1]] for place in dict.fromkeys(places)}
    empty = {place: layer for place, layer in layers.items() if any(p.is_meta for p in layer.parameters())}
    made = _tied_with_memory(model)
    for layer in empty.values():
        _replace(layer, made, device)
    if empty and model.tied:
        # What is one stays one: also in layers that belong to other ranks.
        for module in model.modules:
            for layer in module.layers:
                _replace(layer, made, None)
    filled: dict[str, Tensor] = {}
    for (name, number), layer in empty.items():
        filled |= saved_tensors(layer, f"{name}.{number}")
    return filled


def _tied_with_memory(model: Model) -> dict[int, nn.Parameter]:
    """From parameters on ``meta`` to those with memory that they were one with."""
    found: dict[int, nn.Parameter] = {}
    for names in model.tied:
        parameters = [_parameter(model, name) for name in names]
        real = next((p for p in parameters if not p.is_meta), None)
        if real is not None:
            found |= {id(p): real for p in parameters if p.is_meta}
    return found


def _parameter(model: Model, name: str) -> nn.Parameter:
    module, layer, path = name.split(".", 2)
    found: nn.Parameter = model.module(module).layers[int(layer)].get_parameter(path)
    return found


def _replace(layer: nn.Module, made: dict[int, nn.Parameter], device: torch.device | str | None) -> None:
    """Put parameters with memory in the places of those on ``meta``; without a device those that were made already."""
    for part in layer.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made and device is not None:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            if id(parameter) in made:
                setattr(part, name, made[id(parameter)])
        for name, buffer in list(part.named_buffers(recurse=False)):
            if not buffer.is_meta or device is None:
                continue
            if name in part._non_persistent_buffers_set:
                where = f"buffer {name!r} of a {type(part).__name__}"
                raise InputError(where, "is on meta, and no file has it", "compute it on the CPU")
            part.register_buffer(name, torch.empty_like(buffer, device=device))
