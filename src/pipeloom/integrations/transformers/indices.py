"""Let a library's forward pass compute indices on the host, while its states are on a device.

Libraries compute positions, masks and windows from sizes of images and from tokens, and read numbers out of them. On a
device, each such read makes the host wait until all earlier work is done. Here these inputs stay on the host. What is
computed from them is copied to the device where a function also takes a tensor of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.runtime.launch.device import moved

_SHAPED: dict[Any, Callable[..., Any]] = {
    Tensor.expand_as: Tensor.expand,
    Tensor.view_as: Tensor.view,
    Tensor.reshape_as: Tensor.reshape,
}


def indices_on_host(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which functions take tensors of the host and of a device. On the CPU, it does nothing."""
    return nullcontext() if device.type == "cpu" else _Indices(device)


class _Indices(TorchFunctionMode):
    """Moves arguments before autograd sees them, because backwards take them again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and not _is_host(kwargs.get("device")):
            return self._sent(function(*args, **{**kwargs, "device": "cpu"}))
        if function is Tensor.to and _is_on_host(args[0]):
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if not _is_host(device):
                return self._sent(args[0] if dtype is None else args[0].to(dtype))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if all(map(_is_on_host, tensors)) or not any(map(_is_on_host, tensors)):
            return function(*args, **kwargs)
        if function in _SHAPED and _is_on_host(args[0]):
            # Only the shape of the other tensor counts.
            return _SHAPED[function](args[0], args[1].shape)
        if _writes(function) and _is_on_host(args[0]):
            args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
            return function(*args, **kwargs)
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            place, repeated = _without_mask(args[1])
            if repeated and function is Tensor.__getitem__:
                return function(*tree_map_only(Tensor, self._taken, (args[0], place))).flatten(0, repeated)
            if not repeated or not isinstance(args[2], Tensor):
                args = (args[0], place, *args[2:])
        args, kwargs = tree_map_only(Tensor, self._taken, (args, kwargs))
        return function(*args, **kwargs)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return a tensor that the library moves to the device. Indices stay on the host until they are needed."""
        return self._taken(tensor) if tensor.is_floating_point() else tensor

    def _taken(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device. Repeated values are copied once."""
        if not _is_on_host(tensor) or not tensor.dim():
            # Functions accept single numbers of the host.
            return tensor
        once = tensor
        for axis, step in enumerate(tensor.stride()):
            if step == 0 and tensor.shape[axis] > 1:
                once = once.narrow(axis, 0, 1)
        found: Tensor = moved(once, self._device).expand(tensor.shape)
        return found


def _without_mask(place: Any) -> tuple[Any, int]:
    """Return an index with the places that a mask marks in its stead, and the number of its repeated axes.

    The device would count the places first, and the host would wait for the number.
    """
    mask, *others = place if isinstance(place, tuple) else (place,)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not _is_on_host(mask) or not mask.dim():
        return place, 0
    if any(not isinstance(each, slice) or each != slice(None) for each in others):
        return place, 0
    repeated = 0
    while mask.dim() > 1 and mask.stride(-1) == 0:
        mask, repeated = mask.select(-1, 0), repeated + 1
    return mask.nonzero(as_tuple=True), repeated


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _writes(function: Callable[..., Any]) -> bool:
    """Return whether a function writes its first argument."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")
