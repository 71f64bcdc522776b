"""Memory strategies of single microbatches in Megatron Core, on gloo CPU ranks.

pip install "pipeloom[megatron]"
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.steps.strategies import StepMemory
from pipeloom.runtime.launch.processes import launch

from .on_core import ENOUGH, Case
from .on_core_memory import random_strategies, with_dropout, within_limit
from .test_training import EXPERTS, VARIABLE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed"),
    # Megatron Core says what it has not found, such as Transformer Engine.
    pytest.mark.filterwarnings("ignore"),
]
LENGTHS, UNSEEN = (4, 7, 12, 20, 9), (5, 16, 24, 33)
PERCEPTRONS = {"recompute_modules": ["mlp"], "add_bias_linear": False}
EVEN = (4, 8, 12, 20, 10)


def run(function: Callable[..., Any], num_ranks: int, *given: Any) -> list[Any]:
    return list(launch(function, num_ranks, *given, timeout_s=240.0))


@pytest.mark.ranks
def test_random_strategies_have_megatrons_gradients_and_the_planned_bytes() -> None:
    """On sizes that were not measured."""
    for found in run(random_strategies, 2, Case(vpp=2, config=VARIABLE), 6, LENGTHS, UNSEEN):
        agrees(found)


@pytest.mark.full
@pytest.mark.ranks
def test_random_strategies_of_other_models() -> None:
    """Experts, whose tokens differ by microbatch; multi-token prediction with tied embeddings in Megatron's wrapper."""
    experts = Case(vpp=2, config={**EXPERTS, "recompute_modules": ["moe", "core_attn"]})
    for found in run(random_strategies, 2, experts, 6, (8,), (8,)):
        agrees(found)
    predictors = {**VARIABLE, "mtp_num_layers": 1, **PERCEPTRONS}
    for found in run(random_strategies, 2, Case(vpp=2, tied=True, ddp={}, config=predictors), 6, LENGTHS, UNSEEN):
        agrees(found)


@pytest.mark.full
@pytest.mark.ranks
def test_random_strategies_on_tensor_ranks() -> None:
    config = {**VARIABLE, "sequence_parallel": True, **PERCEPTRONS}
    for found in run(random_strategies, 4, Case(tp=2, vpp=2, config=config), 6, EVEN, (6, 16, 26)):
        agrees(found)


def agrees(found: dict[str, Any]) -> None:
    assert found["gradients"] <= ENOUGH
    assert found["losses"] <= ENOUGH
    assert found["bytes"] <= 0.01
    assert found["pairs"] >= 24
    assert {"keep", "recompute"} <= set(found["used"])


@pytest.mark.full
@pytest.mark.ranks
def test_steps_stay_within_a_limit_by_strategies_that_differ() -> None:
    for found in run(within_limit, 2, Case(vpp=2, config=VARIABLE), (20, 9, 12, 7, 16, 20, 5, 24), 0.7):
        assert found["gradients"] <= ENOUGH
        assert found["losses"] <= ENOUGH
        assert found["most"] <= found["limit"] < found["kept"]
        assert len({strategy for each in found["strategies"] for strategy in each}) > 1


@pytest.mark.full
@pytest.mark.ranks
def test_recomputation_draws_the_dropout_of_its_forward() -> None:
    """In one order, strategies do not change losses or gradients."""
    config = {**VARIABLE, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    for found in run(with_dropout, 2, Case(vpp=2, config=config), (20, 9, 12, 7)):
        assert found == {"gradients": 0.0, "losses": 0.0}


def test_limits_and_strategies_that_are_not_valid() -> None:
    with pytest.raises(InputError, match="activation_bytes: '0' is not a number of bytes from 1 to"):
        StepMemory(0)
    with pytest.raises(InputError, match="strategies: 'offload' is not one of keep, selective, recompute"):
        StepMemory(1, ("keep", "offload"))
    with pytest.raises(InputError, match="strategies: is recompute, keep; give keep first, and each once"):
        StepMemory(1, ("recompute", "keep"))


def test_steps_that_measure_hold_little_and_cover_all_strategies() -> None:
    memory, seen = StepMemory(1), set()
    for step in range(4):
        chosen = memory.to_measure(8, 4, step)
        assert len(chosen) == 8
        assert sum(each[0] != "recompute" for each in chosen) == 2
        seen |= {(each[0], number) for number, each in enumerate(chosen)}
    assert {strategy for strategy, _ in seen} == {"keep", "selective", "recompute"}
