"""What all layers of the library's models share: names of parameters, and runs of hollow models up to a block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.integrations.transformers.hollow import Arguments, BlockReached, HollowRun, Probe, run_with
from pipeloom.integrations.transformers.packed import Mask


class LibraryLayer(nn.Module):
    """A layer that knows the library's names of its parameters."""

    def library_name(self, parameter: str) -> str:
        """Return the library's name of a parameter of this layer."""
        raise NotImplementedError


def stop(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
    """Leave the forward pass at the first block."""
    del probe, arguments
    raise BlockReached(state)


def run_to_block(call: Callable[[], Any], settings: HollowRun) -> Tensor:
    """Run a hollow model up to the block at which ``play`` raises `BlockReached`. Return the state there."""
    try:
        with run_with(settings):
            call()
    except BlockReached as reached:
        return reached.state
    raise AssertionError("the library's forward pass never reached a block")


def record(shell: nn.Module, call: Callable[[Any], Any], num_blocks: int, **run: Any) -> list[Arguments]:
    """Return the arguments with which the library's forward pass calls its first blocks, without running them.

    ``run`` has further settings of `HollowRun`.
    """
    found: list[Arguments] = []

    def play(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
        assert probe.place == len(found), "blocks run in another order"
        found.append(arguments)
        if len(found) == num_blocks:
            raise BlockReached(state)
        return state

    with torch.no_grad():
        run_to_block(partial(call, shell), HollowRun(play, **run))
    return found


def has_mask(arguments: Arguments | None) -> bool:
    """Return whether the arguments of a block contain the mask of packed sequences. A block left out has none."""
    args, kwargs = arguments or ((), {})
    return any(isinstance(each, Mask) for each in (*args, *kwargs.values()))
