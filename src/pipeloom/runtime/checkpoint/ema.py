"""An exponential moving average of the weights. Every rank keeps that of its own chunks, sharded like the weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeloom.runtime.model.sharding import local_part


class Averages:
    """Averages of a rank's trained parameters (`Executor.trained_parameters`), in single precision or higher.

    ``decay`` is the weight of the previous average in each update.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self._pairs = [
            (p, torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False))
            for _, p in named_parameters
        ]
        self._of = {id(parameter): average for parameter, average in self._pairs}
        self.begin()

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the average of a parameter, or None if it is not trained."""
        return self._of.get(id(parameter))

    @torch.no_grad()
    def begin(self, known: Collection[int] = ()) -> None:
        """Start with the current weights, except for averages whose ids are in ``known``."""
        for parameter, average in self._pairs:
            if id(average) not in known:
                local_part(average).copy_(local_part(parameter))

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step of the optimizer."""
        for parameter, average in self._pairs:
            local = local_part(average)
            local.lerp_(local_part(parameter).to(local.dtype), 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights by the averages within this context. It needs memory for one more copy of the weights."""
        with torch.no_grad():
            before = [local_part(parameter).clone() for parameter, _ in self._pairs]
            for parameter, average in self._pairs:
                local_part(parameter).copy_(local_part(average))
        try:
            yield
        finally:
            with torch.no_grad():
                for (parameter, _), weights in zip(self._pairs, before, strict=True):
                    local_part(parameter).copy_(weights)
