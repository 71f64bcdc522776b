"""Layers with sharded parameters: FSDP2 over the replicas, DTensor over the tensor-parallel ranks.

Parameters are gathered once an iteration (UNSHARD) and stay whole until their gradients are reduced (REDUCE_GRAD), for
any number of microbatches between. Replicas run different plans with different numbers of microbatches, so a collective
inside a forward or backward would not match on all of them. Between UNSHARD and REDUCE_GRAD everything is therefore as
without FSDP2, including split backward and recomputation, and only public calls are used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.launch.mesh import Mesh
from pipeloom.runtime.model.model import Model
from pipeloom.runtime.model.weights import layers_of_rank
from pipeloom.spec import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Sharding = Literal["fsdp"]
"""How replicas shard their layers."""


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor.

    DTensor is slow to import. Without an import in this process, no tensor is one.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_layers(model: Model, layout: Layout, mesh: Mesh) -> None:
    """Apply `fully_shard` to every layer of this pipeline rank's chunks over the data-parallel replicas.

    Call it after `parallelize_module` and before the optimizer is made.

    Raises
    ------
    InputError
        The layout has no replicas.
    """
    if layout.parallelism.data < 2:
        raise InputError(
            "layout.parallelism.data", f"{layout.parallelism.data} is below 2", "there is nothing to shard over"
        )
    done: set[int] = set()
    for name, number in layers_of_rank(layout, mesh.pipeline_rank):
        module = model.module(name)
        layer = module.layers[number]
        if id(layer) not in done and has_parameters(layer):
            done.add(id(layer))
            shard_layer(layer, mesh, frozen=module.frozen)


def has_parameters(layer: nn.Module) -> bool:
    """Return whether a layer has any parameters."""
    return any(True for _ in layer.parameters())


def shard_layer(layer: nn.Module, mesh: Mesh, *, frozen: bool) -> None:
    """Apply `fully_shard` to a layer over the data-parallel replicas."""
    import torch.distributed.fsdp as fsdp  # slow to import, and seldom needed

    # Torch warns of layers that return views, because its hook before a backward may be lost. Parameters are whole from
    # UNSHARD to REDUCE_GRAD here, so no such hook is needed.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    if frozen:
        layer.requires_grad_(False)
    fsdp.fully_shard(layer, mesh=mesh.device_mesh["dp"])


def sharded_modules(layers: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the modules to which `fully_shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for layer in layers:
        for module in layer.modules():
            if fsdp is not None and isinstance(module, fsdp.FSDPModule):
                yield module


def unshard(layers: Iterable[nn.Module]) -> None:
    """Begin to gather parameters, which stay whole until `reshard`. The first forward waits for them."""
    for module in sharded_modules(layers):
        module.set_requires_gradient_sync(False, recurse=False)
        module.set_reshard_after_forward(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)
        module.unshard(async_op=True)


def reshard(layers: Iterable[nn.Module]) -> None:
    """Release parameters gathered by `unshard`."""
    modules = list(sharded_modules(layers))
    _wait_for(modules)
    for module in modules:
        module.reshard()


def _wait_for(modules: Iterable[Any]) -> None:
    """Wait for gathered parameters. If a layer had no work, the next iteration would otherwise find old values."""
    for module in modules:
        module.unshard()


class GradientShare(NamedTuple):
    """Summand of this process of one parameter's gradient."""

    parameter: nn.Parameter
    """Parameter whose ``.grad`` is set: a shard if FSDP2 manages it."""
    gradient: Tensor
    """Whole over the replicas. Over tensor-parallel ranks, this process's shard."""
    sharded: bool
    """Whether each replica gets its rows of the sum rather than all of it."""


def take_shares(layers: Sequence[nn.Module]) -> list[GradientShare]:
    """Take the gradients of trained parameters out of ``.grad``, and release the whole parameters.

    A parameter without a gradient was not used in this iteration here. It contributes zeros, because others wait for
    it.
    """
    _wait_for(sharded_modules(layers))
    complete_gradients(layers)
    whole = {name: parameter for name, parameter in _named_parameters(layers) if parameter.requires_grad}
    gradients: list[Tensor] = []
    for parameter in whole.values():
        gradient = parameter.grad
        gradients.append(torch.zeros_like(local_part(parameter)) if gradient is None else local_part(gradient))
        parameter.grad = None
    reshard(layers)
    after = dict(_named_parameters(layers))
    return [
        GradientShare(after[name], gradient, sharded=after[name] is not parameter)
        for (name, parameter), gradient in zip(whole.items(), gradients, strict=True)
    ]


def _named_parameters(layers: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for number, layer in enumerate(layers):
        yield from layer.named_parameters(prefix=str(number))


def complete_gradients(layers: Iterable[nn.Module]) -> None:
    """Redistribute gradients like their parameters. Partial sums over tensor-parallel ranks are summed."""
    for layer in layers:
        for parameter in layer.parameters():
            gradient = parameter.grad
            if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def give_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    """Set or add to a parameter's gradient from its local part."""
    gradient = local
    if is_dtensor(parameter):
        gradient = dtensor_of(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return the DTensor of which this process has a local part."""
    from torch.distributed.tensor import DTensor  # slow to import, and seldom needed

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing its memory."""
    if is_dtensor(tensor):
        with torch.no_grad():
            return awaited(tensor.to_local())
    return tensor


def awaited(tensor: Tensor) -> Tensor:
    """Return a tensor without pending collectives. Operations of DTensor may return asynchronous ones."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def check_row_shards(parameter: nn.Parameter, rows: int) -> None:
    """Raise `ExecutionError` for shards that do not consist of rows over one mesh dimension."""
    if local_part(parameter).dim() == 0 or local_part(parameter).shape[0] > rows:
        raise ExecutionError(
            f"a parameter of shape {tuple(parameter.shape)} is sharded otherwise than by rows over the replicas; "
            "apply fully_shard without shard_placement_fn, on the mesh's dp dimension alone"
        )


def storage_address(tensor: Tensor) -> int:
    """Return the start of the memory of which a tensor, or this rank's part of it, is a view."""
    return local_part(awaited(tensor)).untyped_storage().data_ptr()
