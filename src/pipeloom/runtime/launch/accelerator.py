"""Accelerators, by the device modules of PyTorch.

``torch.cuda`` is the module of CUDA. Another accelerator registers one with the same functions
(``torch._register_device_module``), and everything here works on it, such as the simulated accelerator of the tests.
The functions do nothing on the CPU where that means the same.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

CUDA = "cuda"
"""Type of the accelerators that settings name."""


def on_accelerator(device: torch.device | str) -> bool:
    """Return whether work on a device runs beside the host."""
    return torch.device(device).type not in ("cpu", "meta")


def module_of(device: torch.device | str) -> Any:
    """Return PyTorch's module of a type of devices, such as ``torch.cuda``."""
    return torch.get_device_module(torch.device(device).type)


def count(kind: str = CUDA) -> int:
    """Return the number of accelerators of a type on this host."""
    module = module_of(kind)
    return int(module.device_count()) if module.is_available() else 0


def select(device: torch.device) -> None:
    """Make a device the current one of this thread. Threads start with the first device."""
    if on_accelerator(device):
        module_of(device).set_device(with_index(device).index)


def free_cached(device: torch.device | str) -> None:
    """Return the memory of freed tensors to the device, for other processes."""
    if on_accelerator(device):
        gc.collect()
        module_of(device).empty_cache()


def with_index(device: torch.device) -> torch.device:
    """Return the device with the index that its tensors have."""
    if on_accelerator(device) and device == torch.device(device.type):
        return torch.device(device.type, module_of(device).current_device())
    return device


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished all enqueued work."""
    if on_accelerator(device):
        module_of(device).synchronize(device)


def empty_on_host(like: Tensor) -> Tensor:
    """Return an empty tensor in host memory for copies of a tensor; pinned if that is on an accelerator."""
    return torch.empty_like(like, device="cpu", pin_memory=on_accelerator(like.device))


def tensor_on(
    storage: torch.UntypedStorage, device: torch.device, dtype: torch.dtype, where: tuple[int, Any, Any] | None = None
) -> Tensor:
    """Return a tensor in a storage: with an offset, a size and strides, or all of it in one dimension."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage) if where is None else empty.set_(storage, *where)


def pinned(tensor: Tensor) -> Tensor:
    """Return a tensor of the host in pinned memory: itself, or a copy."""
    return tensor.pin_memory()


def new_stream(device: torch.device) -> Any:
    """Return a new stream."""
    return module_of(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream into which operations are enqueued."""
    return module_of(device).current_stream(device)


def enqueued_in(stream: Any) -> AbstractContextManager[object]:
    """Return a context whose operations are enqueued in a stream."""
    context: AbstractContextManager[object] = module_of(stream.device).stream(stream)
    return context


def enqueued_beside(stream: Any | None) -> AbstractContextManager[object]:
    """Return a context whose operations run in a stream, beside all later operations of the current stream.

    They start after all earlier operations of the current stream. None: they are enqueued in the current stream.
    """
    if stream is None:
        return nullcontext()
    stream.wait_stream(current_stream(stream.device))
    return enqueued_in(stream)


def new_event(device: torch.device, *, timing: bool = False) -> Any:
    """Return a new event. With ``timing``, it has a time."""
    return module_of(device).Event(enable_timing=timing)


def mark(stream: Any | None) -> Any:
    """Return an event at the end of a stream. None, which needs no event, for the current stream (None)."""
    if stream is None:
        return None
    event = new_event(stream.device)
    event.record(stream)
    return event


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's random generator; None on the CPU."""
    if not on_accelerator(device):
        return None
    state: Tensor = module_of(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the device's random generator."""
    module_of(device).set_rng_state(state, device)


def seed(number: int, device: torch.device) -> None:
    """Seed the device's random generator."""
    if on_accelerator(device):
        with module_of(device).device(device):
            module_of(device).manual_seed(number)


def generator(device: torch.device) -> torch.Generator | None:
    """Return the device's random generator; None on the CPU."""
    return module_of(device).default_generators[device.index or 0] if on_accelerator(device) else None
