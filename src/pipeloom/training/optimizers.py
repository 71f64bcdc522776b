"""Optimizers and schedulers of torch, made from the settings in train.toml."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from pipeloom.errors import InputError
from pipeloom.runtime.train.rates import MakeScheduler
from pipeloom.training.config import UNTIL_THE_END
from pipeloom.training.loop_config import (
    BUILT_IN,
    OptimizerConfig,
    OptimizerGroup,
    RestConfig,
    SchedulerConfig,
    no_evaluations,
)

Named = Sequence[tuple[str, nn.Parameter]]
"""A rank's trained parameters, each once, with the first of its names in the model."""
_CLOSURES = ("LBFGS",)
_SPARSE = "SparseAdam"
_UNFIT = (*_CLOSURES, _SPARSE, "Optimizer")
_MATRICES = "Muon"
_TRIED_STEPS = 1000
"""Steps for which a scheduler is tried before ranks start."""


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with concatenated groups and one dictionary of states."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take a step with each optimizer."""
        for part in self.parts:
            part.step()


class ConfiguredOptimizer:
    """Makes the optimizer of a config from a rank's named parameters.

    ``divides`` tells whether parameters may be shards, which must not be in one call with whole ones.
    """

    def __init__(self, config: OptimizerConfig, divides: bool = False) -> None:
        self.config, self.divides = config, divides

    def __call__(self, named_parameters: Named) -> torch.optim.Optimizer:
        """Make the optimizer; raise `InputError` if torch has none of this name or it rejects the options."""
        config = self.config
        if config.name != _MATRICES:
            return self._one(config, named_parameters, "optimizer")
        rest = config.rest or RestConfig()
        matrices: list[tuple[str, nn.Parameter]] = []
        others: list[tuple[str, nn.Parameter]] = []
        for name, parameter in named_parameters:
            is_matrix = parameter.dim() == 2 and not _matches(name, rest.match)
            (matrices if is_matrix else others).append((name, parameter))
        made = [self._one(config, matrices, "optimizer")] if matrices else []
        made += [self._one(rest, others, "optimizer.rest")] if others else []
        return made[0] if len(made) == 1 else CombinedOptimizer(made)

    def _one(self, config: OptimizerConfig | RestConfig, named: Named, where: str) -> torch.optim.Optimizer:
        kind = _class_of(torch.optim, torch.optim.Optimizer, config.name, f"{where}.name", _UNFIT)
        known = inspect.signature(kind).parameters
        options = dict(config.options)
        if config.weight_decay is not None:
            options["weight_decay"] = config.weight_decay
        if isinstance(config, OptimizerConfig) and config.betas is not None:
            options["betas"] = config.betas
        of_groups = [name for number in range(len(self.config.groups)) for name in self._own_options(number, False)]
        for name in (*options, *(name for name in of_groups if name != "lr")):
            if name not in known or name in ("params", "lr"):
                raise InputError(f"{where}: {name}", f"is not an option of {kind.__name__}", _listed(known))
        if self.divides and "foreach" in known:
            options.setdefault("foreach", False)
        decays = "weight_decay" in known
        rate = self.config.learning_rate if config.learning_rate is None else config.learning_rate
        try:
            made: torch.optim.Optimizer = kind(self._groups(named, decays), lr=rate, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                where, f"{kind.__name__} says: {error}", "see its page in torch's documentation"
            ) from error
        return made

    def _groups(self, named: Named, decays: bool) -> list[dict[str, Any]]:
        """Group the parameters by rate and decay, in the order of their first parameter."""
        found: defaultdict[tuple[int, bool], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in named:
            number = next((i for i, group in enumerate(self.config.groups) if _matches(name, group.match)), -1)
            without_decay = decays and not self.config.decay_vectors and parameter.dim() < 2
            found[number, without_decay].append(parameter)
        return [{"params": parameters, **self._own_options(*key)} for key, parameters in found.items()]

    def _own_options(self, number: int, without_decay: bool) -> dict[str, Any]:
        """Return the options of one group."""
        group = OptimizerGroup(()) if number < 0 else self.config.groups[number]
        own = dict(group.options)
        if group.learning_rate is not None:
            own["lr"] = group.learning_rate
        if group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay
        if without_decay:
            own["weight_decay"] = 0.0
        return own


def check_optimizer(config: OptimizerConfig, names: Mapping[str, str]) -> None:
    """Check before ranks start that they can make the optimizer; an `InputError` names the field.

    ``names`` are those of all parameters, each with the first name of the same parameter; see `Model.first_name`.
    """
    for number, group in enumerate(config.groups):
        _check_match(f"optimizer.groups[{number}].match", group.match, names)
    if config.rest is not None:
        _check_match("optimizer.rest.match", config.rest.match, names)
    sample = _sample()
    made = ConfiguredOptimizer(config)(sample)
    for _, parameter in sample:
        parameter.grad = torch.zeros_like(parameter)
    try:
        made.step()
    except Exception as error:
        remedy = "correct optimizer.options"
        raise InputError("optimizer", f"{config.name} says: {type(error).__name__}: {error}", remedy) from error


def _sample() -> Named:
    return [("", nn.Parameter(torch.zeros(2, 2))), ("", nn.Parameter(torch.zeros(2)))]


def _check_match(where: str, patterns: Sequence[str], names: Mapping[str, str]) -> None:
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            example = f"an example is {next(iter(names))!r}" if names else ""
            raise InputError(where, f"{pattern!r} matches no parameter", example)
        if not any(names[name] == name for name in found):
            first = names[found[0]]
            raise InputError(where, f"{pattern!r} matches {found[0]!r}, which is tied to {first!r}", f"match {first!r}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def configured_scheduler(config: SchedulerConfig, optimizer: OptimizerConfig, iterations: int) -> MakeScheduler | None:
    """Return a function that makes the config's scheduler of an optimizer; None if rates are constant.

    Raise `InputError` if torch has no such scheduler.
    """
    if config.name == "constant" and not optimizer.warmup_iterations:
        return None
    if config.name in BUILT_IN:
        factor = rate_factor(config, optimizer.warmup_iterations, iterations)
        return lambda made: lr_scheduler.LambdaLR(made, factor)
    kind = _class_of(lr_scheduler, lr_scheduler.LRScheduler, config.name, "scheduler.name", ("LRScheduler",))
    known = inspect.signature(kind).parameters
    for name in config.options:
        if name not in known or name == "optimizer":
            raise InputError(f"scheduler.options: {name}", f"is not an option of {config.name}", _listed(known))

    def make(made: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        try:
            scheduler: lr_scheduler.LRScheduler = kind(made, **config.options)
        except Exception as error:
            raise _unfit(config.name, error) from error
        return scheduler

    return make


def checked_scheduler(make: MakeScheduler, has_evaluations: bool) -> MakeScheduler:
    """Return a function that makes the user's own scheduler, and raises `InputError` for one without what it needs."""

    def checked(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        scheduler = make(optimizer)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and not has_evaluations:
            raise no_evaluations("scheduler")
        return scheduler

    return checked


def _unfit(name: str, error: Exception) -> InputError:
    message = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
    return InputError("scheduler", f"{name} says: {message}", "correct scheduler.options")


def check_scheduler(config: SchedulerConfig, optimizer: OptimizerConfig | None, iterations: int) -> None:
    """Check before ranks start that they can make the scheduler, and that it does not end before the run.

    Raise `InputError` if they cannot, or it may end before the run. ``optimizer`` has the rates that it schedules;
    None: those of the task's own optimizer, which only ranks make. ``iterations`` may be `UNTIL_THE_END`.
    """
    if optimizer is None:
        sample: torch.optim.Optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    else:
        sample = ConfiguredOptimizer(optimizer)(_sample())
    make = configured_scheduler(config, optimizer or OptimizerConfig(), iterations)
    if make is None:
        return
    made = make(sample)
    total = getattr(made, "total_steps", None)
    if total is not None and iterations == UNTIL_THE_END:
        problem = f"{config.name} ends after {total} iterations, but the length of the run is unknown"
        raise InputError("scheduler.options", problem, f"set config.iterations, to at most {total}")
    if total is not None and total < iterations:
        remedy = "raise total_steps to the number of iterations"
        raise InputError("scheduler.options", f"{config.name} ends after {total} of {iterations} iterations", remedy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(min(iterations, _TRIED_STEPS)):
                sample.step()
                made.step(0.0) if isinstance(made, lr_scheduler.ReduceLROnPlateau) else made.step()
        except Exception as error:
            raise _unfit(config.name, error) from error


def rate_factor(config: SchedulerConfig, warmup: int, iterations: int) -> Callable[[int], float]:
    """Return the share of the learning rate by iteration: a linear warm-up, then a decay to the final share."""

    def factor(iteration: int) -> float:
        if iteration < warmup:
            return (iteration + 1) / warmup
        done = min(1.0, (iteration - warmup) / max(1, iterations - warmup))
        left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[config.name]
        return config.final_share + (1 - config.final_share) * left

    return factor


def _class_of(module: Any, base: type, name: str, where: str, but: Sequence[str]) -> Any:
    """Return a class of a module by name."""
    known = sorted(
        each
        for each, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, base) and each not in but and not each.startswith("_")
    )
    if name not in known:
        problem = f"{name!r} is unknown"
        if name in _CLOSURES:
            problem = f"{name!r} needs a closure, which plans do not support"
        elif name == _SPARSE:
            problem = f"{name!r} needs sparse gradients, which layers do not produce here"
        raise InputError(where, problem, f"use one of {', '.join(known)}")
    return getattr(module, name)


def _listed(known: Mapping[str, Any]) -> str:
    return "options: " + ", ".join(each for each in known if each not in ("params", "lr", "optimizer"))
