"""The library's own loss and gradients in double precision, and the comparison with others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.samples import clean

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class GradientRow:
    """Comparison of the gradient of one parameter.

    Attributes
    ----------
    name : str
        The library's name of the parameter.
    largest : float
        Largest absolute entry of the library's gradient.
    difference : float
        Largest absolute difference.
    relative : float
        ``difference / largest``, where ``largest`` is at least a millionth of the maximum over all parameters. Some
        gradients are zero by construction, so that their computed values are rounding errors.
    """

    name: str
    largest: float
    difference: float
    relative: float


def rows_of(found: Gradients, wanted: Gradients, skip: Collection[str] = ()) -> tuple[GradientRow, ...]:
    """Compare gradients, and return the worst first. Gradients that the library does not have are ignored."""
    floor = 1e-6 * max(float(want.abs().max()) for want in wanted.values())
    rows = []
    for name, want in wanted.items():
        if name in skip:
            continue
        have = found.get(name)
        difference = want if have is None else have - want
        largest, apart = float(want.abs().max()), float(difference.abs().max())
        rows.append(GradientRow(name, largest, apart, apart / max(largest, floor, 1e-300)))
    return tuple(sorted(rows, key=lambda row: -row.relative))


class _Double(TorchFunctionMode):
    """Replaces casts to single precision by casts to double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def double() -> Iterator[None]:
    """Replace casts to single precision by casts to double precision inside the ``with`` block."""
    with _Double():
        yield


def doubled(batch: Sequence[Any]) -> list[Any]:
    """Return the samples with floating-point tensors in double precision."""
    return [{name: _as_double(value) for name, value in s.items()} if isinstance(s, Mapping) else s for s in batch]


def _as_double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_double, value))
    if not isinstance(value, (Tensor, np.ndarray)):
        return value
    tensor = torch.as_tensor(value)
    return tensor.double() if tensor.is_floating_point() else tensor


def twin(model: Any) -> Any:
    """Return a copy in double precision and evaluation mode."""
    other = copy.deepcopy(model).double().eval()
    # The other implementations support only lower precision.
    if other._can_set_experts_implementation():
        other.set_experts_implementation("eager")
    for module in other.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
    return other


def library_gradients(
    model: Any, batch: Sequence[Any], per_token: frozenset[str], count: Callable[[Any], float]
) -> tuple[float, Gradients]:
    """Return loss and gradients of the library's own forward pass, sample by sample.

    ``count`` returns the number of target tokens of a sample.
    """
    losses, total = [], 0.0
    for sample in batch:
        here = {name: value for name, value in clean(sample).items() if name != "id"}
        targets = count(sample)
        if not targets:
            continue
        total += targets
        for name, value in here.items():
            tensor = torch.as_tensor(value).to(model.device)
            if name in per_token:
                tensor = tensor.reshape(1, -1)
            here[name] = tensor.double() if tensor.is_floating_point() else tensor
        losses.append(model(**here, use_cache=False).loss * targets)
    if not total:
        raise InputError("batch", "has no targets", "give labels")
    loss = torch.stack(losses).sum() / total
    torch.autograd.backward(loss)
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
