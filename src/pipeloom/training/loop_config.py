"""Settings of the training loop in train.toml: optimizer, learning rates, evaluation, weight average, logs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipeloom.bounds import Count, Factor, Magnitude, Number, Rate, Seconds, Share
from pipeloom.errors import InputError, check_count, check_not_negative, check_positive


class OptimizerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters with their own rate or options. A parameter belongs to the first group that matches it."""

    match: tuple[str, ...]
    """Patterns of names, ``module.layer.parameter``, such as ``vision.*`` or ``*.bias``."""
    learning_rate: Factor | None = None
    """None: the optimizer's rate."""
    weight_decay: Magnitude | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _check_rates("optimizer.groups", self.learning_rate, self.weight_decay)


class RestConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimizer of parameters that Muon does not take: everything but matrices, and matrices that match."""

    name: str = "AdamW"
    match: tuple[str, ...] = ()
    """Patterns of names of matrices to include, such as embeddings and heads."""
    learning_rate: Factor | None = None
    """None: the rate of the matrices."""
    weight_decay: Magnitude | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _check_rates("optimizer.rest", self.learning_rate, self.weight_decay)


class OptimizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer of ``torch.optim`` by name."""

    learning_rate: Factor = 1e-3
    weight_decay: Magnitude | None = None
    """None: the optimizer's own default."""
    betas: tuple[Share, Share] | None = None
    warmup_iterations: Number = 0
    """Iterations of linear warm-up, for schedulers that have one."""
    clip_norm: Factor | None = None
    name: str = "AdamW"
    """A class of ``torch.optim``."""
    options: dict[str, Any] = {}
    """Other keyword arguments of the class."""
    decay_vectors: bool = True
    """False: no weight decay on parameters with fewer than two dimensions, such as norms and biases."""
    groups: tuple[OptimizerGroup, ...] = ()
    rest: RestConfig | None = None
    """Optimizer for the parameters that Muon does not take. None: AdamW at the same rate."""

    def __post_init__(self) -> None:
        _check_rates("optimizer", self.learning_rate, self.weight_decay)
        if self.warmup_iterations < 0:
            raise InputError("optimizer.warmup_iterations", f"{self.warmup_iterations} is negative")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise InputError("optimizer.betas", f"{list(self.betas)} are not in [0, 1)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError("optimizer.clip_norm", f"{self.clip_norm} is not positive", "omit it for no clipping")
        if self.rest is not None and self.name != "Muon":
            raise InputError("optimizer.rest", f"is for Muon, but the optimizer is {self.name}", "use optimizer.groups")


def _check_rates(where: str, learning_rate: float | None, weight_decay: float | None) -> None:
    if learning_rate is not None:
        check_positive(f"{where}.learning_rate", learning_rate)
    if weight_decay is not None:
        check_not_negative(f"{where}.weight_decay", weight_decay)


BUILT_IN = ("cosine", "linear", "constant")
"""Schedulers with a warm-up, which depend on the length of the run."""
PLATEAU = "ReduceLROnPlateau"
"""Torch's scheduler that depends on a measured loss: here the loss of evaluations."""


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The learning-rate schedule; all groups scale together."""

    name: str = "cosine"
    """``cosine``, ``linear`` to ``final_share``, or ``constant``, after the warm-up; or a class of
    ``torch.optim.lr_scheduler``."""
    final_share: Magnitude = 0.0
    """Share of the rate at the end of the run."""
    options: dict[str, Any] = {}
    """Keyword arguments of torch's class."""

    def __post_init__(self) -> None:
        """Raise `InputError` for options that the scheduler does not use."""
        check_not_negative("scheduler.final_share", self.final_share)
        if self.name in BUILT_IN and self.options:
            raise InputError(
                "scheduler.options", f"are for torch's classes, but name is {self.name!r}", "use final_share"
            )
        if self.name not in BUILT_IN and self.final_share:
            raise InputError("scheduler.final_share", f"is not supported by {self.name}", "use options")


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the loss on evaluation batches is measured, and with which weights."""

    every: Count
    """Iterations between evaluations. The end of the run is always evaluated."""
    batches: Count | None = None
    """Most batches of one evaluation. None: all."""
    weights: Literal["trained", "ema"] = "trained"
    data: dict[str, Any] = {}
    """Keyword arguments of ``eval_batches``, which override those of ``[data]``."""

    def __post_init__(self) -> None:
        check_count("evaluation.every", self.every)
        if self.batches is not None:
            check_count("evaluation.batches", self.batches)


class EmaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exponential moving average of the trained weights."""

    decay: Share = 0.999
    """Share of the average that remains after an iteration."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError("ema.decay", f"{self.decay} is not in [0, 1)", "omit [ema] for no average")


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outputs of a run's numbers beside ``history.jsonl``."""

    tensorboard: bool = False
    """Write event files to ``tensorboard`` in the run's folder."""
    peak_flops: Rate | None = None
    """Operations per second of one process's device. Enables MFU for unknown devices."""
    plans: Number = 1000
    """Number of the newest plans kept in ``plans`` in the run's folder. 0: none."""
    waiting_s: Seconds = 0.0
    """After training, run batches under 1F1B, interleaved 1F1B and their own plans on ranks that wait instead of
    computing, for about this many seconds. Measured times then do not depend on shared cores. 0: do not."""

    def __post_init__(self) -> None:
        check_not_negative("log.plans", self.plans)
        check_not_negative("log.waiting_s", self.waiting_s)
        if self.peak_flops is not None:
            check_positive("log.peak_flops", self.peak_flops)


def no_evaluations(where: str) -> InputError:
    """Return the error for a `ReduceLROnPlateau` without evaluations."""
    return InputError(where, f"{PLATEAU!r} needs evaluations, and there are none", "add [evaluation]")


def check_loop(
    optimizer: OptimizerConfig,
    scheduler: SchedulerConfig | None,
    evaluation: EvaluationConfig | None,
    ema: EmaConfig | None,
) -> None:
    """Raise `InputError` for tables that need another table that is missing."""
    scheduler = scheduler or SchedulerConfig()
    if optimizer.warmup_iterations and scheduler.name not in BUILT_IN:
        raise InputError(
            "optimizer.warmup_iterations",
            f"is {optimizer.warmup_iterations}, but {scheduler.name} of torch has no warm-up",
            f"use one of {', '.join(BUILT_IN)}, or omit it",
        )
    if scheduler.name == PLATEAU and evaluation is None:
        raise no_evaluations("scheduler.name")
    if evaluation is not None and evaluation.weights == "ema" and ema is None:
        raise InputError("evaluation.weights", "is 'ema', but no average is kept", "add [ema], or evaluate 'trained'")
