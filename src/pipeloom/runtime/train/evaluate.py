"""Evaluation of the loss between two training iterations: the same ranks run plans of forwards.

In a layout whose modules are all frozen there is no backward. Its task graphs, plans, proofs and messages contain only
forwards, and the executor runs such a plan like a frozen encoder, without autograd graphs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pipeloom.errors import ExecutionError, InfeasibleError, InputError, PipeloomError, located
from pipeloom.plan import Delivery
from pipeloom.runtime.data.batches import bound
from pipeloom.runtime.data.dataset import count_targets
from pipeloom.runtime.data.prefetch import Describe, batch_of, close_reading, next_samples
from pipeloom.runtime.data.read_ahead import batch_digest
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.result import NotFiniteError
from pipeloom.runtime.launch.coordination import BatchComparison, raise_together, scatter_plan, together
from pipeloom.runtime.model.membership import BatchLoads, Membership
from pipeloom.runtime.model.model import Model, user_code
from pipeloom.runtime.model.random_state import RandomState
from pipeloom.spec import Batch

PlanForwards = Callable[[Batch], Delivery]
"""Returns a plan of a batch's forwards for `Layout.forward_only`. Called on the first rank of each replica."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation."""

    iteration: int
    """Number of iterations trained before."""
    loss: float
    """Sum over all targets of all evaluation batches, divided by their number."""
    num_batches: int
    num_samples: int
    num_targets: float
    elapsed_s: float
    weights: str = "trained"
    """``"trained"`` or ``"ema"``."""


def forward_executor(executor: Executor, tensor_group: dist.ProcessGroup | None = None) -> Executor:
    """Return an executor of forward-only plans on the layers, device and transport of a training executor.

    ``tensor_group`` is that of `Executor`.
    """
    layers = [layer for of_chunk in executor.layers.values() for layer in of_chunk]
    trained = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    model = executor.model
    evaluator = type(executor)(
        replace(model, modules=[replace(module, frozen=True) for module in model.modules]),
        executor.layout.forward_only(),
        executor.rank,
        executor.transport,
        options=replace(executor.options, count_flops=False),
        tensor_group=tensor_group,
    )
    for parameter, needs_gradient in trained:
        parameter.requires_grad_(needs_gradient)
    return evaluator


class Evaluator:
    """Evaluates over the ranks of a training, see `Trainer`. All of them use it alike."""

    def __init__(
        self,
        executor: Executor,
        model: Model,
        membership: Membership,
        describe: Describe | None,
        loads: BatchLoads | None,
    ) -> None:
        self.executor = forward_executor(executor, membership.tensor_group)
        self.model, self.membership = model, membership
        self._describe, self._loads = describe, loads

    def run(
        self, batches: Iterable[Sequence[Any]], plan: PlanForwards, iteration: int, most: int | None = None
    ) -> EvaluationResult:
        """Evaluate on every batch, see `Trainer.evaluate`.

        Layers are in evaluation mode, and random states are restored.
        """
        begin = time.monotonic()
        layers = [layer for of_chunk in self.executor.layers.values() for layer in of_chunk]
        num_batches, num_samples, loss_sum, num_targets = 0, 0, 0.0, 0.0
        with preserve_random_state(self.executor.device), evaluating(layers):
            source = iter(bound(batches, self.model))
            try:
                while num_batches != most and (taken := self._next(source, num_batches)) is not None:
                    samples, batch = taken
                    loss_sum += self._loss_sum(samples, batch, plan)
                    with user_code("num_targets"):
                        num_targets += count_targets(self.model, samples)
                    num_batches, num_samples = num_batches + 1, num_samples + len(samples)
            finally:
                if source is not batches:
                    close_reading(source)
                self.executor.loader.close()
        if not num_targets > 0:
            problem = f"has {num_targets:g} {self.model.targets} in {num_batches} batches"
            raise InputError("the evaluation", problem, "give evaluation batches with at least one")
        total = torch.tensor(loss_sum, dtype=torch.float64)
        with together("the sum of evaluation losses"):
            dist.all_reduce(total)
        loss = float(total) / num_targets
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the evaluation after {iteration} iterations: the loss is {loss}; find the sample that causes it, "
                "or, if the weights have diverged, remove the newest checkpoints and resume"
            )
        return EvaluationResult(iteration, loss, num_batches, num_samples, num_targets, time.monotonic() - begin)

    def _next(self, source: Iterator[Sequence[Any]], number: int) -> tuple[Sequence[Any], Batch] | None:
        """Return the next batch with its metadata, the same on all ranks, or None after the last."""
        with user_code("evaluation batches"):
            samples = next_samples(source, _named(number))
        batch = None
        if samples is not None:
            with located(_named(number)):
                batch = batch_of(samples, self._describe, number)
        BatchComparison(None if batch is None else batch_digest(batch)).check(_named(number))
        return None if samples is None or batch is None else (samples, batch)

    def _loss_sum(self, samples: Sequence[Any], whole: Batch, plan: PlanForwards) -> float:
        """Return this process's part of a batch's sum of losses."""
        here, number = self.membership, whole.iteration
        with located(_named(number)):
            mine = here.share(whole, self.model.spec, self._loads)
            batch = whole.part(mine)
            delivery: Delivery | None = None
            failure: PipeloomError | None = None
            try:
                delivery = plan(batch) if here.is_planner_rank else None
            except (InputError, InfeasibleError) as error:
                failure = error
            raise_together(failure, f"{_named(number)}: planning")
        with together(f"{_named(number)}: the plan's delivery"):
            forwards, packing = scatter_plan(
                delivery, batch, self.model.spec, self.executor.layout, group=here.team, stages=here.stages
            )
        try:
            result = self.executor.run(forwards, packing, [samples[i] for i in mine], normalizer=1.0)
        except ExecutionError as error:
            raise ExecutionError(f"{_named(number)}, {error}") from error
        # Tensor-parallel ranks have the same loss, which counts once.
        return result.loss_sum if here.counts(whole) and not here.tensor_rank else 0.0


def _named(number: int) -> str:
    return f"evaluation batch {number}"


@contextmanager
def evaluating(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Set layers to evaluation mode, and restore the mode of each submodule afterwards."""
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _RandomStates(NamedTuple):
    """States of the random generators of torch, numpy and Python."""

    of_torch: RandomState
    of_python: tuple[Any, ...]
    of_numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> _RandomStates:
        return cls(RandomState.now(device), random.getstate(), np.random.get_state())  # noqa: NPY002

    def set(self, device: torch.device) -> None:
        self.of_torch.set(device)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random generators of torch, numpy and Python afterwards."""
    before = _RandomStates.now(device)
    try:
        yield
    finally:
        before.set(device)


class SeparateRandomness:
    """Random numbers of code that must not change those of training, such as code that runs on one rank only.

    The code draws from the generators of torch, numpy and Python as usual. Each use continues where the last one ended,
    so that it does not draw the same numbers again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._states = device, _RandomStates.now(device)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw these numbers, and restore the generators afterwards."""
        with preserve_random_state(self._device):
            self._states.set(self._device)
            try:
                yield
            finally:
                self._states = _RandomStates.now(self._device)


def seed_generators(seed: int) -> None:
    """Seed the random generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
