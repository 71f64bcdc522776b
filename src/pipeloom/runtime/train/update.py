"""The weight update of a rank: gradient norm, clipping, optimizer step, learning rates and averages."""

from __future__ import annotations

from torch import Tensor

from pipeloom.runtime.checkpoint.ema import Averages
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.model.membership import Membership
from pipeloom.runtime.model.reduce import Position, counted_parameters, gradient_squares, limit_gradients
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler, Rates, make_optimizer


class WeightUpdate:
    """Updates the trained parameters of a rank. For the parameters see `Trainer`."""

    def __init__(
        self, executor: Executor, membership: Membership, make: MakeOptimizer, scheduler: MakeScheduler | None
    ) -> None:
        trained, ema_decay = executor.trained_parameters(), executor.options.ema_decay
        self.clip_norm, self.device = executor.options.clip_norm, executor.device
        self.parameters = [parameter for _, parameter in trained]
        position = Position(membership.stage, membership.replica, membership.tensor_rank)
        counted = counted_parameters(executor.named_parameters(), executor.layout, position, executor.held_before)
        self.optimizer = make_optimizer(make, trained)
        # As in PyTorch, parameters that the user's optimizer leaves out have gradients, which do not count.
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        self.counted = [parameter for parameter in counted if id(parameter) in held]
        self.rates = Rates(scheduler, self.optimizer)
        self.averages = None if ema_decay is None else Averages(trained, ema_decay)

    def gradient_squares(self) -> Tensor:
        """Return the sum of squares of the gradients that count on this process, on the CPU."""
        return gradient_squares(self.counted, self.device).cpu()

    def begin(self, iteration: int) -> None:
        """Set the rates of an iteration. Clear gradients, since an iteration that failed leaves its own."""
        self.rates.begin(iteration)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, norm: Tensor) -> None:
        """Update the parameters and clear their gradients, whose norm over all ranks is ``norm``."""
        if self.optimizer is None:
            return
        if self.clip_norm is not None:
            limit_gradients(self.parameters, norm, self.clip_norm)
        self.optimizer.step()
        self._clear_gradients()
        self.rates.step()
        if self.averages is not None:
            self.averages.update()
