"""Optimisers and schedulers by name: what goes into which group, what rates become, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from pipeloom.errors import InputError
from pipeloom.runtime import Executor, ThreadHub
from pipeloom.runtime.model.membership import Membership
from pipeloom.runtime.train.rates import Rates, make_optimizer
from pipeloom.runtime.train.update import WeightUpdate
from pipeloom.training import OptimizerConfig, OptimizerGroup, RestConfig, SchedulerConfig
from pipeloom.training.config import UNTIL_THE_END
from pipeloom.training.loop_config import EvaluationConfig, check_loop
from pipeloom.training.optimizers import (
    CombinedOptimizer,
    ConfiguredOptimizer,
    check_optimizer,
    check_scheduler,
    checked_scheduler,
    configured_scheduler,
    rate_factor,
)
from tests.runtime.cases import random_run


def named() -> list[tuple[str, nn.Parameter]]:
    shapes = {"vision.0.weight": (4, 3), "vision.0.bias": (4,), "lm.0.word": (9, 4), "lm.1.weight": (4, 4)}
    return [(name, nn.Parameter(torch.ones(shape))) for name, shape in {**shapes, "lm.1.norm": (4,)}.items()]


def rates_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, float, float]]:
    return [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups]


def test_any_optimizer_is_made_with_its_groups() -> None:
    adam = ConfiguredOptimizer(OptimizerConfig(3e-3))(named())
    assert type(adam) is torch.optim.AdamW
    assert rates_of(adam) == [(5, 3e-3, 0.01)]
    config = OptimizerConfig(
        0.1,
        name="SGD",
        options={"momentum": 0.9},
        weight_decay=0.2,
        decay_vectors=False,
        groups=(OptimizerGroup(("vision.*",), 0.01), OptimizerGroup(("*.word",), weight_decay=0.0)),
    )
    found = ConfiguredOptimizer(config)(named())
    assert rates_of(found) == [(1, 0.01, 0.2), (1, 0.01, 0.0), (1, 0.1, 0.0), (1, 0.1, 0.2), (1, 0.1, 0.0)]
    assert {group["momentum"] for group in found.param_groups} == {0.9}
    check_optimizer(config, {name: name for name, _ in named()})
    assert ConfiguredOptimizer(OptimizerConfig(), divides=True)(named()).param_groups[0]["foreach"] is False


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_muon_takes_matrices_and_another_the_rest() -> None:
    config = OptimizerConfig(0.02, name="Muon", rest=RestConfig(match=("*.word",), learning_rate=1e-3))
    check_optimizer(config, {name: name for name, _ in named()})
    parameters = named()
    both = ConfiguredOptimizer(config)(parameters)
    assert isinstance(both, CombinedOptimizer)
    assert [type(part).__name__ for part in both.parts] == ["Muon", "AdamW"]
    assert [(len(g["params"]), g["lr"]) for g in both.param_groups] == [(2, 0.02), (3, 1e-3)]
    scheduler = StepLR(both, 1, 0.5)
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    both.step()
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in both.parts] == [0.01, 5e-4]
    assert len(both.state) == 5
    assert all((parameter != 1).any() for _, parameter in parameters)
    both.zero_grad()
    assert all(parameter.grad is None for _, parameter in parameters)


def test_a_function_gets_names_where_it_asks_for_them() -> None:
    asked: list[Any] = []

    def by_name(named_parameters: Any) -> torch.optim.Optimizer:
        asked.extend(name for name, _ in named_parameters)
        return torch.optim.SGD([parameter for _, parameter in named_parameters], 0.1)

    make_optimizer(by_name, named())
    assert asked == [name for name, _ in named()]
    assert make_optimizer(torch.optim.AdamW, []) is None
    assert isinstance(make_optimizer(partial(torch.optim.AdamW, lr=0.1), named()), torch.optim.AdamW)
    with pytest.raises(InputError, match=r"^optimizer: returned a int; return a torch.optim.Optimizer"):
        make_optimizer(lambda parameters: 3, named())  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match=r"^optimizer: raised KeyError"):
        make_optimizer(lambda parameters: {}[0], named())
    with pytest.raises(
        InputError, match=r"^optimizer: takes none of the 5 parameters of this rank, .*; in the model, "
    ):
        make_optimizer(lambda parameters: torch.optim.AdamW(parameters[5:]), named())


def test_gradients_of_parameters_that_the_optimizer_leaves_out_do_not_count_and_are_cleared() -> None:
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    membership = Membership(0, 0, 1, None, None, None)
    update = WeightUpdate(executor, membership, lambda parameters: torch.optim.SGD(parameters[:1], 0.1), None)
    first, *others = executor.parameters()
    assert others
    before = [parameter.detach().clone() for parameter in others]
    for _ in range(2):
        for parameter in (first, *others):
            parameter.grad = torch.ones_like(parameter) + (0 if parameter.grad is None else parameter.grad)
        assert float(update.gradient_squares()) == first.numel()
        update.step(torch.tensor(1.0))
        assert all(parameter.grad is None for parameter in (first, *others))
    assert all(torch.equal(one, other) for one, other in zip(before, others, strict=True))


def test_the_rates_of_groups_scale_together() -> None:
    factor = rate_factor(SchedulerConfig(), 2, 10)
    assert [factor(0), factor(1), factor(2), factor(6), factor(10), factor(99)] == pytest.approx([0.5, 1, 1, 0.5, 0, 0])
    linear = rate_factor(SchedulerConfig("linear", 0.1), 0, 10)
    assert [linear(i) for i in (0, 5, 10)] == pytest.approx([1, 0.55, 0.1])
    config = OptimizerConfig(0.4, groups=(OptimizerGroup(("vision.*",), 0.1),), warmup_iterations=2)
    optimizer = ConfiguredOptimizer(config)(named())
    rates = Rates(configured_scheduler(SchedulerConfig("linear"), config, 10), optimizer)
    rates.begin(6)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])
    assert rates.now == pytest.approx(0.05)
    assert configured_scheduler(SchedulerConfig("constant"), OptimizerConfig(), 10) is None


MAKERS = [
    partial(CosineAnnealingLR, T_max=7),
    partial(StepLR, step_size=2, gamma=0.3),
    partial(OneCycleLR, max_lr=0.7, total_steps=20),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.func.__name__)
def test_a_scheduler_goes_on_as_if_it_had_not_ended(make: Any) -> None:
    def optimizer() -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, (_, p) in enumerate(named())]
        return torch.optim.AdamW(groups)

    one, other = optimizer(), optimizer()
    whole, resumed = Rates(make, one), Rates(make, other)
    whole.begin(0)
    for _ in range(5):
        one.step()
        whole.step()
    # As a checkpoint leaves them.
    for group, saved in zip(other.param_groups, one.param_groups, strict=True):
        group |= {"lr": saved["lr"], "initial_lr": saved["initial_lr"]}
    resumed.begin(5)
    for _ in range(4):
        assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in one.param_groups]
        for optimizer, rates in ((one, whole), (other, resumed)):
            optimizer.step()
            rates.step()


def test_constant_rates_after_a_schedule_are_those_before_it() -> None:
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 * (i + 1)} for i, (_, p) in enumerate(named())])
    # As a checkpoint leaves the first group; the second had no schedule.
    optimizer.param_groups[0] |= {"lr": 0.0, "initial_lr": 0.1}
    rates = Rates(None, optimizer)
    rates.begin(5)
    assert [group["lr"] for group in optimizer.param_groups[:2]] == [0.1, 0.2]


def test_a_plateau_is_found_by_evaluations_those_before_too() -> None:
    losses = [(2, 1.0), (4, 0.9), (6, 0.95), (8, 0.95)]

    def rates_after(resumed: int) -> float:
        optimizer = torch.optim.SGD([named()[0][1]], 0.8)
        rates = Rates(partial(ReduceLROnPlateau, patience=1, factor=0.5), optimizer)
        rates.evaluations = tuple(losses)
        rates.begin(resumed)
        for after, loss in losses:
            if after > resumed:
                rates.evaluated(after, loss)
        rates.step()
        return float(optimizer.param_groups[0]["lr"])

    assert [rates_after(resumed) for resumed in (0, 4, 6, 8)] == [0.4] * 4


def test_a_plateau_counts_only_the_first_evaluation_of_an_iteration() -> None:
    optimizer = torch.optim.SGD([named()[0][1]], 0.8)
    rates = Rates(partial(ReduceLROnPlateau, patience=1, factor=0.5), optimizer)
    rates.begin(0)
    for after, loss in ((2, 1.0), (2, 3.0), (4, 0.9), (4, 3.0)):
        rates.evaluated(after, loss)
    assert float(optimizer.param_groups[0]["lr"]) == 0.8
    assert rates.evaluations == ((2, 1.0), (4, 0.9))


def test_a_plateau_of_a_function_needs_evaluations_too() -> None:
    optimizer = torch.optim.SGD([named()[0][1]], 0.8)
    make = partial(ReduceLROnPlateau, patience=1)
    assert isinstance(checked_scheduler(make, True)(optimizer), ReduceLROnPlateau)
    assert isinstance(checked_scheduler(partial(StepLR, step_size=1), False)(optimizer), StepLR)
    rates = Rates(checked_scheduler(make, False), optimizer)
    assert (
        refused(rates.begin, 0)
        == "scheduler: 'ReduceLROnPlateau' needs evaluations, and there are none; add [evaluation]"
    )


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(InputError) as error:
        call(*args)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_what_torch_does_not_have_is_refused_in_one_line() -> None:
    names = {name: name for name, _ in named()}
    made: Any = OptimizerConfig
    assert "optimizer.name: 'Adamm' is unknown; use one of " in refused(check_optimizer, made(name="Adamm"), names)
    assert "needs sparse gradients" in refused(check_optimizer, made(name="SparseAdam"), names)
    assert "needs a closure" in refused(check_optimizer, made(name="LBFGS"), names)
    found = refused(check_optimizer, made(options={"momentum": 1}), names)
    assert "optimizer: momentum: is not an option of AdamW; options: betas" in found
    assert "is not an option of Adafactor" in refused(check_optimizer, made(name="Adafactor", betas=(0.9, 0.9)), names)
    assert "AdamW says: Invalid epsilon" in refused(check_optimizer, made(options={"eps": -1.0}), names)
    groups = (OptimizerGroup(("visoin.*",)),)
    found = refused(check_optimizer, made(groups=groups), names)
    assert found == ("optimizer.groups[0].match: 'visoin.*' matches no parameter; an example is 'vision.0.weight'")
    # The optimizer sees only the first name of a tied parameter.
    found = refused(check_optimizer, made(groups=(OptimizerGroup(("lm.9.*",)),)), {**names, "lm.9.head": "lm.0.weight"})
    assert found.endswith("'lm.9.*' matches 'lm.9.head', which is tied to 'lm.0.weight'; match 'lm.0.weight'")
    found = refused(check_optimizer, made(groups=(OptimizerGroup(("*",), options={"bates": 1}),)), names)
    assert "bates: is not an option of AdamW" in found
    assert "optimizer.rest: is for Muon" in refused(lambda: made(rest=RestConfig()))
    # Torch finds the first when it is made, the second in its first step.
    for name, options in (("AdamW", {"eps": [1]}), ("ASGD", {"lambd": "x"})):
        assert f"optimizer: {name} says: " in refused(check_optimizer, made(name=name, options=options), names)
    plateau = SchedulerConfig("ReduceLROnPlateau")
    assert "needs evaluations, and there are none" in refused(check_loop, made(), plateau, None, None)
    assert "has no warm-up" in refused(check_loop, made(warmup_iterations=3), SchedulerConfig("StepLR"), None, None)
    averaged = EvaluationConfig(1, weights="ema")
    assert "no average is kept; add [ema]" in refused(check_loop, made(), SchedulerConfig(), averaged, None)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Cosine", {}, "scheduler.name: 'Cosine' is unknown"),
        ("CosineAnnealingLR", {"T_mix": 1}, "T_mix: is not an option"),
        ("CosineAnnealingLR", {}, "CosineAnnealingLR says: "),
        ("CosineAnnealingLR", {"T_max": "ten"}, "CosineAnnealingLR says: "),
        ("CosineAnnealingLR", {"T_max": 0}, "CosineAnnealingLR says: ZeroDivisionError"),
        ("StepLR", {"step_size": 0}, "StepLR says: "),
        ("StepLR", {"step_size": 2, "gamma": "half"}, "StepLR says: "),
        ("MultiStepLR", {"milestones": 3}, "MultiStepLR says: "),
        ("ReduceLROnPlateau", {"mode": "least"}, "ReduceLROnPlateau says: "),
        ("ReduceLROnPlateau", {"patience": "long"}, "ReduceLROnPlateau says: "),
        (
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 5},
            "scheduler.options: OneCycleLR ends after 5 of 20 iterations",
        ),
    ],
)
def test_a_scheduler_that_would_fail_on_the_ranks_is_refused(name: str, options: dict[str, Any], problem: str) -> None:
    found = refused(check_scheduler, SchedulerConfig(name, options=options), OptimizerConfig(), 20)
    assert problem in found
    assert (
        found.endswith(("correct scheduler.options", "the number of iterations"))
        or "not an option" in found
        or "unknown" in found
    )


def test_a_scheduler_is_tried_with_the_optimizer_of_the_run() -> None:
    cycle = SchedulerConfig("CyclicLR", options={"base_lr": 0.01, "max_lr": 0.1})
    check_scheduler(cycle, OptimizerConfig(name="SGD", options={"momentum": 0.9}), 20)
    assert "momentum" in refused(check_scheduler, cycle, OptimizerConfig(name="Adagrad"), 20)
    check_scheduler(SchedulerConfig("OneCycleLR", options={"max_lr": 0.1, "total_steps": 20}), None, 20)


def test_a_scheduler_with_an_end_needs_the_length_of_the_run() -> None:
    once = SchedulerConfig("OneCycleLR", options={"max_lr": 0.1, "total_steps": 100})
    found = refused(check_scheduler, once, OptimizerConfig(), UNTIL_THE_END)
    assert found == (
        "scheduler.options: OneCycleLR ends after 100 iterations, but the length of the run is unknown; "
        "set config.iterations, to at most 100"
    )
    check_scheduler(SchedulerConfig("StepLR", options={"step_size": 9}), OptimizerConfig(), UNTIL_THE_END)


def test_a_function_that_makes_no_scheduler_is_refused() -> None:
    rates = Rates(lambda optimizer: math.pi, torch.optim.SGD([named()[0][1]], 0.1))  # type: ignore[arg-type, return-value]
    assert "scheduler: returned a float" in refused(rates.begin, 0)
    assert issubclass(StepLR, LRScheduler)
