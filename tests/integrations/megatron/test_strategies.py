"""Memory strategies of single microbatches in Megatron Core, on gloo CPU ranks.

pip install "pipeloom[megatron]"
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.runtime.launch.processes import launch

from .on_core import ENOUGH, Case
from .on_core_memory import random_strategies
from .test_training import EXPERTS, VARIABLE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed"),
    # Megatron Core says what it has not found, such as Transformer Engine.
    pytest.mark.filterwarnings("ignore"),
]
LENGTHS, UNSEEN = (4, 7, 12, 20, 9), (5, 16, 24, 33)


def run(function: Callable[..., Any], num_ranks: int, *given: Any) -> list[Any]:
    return list(launch(function, num_ranks, *given, timeout_s=240.0))


@pytest.mark.ranks
def test_random_strategies_have_megatrons_gradients_and_the_planned_bytes() -> None:
    """On sizes that were not measured."""
    for found in run(random_strategies, 2, Case(vpp=2, config=VARIABLE), 6, LENGTHS, UNSEEN):
        assert found["gradients"] <= ENOUGH
        assert found["losses"] <= ENOUGH
        assert found["bytes"] <= 0.01
        assert found["pairs"] >= 24
        assert {"keep", "recompute"} <= set(found["used"])
