"""What the training loop does beside plans, as train.toml says it: optimiser, rates, evaluation, averages, logs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipeloom.bounds import Count, Factor, Magnitude, Number, Rate, Share
from pipeloom.errors import InputError, check_count, check_not_negative, check_positive


class OptimizerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters with a rate or options of their own; one that several groups name is of the first."""

    match: tuple[str, ...]
    """Patterns of names, ``module.layer.parameter``, as for files: ``vision.*``, ``*.bias``."""
    learning_rate: Factor | None = None
    """None: the optimiser's."""
    weight_decay: Magnitude | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse rates that cannot train."""
        _check_rates("optimizer.groups", self.learning_rate, self.weight_decay)


class RestConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimiser of what Muon does not take: everything but matrices, and what is matched."""

    name: str = "AdamW"
    match: tuple[str, ...] = ()
    """Patterns of names of matrices that go here too: embeddings, heads."""
    learning_rate: Factor | None = None
    """None: that of the matrices."""
    weight_decay: Magnitude | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse rates that cannot train."""
        _check_rates("optimizer.rest", self.learning_rate, self.weight_decay)


class OptimizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimiser of ``torch.optim`` by name."""

    learning_rate: Factor = 1e-3
    weight_decay: Magnitude | None = None
    """None: the optimiser's own default."""
    betas: tuple[Share, Share] | None = None
    warmup_iterations: Number = 0
    """Of a scheduler that has a warm-up: iterations in which the rate rises to itself."""
    clip_norm: Factor | None = None
    name: str = "AdamW"
    """A class of ``torch.optim``."""
    options: dict[str, Any] = {}
    """Its other keyword arguments."""
    decay_vectors: bool = True
    """False: no weight decay on parameters of less than two dimensions: norms, biases."""
    groups: tuple[OptimizerGroup, ...] = ()
    rest: RestConfig | None = None
    """With Muon: who takes what it cannot; None: AdamW at the same rate."""

    def __post_init__(self) -> None:
        """Refuse rates that cannot train."""
        _check_rates("optimizer", self.learning_rate, self.weight_decay)
        if self.warmup_iterations < 0:
            raise InputError("optimizer.warmup_iterations", f"{self.warmup_iterations} is negative")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise InputError("optimizer.betas", f"{list(self.betas)} are not in [0, 1)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError("optimizer.clip_norm", f"{self.clip_norm} is not positive", "leave it out for no clipping")
        if self.rest is not None and self.name != "Muon":
            raise InputError("optimizer.rest", f"is for Muon, and the optimiser is {self.name}", "use optimizer.groups")


def _check_rates(where: str, learning_rate: float | None, weight_decay: float | None) -> None:
    if learning_rate is not None:
        check_positive(f"{where}.learning_rate", learning_rate)
    if weight_decay is not None:
        check_not_negative(f"{where}.weight_decay", weight_decay)


BUILT_IN = ("cosine", "linear", "constant")
"""Schedulers that warm up, and then go by the length of the run."""
PLATEAU = "ReduceLROnPlateau"
"""Torch's scheduler that goes by a measured loss: here by that of evaluations."""


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of the learning rates; those of all groups scale together."""

    name: str = "cosine"
    """``cosine``, ``linear`` to ``final_share``, or ``constant``, after the warm-up; or a class of
    ``torch.optim.lr_scheduler``."""
    final_share: Magnitude = 0.0
    """Of the rate, at the end of the run."""
    options: dict[str, Any] = {}
    """Keyword arguments of torch's class."""

    def __post_init__(self) -> None:
        """Refuse options that nobody reads."""
        check_not_negative("scheduler.final_share", self.final_share)
        if self.name in BUILT_IN and self.options:
            raise InputError(
                "scheduler.options", f"are for torch's classes, and name is {self.name!r}", "use final_share"
            )
        if self.name not in BUILT_IN and self.final_share:
            raise InputError("scheduler.final_share", f"is not known to {self.name}", "use options")


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the loss on evaluation batches is measured, and with which weights."""

    every: Count
    """Iterations from one to the next; the end of the run is always evaluated."""
    batches: Count | None = None
    """How many are taken at most; None: all."""
    weights: Literal["trained", "ema"] = "trained"
    data: dict[str, Any] = {}
    """Keyword arguments of ``eval_batches``, beside and before those of ``[data]``."""

    def __post_init__(self) -> None:
        """Refuse what never evaluates."""
        check_count("evaluation.every", self.every)
        if self.batches is not None:
            check_count("evaluation.batches", self.batches)


class EmaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exponential moving average of the trained weights."""

    decay: Share = 0.999
    """Share of the average that an iteration leaves."""

    def __post_init__(self) -> None:
        """Refuse averages of nothing."""
        if not 0 <= self.decay < 1:
            raise InputError("ema.decay", f"{self.decay} is not in [0, 1)", "leave [ema] out for no average")


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run's numbers go beside ``history.jsonl``."""

    tensorboard: bool = False
    """Event files in ``tensorboard`` in the run's folder."""
    peak_flops: Rate | None = None
    """Of one process's device, operations a second: with it there is an MFU on devices that are not known."""
    plans: Number = 1000
    """Number of the newest plans that stay in ``plans`` in the run's folder. 0: none."""

    def __post_init__(self) -> None:
        """Refuse devices that compute nothing, and a negative number of plans."""
        check_not_negative("log.plans", self.plans)
        if self.peak_flops is not None:
            check_positive("log.peak_flops", self.peak_flops)


def check_loop(
    optimizer: OptimizerConfig,
    scheduler: SchedulerConfig | None,
    evaluation: EvaluationConfig | None,
    ema: EmaConfig | None,
) -> None:
    """Refuse tables that ask for one another in vain.

    Raises
    ------
    InputError
    """
    scheduler = scheduler or SchedulerConfig()
    if optimizer.warmup_iterations and scheduler.name not in BUILT_IN:
        raise InputError(
            "optimizer.warmup_iterations",
            f"{optimizer.warmup_iterations}, and {scheduler.name} of torch has no warm-up",
            f"use one of {', '.join(BUILT_IN)}, or leave it out",
        )
    if scheduler.name == PLATEAU and evaluation is None:
        raise InputError("scheduler.name", f"{PLATEAU!r} goes by evaluations, and there are none", "add [evaluation]")
    if evaluation is not None and evaluation.weights == "ema" and ema is None:
        raise InputError("evaluation.weights", "'ema', and no average is kept", "add [ema], or evaluate 'trained'")
