"""Switch Megatron's recomputation of whole layers for single microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeloom.errors import InputError

Recompute = Callable[[int, int], int | None]
"""Returns the number of recomputed layers from the number of a stage and the size of a microbatch."""
_SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")


class Recomputing:
    """The configurations of a model chunk's transformer blocks, which say what they recompute.

    Megatron reads these settings in every forward. The backward needs them no more.
    """

    def __init__(self, chunk: nn.Module) -> None:
        configs = (getattr(each, "config", None) for each in chunk.modules())
        self._configs: list[Any] = list({id(each): each for each in configs if hasattr(each, _SETTINGS[0])}.values())

    @contextmanager
    def layers(self, count: int | None) -> Iterator[None]:
        """Return a context in which a forward has the first ``count`` layers of each block recomputed.

        None: as the configuration says.
        """
        if count is None:
            yield
            return
        kept = [(config, {name: getattr(config, name) for name in _SETTINGS}) for config in self._configs]
        for config in self._configs:
            config.recompute_granularity = "full" if count else None
            config.recompute_method, config.recompute_num_layers = ("block", count) if count else (None, None)
        try:
            yield
        finally:
            for config, settings in kept:
                for name, value in settings.items():
                    setattr(config, name, value)


def layers_to_recompute(function: Recompute | None, stage: int, size: int) -> int | None:
    """Return the number of layers that a stage recomputes for a microbatch; None: as the configuration says.

    Raises
    ------
    InputError
        When the user's function returns something else.
    """
    if function is None:
        return None
    count = function(stage, size)
    if count is None:
        return None
    if not isinstance(count, int) or count < 0:
        raise InputError(f"recompute({stage}, {size})", f"is {count!r}", "return a number of layers from 0, or None")
    return int(count)
