"""Measure what one layer takes under every memory strategy and a split backward, done as the executor does it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.cost import StrategyMeasurement
from pipeloom.runtime.blocks import Passage
from pipeloom.runtime.live_bytes import LiveBytes
from pipeloom.runtime.workbench import Workbench

_WARM_UP = 2


def measure_strategies(
    layer: Callable[..., Tensor],
    arguments: Sequence[Any],
    context: dict[str, Any],
    parameters: Sequence[Tensor],
    saved_arguments_bytes: int,
    repeats: int,
    bench: Workbench,
) -> StrategyMeasurement:
    """Time and count one layer; gradients of its parameters and arguments are overwritten.

    Parameters
    ----------
    layer : callable
    arguments : sequence
        Of the layer; tensors that need a gradient are leaves.
    context : dict
        Keyword arguments, which all layers of the module share.
    parameters : sequence of tensors
    saved_arguments_bytes : int
        Those of the arguments that autograd saves.
    repeats : int
        Timed runs after a warm-up; the median counts.
    bench : Workbench
        On which the layer is mounted.
    """
    runs = _Runs(layer, tuple(arguments), context, parameters, bench)
    seconds = [statistics.median(column) for column in zip(*runs.times(repeats), strict=True)]
    given = sum(x.nbytes for x in (*arguments, *context.values()) if isinstance(x, Tensor))
    workspace, selective, between = runs.count()
    return StrategyMeasurement(
        input_gradient_s=seconds[0], weight_gradient_s=seconds[1], weight_gradient_bytes=between,
        selective_forward_s=seconds[2], selective_backward_s=seconds[3], selective_bytes=selective,
        offload_s=seconds[4], load_s=seconds[5], given_bytes=given,
        unsaved_bytes=max(0, given - saved_arguments_bytes), workspace_bytes=workspace,
    )  # fmt: skip


def measure_forward(
    layer: Callable[..., Tensor], arguments: Sequence[Any], context: dict[str, Any]
) -> StrategyMeasurement:
    """The same of a layer through which no gradient flows: it holds nothing, but uses some while it runs."""
    with LiveBytes() as live, torch.no_grad():
        layer(*arguments, **context)
    nothing = dict.fromkeys(StrategyMeasurement.__struct_fields__, 0)
    return StrategyMeasurement(**nothing | {"workspace_bytes": live.peak_bytes})


class _Runs:
    """One layer as a chunk of its own, run again and again."""

    def __init__(
        self,
        layer: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        context: dict[str, Any],
        parameters: Sequence[Tensor],
        bench: Workbench,
    ) -> None:
        self.layer, self.arguments, self.context, self.parameters = layer, arguments, context, parameters
        self.bench = bench
        passage, output = self.forward("keep")
        del passage
        self.gradient = torch.ones_like(output)

    def forward(self, strategy: str) -> tuple[Passage, Tensor]:
        for argument in self.arguments:
            if isinstance(argument, Tensor):
                argument.grad = None
        passage = Passage(self.bench.device, self.context, self.bench.autocast)
        return passage, passage.forward([self.layer], ((0, 1, strategy),), self.arguments, True)

    def times(self, repeats: int) -> list[tuple[float, ...]]:
        """Seconds of I, W, forward and backward under selective recomputation, moving out and back."""
        now = self.bench.now_s
        rows: list[tuple[float, ...]] = []
        for run in range(_WARM_UP + repeats):
            passage, _ = self.forward("keep")
            moments = [now()]
            passage.backward_input(self.gradient)
            moments.append(now())
            passage.backward_weight()
            moments.append(now())
            passage, _ = self.forward("selective")
            moments.append(now())
            passage.recompute()
            passage.backward(self.gradient)
            moments.append(now())
            passage, _ = self.forward("offload")
            moments.append(now())
            passage.offload()
            moments.append(now())
            passage.load()
            moments.append(now())
            passage.backward(self.gradient)
            if run >= _WARM_UP:
                spent = [after - before for before, after in itertools.pairwise(moments)]
                rows.append((spent[0], spent[1], spent[2], spent[3], spent[5], spent[6]))
        return rows

    def count(self) -> tuple[int, int, int]:
        """Bytes of the workspace, held under selective recomputation, and between I and W."""
        # Gradients that are there already are added to, as in all microbatches but the first.
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with LiveBytes() as live:
            passage, output = self.forward("keep")
            del output
            held = live.num_bytes
            workspace = live.peak_bytes - held
            live.forget_peak()
            passage.backward(self.gradient)
            workspace = max(workspace, live.peak_bytes - held)
            del passage
        with LiveBytes() as live:
            passage, output = self.forward("selective")
            del output
            selective = live.num_bytes
            passage.backward(self.gradient)
            del passage
        with LiveBytes() as live:
            passage, output = self.forward("keep")
            del output
            passage.backward_input(self.gradient)
            between = live.num_bytes
            live.forget_peak()
            passage.backward_weight()
            workspace = max(workspace, live.peak_bytes - between)
            del passage
        return workspace, selective, between
