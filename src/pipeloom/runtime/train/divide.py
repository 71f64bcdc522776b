"""Division of a rank's layers over processes: over tensor-parallel ranks by the model's function, over replicas by
FSDP2.

Copies of the layers of this rank's chunks are divided. The user's own layers give their weights to the copies during
training. Afterwards the whole weights are gathered in them again, so that the user evaluates or saves the plain model.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.runtime.launch.mesh import Mesh
from pipeloom.runtime.model.model import Model, Module, user_code
from pipeloom.runtime.model.sharding import Sharding, has_parameters, is_dtensor, shard_layer
from pipeloom.runtime.model.weights import give_weights_to, layers_of_rank
from pipeloom.spec import Layout, Parallelism


def divide_model(
    model: Model,
    layout: Layout,
    mesh: Mesh | None,
    shard: Sharding | None,
    device: torch.device | str = "cpu",
    *,
    fill: bool = True,
) -> Model:
    """Return the model that this process runs, which is the model itself if nothing is divided.

    All processes call it together, before the optimizer is made. Layers that share a parameter with another layer stay
    whole and are the user's own, like those of other ranks. Layers on ``meta`` get weights and are divided one after
    the other, so that a process never holds more than one whole layer. Undivided layers are left to `give_weights`,
    whose ``device`` and ``fill`` mean the same.

    The ``parallelize`` of a module divides its layers if the layout has tensor parallelism, except in modules with
    encoder data parallelism. ``mesh`` is None if the layout has neither replicas nor tensor parallelism. With
    ``shard``, `fully_shard` is applied to every layer over the replicas.

    Raises `InputError` if there is nothing to divide over, no module has ``parallelize``, or a parameter cannot be
    divided evenly.
    """
    check_divisible(model, layout.parallelism, shard)
    tensor = layout.parallelism.tensor
    if mesh is None or (tensor == 1 and shard is None):
        return model
    whole = layers_with_tied(model)
    own = [place for place in layers_of_rank(layout, mesh.pipeline_rank) if place not in whole]
    layers = {module.name: list(module.layers) for module in model.modules}
    for name, number in own:
        if has_parameters(layers[name][number]):
            layers[name][number] = _lend(layers[name][number])
    divided = replace(model, modules=[replace(module, layers=layers[module.name]) for module in model.modules])
    num_divided = 0
    for name, number in own:
        module = divided.module(name)
        layer = module.layers[number]
        give_weights_to(divided, [(name, number)], device, fill=fill)
        layer.to(device)
        if tensor > 1 and not layout.uses_encoder_dp(name):
            num_divided += _over_tensor_ranks(module, number, mesh)
            # `distribute_tensor` leaves reference cycles that hold the whole weights. They are young.
            gc.collect(1)
        if shard is not None and has_parameters(layer):
            shard_layer(layer, mesh, frozen=module.frozen)
    if tensor > 1 and not layout.encoder_dp_modules:
        # Other pipeline ranks may have divided some.
        total = torch.tensor(num_divided)
        dist.all_reduce(total)
        if not int(total):
            raise InputError(
                "layout.parallelism.tensor",
                f"{tensor}, but parallelize divided no parameter of any layer",
                "call parallelize_module with a plan that names submodules of the layer",
            )
    return divided


def check_divisible(model: Model, parallelism: Parallelism, shard: Sharding | None) -> None:
    """Raise `InputError` if no module has ``parallelize``, or there is only one replica to shard over.

    Called before any process is started.
    """
    if shard is not None and parallelism.data < 2:
        raise InputError(
            "shard",
            f"{shard!r} shards over replicas, and parallelism.data is {parallelism.data}",
            "set it to 2 or more, or remove shard",
        )
    if parallelism.tensor > 1 and all(module.parallelize is None for module in model.modules):
        raise InputError(
            f"model {model.name!r}",
            f"has no `parallelize` for {parallelism.tensor} tensor-parallel ranks",
            "give at least one Module parallelize=, or use no tensor parallelism",
        )


def gather_layers(model: Model, running: Model, layout: Layout, stage: int) -> None:
    """Gather the whole weights of this pipeline rank's layers in the user's own layers on the CPU.

    All processes of the pipeline rank ``stage`` call it together. ``running`` is the result of `divide_model`, which
    may be the user's model.
    """
    for module, number in layers_of_rank(layout, stage):
        own, divided = model.module(module).layers[number], running.module(module).layers[number]
        if own is divided:
            own.to("cpu")
            continue
        own.to_empty(device="cpu")
        tensors = dict(_tensors(own))
        for name, tensor in _tensors(divided):
            # Gathering is collective, so every process takes part.
            tensors[name].copy_(tensor.full_tensor() if is_dtensor(tensor) else tensor)


def _lend(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer. The layer itself moves to ``meta``."""
    copied = copy.deepcopy(layer)
    layer.to("meta")
    return copied


def _over_tensor_ranks(module: Module, number: int, mesh: Mesh) -> int:
    """Call ``parallelize`` on a layer of this rank. Returns the number of divided parameters."""
    if module.parallelize is None:
        return 0
    layer, where, over = module.layers[number], f"module {module.name!r}.layers[{number}]", mesh.device_mesh["tp"]
    names = [name for name, _ in layer.named_parameters()]
    with user_code(f"{where}: parallelize"):
        module.parallelize(layer, over)
    if [name for name, _ in layer.named_parameters()] != names:
        raise InputError(where, "has renamed parameters after parallelize", "divide them in place")
    return _check_even(layer, where, over.size())


def _check_even(layer: nn.Module, where: str, num_ranks: int) -> int:
    """Raise `InputError` for shards of unequal size. Returns the number of divided parameters."""
    from torch.distributed.tensor import Shard  # slow to import, and seldom needed

    count = 0
    for name, parameter in layer.named_parameters():
        if not is_dtensor(parameter):
            continue
        for placement in parameter.placements:
            if not isinstance(placement, Shard):
                continue
            extent = parameter.shape[placement.dim]
            if extent % num_ranks:
                raise InputError(
                    f"{where}.{name}",
                    f"has {extent} in dimension {placement.dim}, not a multiple of the {num_ranks} tensor-parallel "
                    "ranks",
                    "use a degree that divides it, or leave this parameter whole",
                )
            count += 1
    return count


def layers_with_tied(model: Model) -> set[tuple[str, int]]:
    """Return module and number of every layer that shares a parameter with another one."""
    places = (name.split(".", 2) for names in model.tied for name in names)
    return {(module, int(number)) for module, number, _ in places}


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in layer.named_parameters():
        yield name, parameter.data
    yield from layer.named_buffers()
