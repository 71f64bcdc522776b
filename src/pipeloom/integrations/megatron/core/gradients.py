"""When gradients are summed over data-parallel ranks: in the last backward of a chunk, or after it in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.integrations.megatron.core.call import each_chunk


class GradientSync:
    """Switches the reduction of gradients off, except in the last backward of each chunk, as Megatron does.

    Megatron launches reductions from hooks of the last backward. All data-parallel ranks must launch them in one order.
    If replicas run different plans, their chunks may end in different orders, and a split backward runs hooks in
    another order than a whole one. Unless all hooks run in the ``same_order``, reductions are then launched after the
    chunks' last backwards, from the last chunk to the first.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: Any, same_order: bool) -> None:
        self._chunks = chunks
        functions = config.no_sync_func
        self._no_sync = each_chunk(functions or nullcontext, 1)
        sync = config.grad_sync_func
        self._sync = None if sync is None else each_chunk(sync, len(chunks))
        can_launch = all(hasattr(chunk, "start_grad_sync") for chunk in chunks)
        self._by_hooks = self._sync is None and (same_order or functions is None or not can_launch)
        self._stack = ExitStack()
        self._ended: set[int] = set()
        self._next = len(chunks) - 1
        """Chunk whose reduction is launched next."""

    def off(self) -> None:
        for function in self._no_sync:
            self._stack.enter_context(function())

    def on(self) -> None:
        self._stack.close()

    @contextmanager
    def backward(self, chunk: int, is_last: bool) -> Iterator[None]:
        """Return a context for a backward of a chunk, which is given by its number on this rank."""
        if not is_last:
            yield
            return
        if self._by_hooks:
            self.on()
            yield
            self.off()
            return
        yield
        self._ended.add(chunk)
        while self._next in self._ended:
            self._launch(self._next)
            self._next -= 1

    def finish(self) -> None:
        """Launch what is left, and leave reductions switched on."""
        if not self._by_hooks:
            for chunk in range(self._next, -1, -1):
                self._launch(chunk)
        self.on()

    def _launch(self, number: int) -> None:
        self.on()
        chunk: Any = self._chunks[number]
        if self._sync is not None:
            self._sync[number](chunk.parameters())
        elif hasattr(chunk, "start_grad_sync"):
            chunk.start_grad_sync()
        self.off()


def run_hooks(chunk: nn.Module) -> None:
    """Pass gradients in ``.grad`` through the hooks that Megatron's wrapper has on its parameters.

    The second half of a split backward adds to ``.grad`` without them.
    """
    weights: list[nn.Parameter] = []
    gradients: list[Tensor] = []
    for parameter in chunk.parameters():
        if parameter.grad is not None and hasattr(parameter, "main_grad"):
            weights.append(parameter)
            gradients.append(parameter.grad)
            parameter.grad = None
    if weights:
        torch.autograd.backward(weights, gradients)
