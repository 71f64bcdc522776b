"""Optimizers and learning rates: a scheduler of torch that can start at any iteration."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeloom.errors import InputError
from pipeloom.runtime.model.model import user_code

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]
"""Returns the optimizer of a rank's parameters. If its parameter is called ``named_parameters``, it receives pairs of a
name, ``module.layer.parameter``, and the parameter. Parameters that it leaves out stay as they are and do not count in
the norm of the gradient. A rank without trained parameters does not call it."""
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
"""Returns the scheduler of a rank's optimizer, e.g. ``functools.partial(LinearLR, total_iters=100)``."""


def make_optimizer(make: MakeOptimizer, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
    """Make the optimizer of a rank's trained parameters. Returns None without parameters.

    Raises `InputError` if the user's function raises, or does not return an optimizer.
    """
    if not named:
        return None
    with user_code("optimizer"):
        try:
            names = list(inspect.signature(make).parameters)
        except (TypeError, ValueError):  # some built-in callables have none
            names = []
        try:
            made = make(list(named) if names[:1] == ["named_parameters"] else [parameter for _, parameter in named])
        except ValueError as error:
            if "empty parameter list" not in str(error):  # PyTorch's own check has no type
                raise
            raise InputError(
                "optimizer",
                f"takes none of the {len(named)} parameters of this rank, and PyTorch's need one",
                "in the model, call requires_grad_(False) on parameters that are not trained",
            ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError("optimizer", f"returned a {type(made).__name__}", "return a torch.optim.Optimizer")
    return made


class Rates:
    """Learning rates of a rank's optimizer. ``make`` returns its scheduler. None keeps the optimizer's rates.

    The scheduler's state is not saved. `begin` makes it anew and repeats its steps. This is exact in any layout for
    schedulers that depend only on their own step count and on evaluations.
    """

    def __init__(self, make: MakeScheduler | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._make, self._optimizer = make, optimizer
        self.evaluations: tuple[tuple[int, float], ...] = ()
        """Iteration and loss of the first evaluation after every iteration that has one."""
        self._scheduler: LRScheduler | None = None
        self._groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
        if make is not None:
            for group in self._groups:
                # A checkpoint may contain another one.
                group.setdefault("initial_lr", float(group["lr"]))

    def begin(self, iteration: int) -> None:
        """Set the rates of an iteration, after the optimizer's own state was loaded."""
        # Evaluations after it, which an earlier pass over these iterations has made, are made again.
        self.evaluations = tuple(each for each in self.evaluations if each[0] <= iteration)
        for group in self._groups:
            # Without a scheduler, only those of a checkpoint that a scheduler changed.
            if "initial_lr" not in group:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["initial_lr"])
            else:
                group["lr"] = group["initial_lr"]
        if self._make is None or self._optimizer is None:
            return
        with user_code("scheduler"):
            made: object = self._make(self._optimizer)
        if not isinstance(made, LRScheduler):
            what = type(made).__name__
            raise InputError("scheduler", f"returned a {what}", "return a scheduler of torch.optim.lr_scheduler")
        self._scheduler = made
        with warnings.catch_warnings():
            # Torch warns because the optimizer's steps were made before.
            warnings.simplefilter("ignore")
            if isinstance(made, ReduceLROnPlateau):
                for _, loss in self.evaluations:
                    made.step(loss)
                return
            for _ in range(iteration):
                made.step()

    def step(self) -> None:
        """Step the scheduler after a step of the optimizer."""
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def evaluated(self, iteration: int, loss: float) -> None:
        """Record the loss of the first evaluation after an iteration, and pass it to a `ReduceLROnPlateau`."""
        if self.evaluations and self.evaluations[-1][0] == iteration:
            return
        self.evaluations = (*self.evaluations, (iteration, loss))
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)

    @property
    def now(self) -> float | None:
        """Learning rate of this rank's first parameter group, or None without one."""
        return float(self._groups[0]["lr"]) if self._groups and "lr" in self._groups[0] else None
