"""Extents and sizes of a microbatch's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pipeloom.integrations.steps.shapes import Signature


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested inputs, in order."""
    # Called for every microbatch of every step; PyTorch's traversal takes many times longer.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return extents and item sizes of the tensors of one microbatch's inputs."""
    numbers: list[int] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
            numbers += tensor.shape
            numbers.append(tensor.dtype.itemsize)
    return tuple(numbers)


def default_size(*args: Any, **kwargs: Any) -> int:
    """Return the number of elements of the first tensor; of floats, without the last dimension, which is width."""
    first = args[0] if args else None
    tensor = first if isinstance(first, Tensor) else next(_tensors((args, kwargs)), None)
    if tensor is None:
        return 1
    size = tensor.numel()
    if tensor.is_floating_point() and tensor.dim() > 1:
        size //= max(1, tensor.shape[-1])
    return max(1, size)
