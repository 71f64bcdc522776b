"""Memory strategies of single microbatches in Megatron Core, on gloo CPU ranks.

pip install "pipeloom[megatron]"
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.cost import ProfileCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.integrations.steps.costs import BYTES, Measurements, Row, stage_profile
from pipeloom.integrations.steps.layers import PlannedStages, divide_stages
from pipeloom.integrations.steps.planning import Order, Planning, StepPlanner, stages_spec
from pipeloom.integrations.steps.running import MODULE, encoder_layout, stage_layout
from pipeloom.integrations.steps.strategies import OFFERED, StepMemory
from pipeloom.runtime.launch.processes import launch
from pipeloom.spec import Chunk, Layout, ModuleLayout, Workload

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


@pytest.mark.ranks
def test_layers_of_a_chunk_recompute_in_different_ways() -> None:
    for found in run(random_strategies, 2, Case(layers=6, config=VARIABLE), 4, LENGTHS, UNSEEN, True):
        agrees(found, pairs=12)
        assert any("," in word for word in found["used"])


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


def agrees(found: dict[str, Any], pairs: int = 24) -> None:
    assert found["gradients"] <= ENOUGH
    assert found["losses"] <= ENOUGH
    assert found["bytes"] <= 0.01
    assert found["pairs"] >= pairs
    assert {"keep", "recompute"} <= set(",".join(found["used"]).split(","))


@pytest.mark.full
@pytest.mark.ranks
def test_steps_stay_within_a_limit_by_strategies_that_differ() -> None:
    for found in run(within_limit, 2, Case(vpp=2, layers=8, config=VARIABLE), (20, 9, 12, 7, 16, 20, 5, 24), 0.3):
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


def test_stages_cost_what_was_measured() -> None:
    """Recomputation of the last stage leaves out its large vocabulary, and so takes less than its forward."""
    rows = []
    for size in (3, 5, 8, 13):
        rows += [Row(0, "F", strategy, (size,), 4e-3 * size) for strategy in ("keep", "selective", "recompute")]
        seconds = {"keep": 8e-3 * size, "selective": 8.5e-3 * size, "recompute": 9e-3 * size + 1e-4 * size**2}
        rows += [Row(0, "B", strategy, (size,), value) for strategy, value in seconds.items()]
        held = {"keep": 70 + 11 * size + 3 * size**2, "selective": 70 + 9 * size, "recompute": 70 + 2 * size}
        rows += [Row(0, BYTES, strategy, (size,), value) for strategy, value in held.items()]
    layout = stage_layout([0], 1)
    profile = stage_profile(rows, layout)
    costs = ProfileCosts(stages_spec(layout, [1.0]), profile, strategies=("keep", "selective", "recompute"))
    keep, selective, recompute = costs.chunk_costs(Chunk(MODULE, (0, 0), 0), Workload((100,)))
    assert keep.backward_s == pytest.approx(0.8)
    assert selective.backward_s == pytest.approx(0.85)
    assert recompute.backward_s == pytest.approx(0.9 + 1.0)
    assert recompute.forward_s == pytest.approx(0.4)
    assert [each.activation_bytes for each in (keep, selective, recompute)] == [31170, 970, 270]


def test_noise_does_not_make_recomputation_shorter() -> None:
    """Measured with a GPU: plans recomputed although memory was not limited, and took 12 % longer."""
    rows = []
    for size in (3, 5, 8, 13):
        for strategy, seconds in (("keep", 8e-3), ("selective", 7e-3), ("recompute", 9e-3)):
            rows += [
                Row(0, "F", strategy, (size,), 0.5 * seconds * size),
                Row(0, "B", strategy, (size,), seconds * size),
            ]
            rows.append(Row(0, BYTES, strategy, (size,), 100.0 * size))
    layout = stage_layout([0], 1)
    costs = ProfileCosts(stages_spec(layout, [1.0]), stage_profile(rows, layout), strategies=OFFERED)
    keep, selective, recompute = costs.chunk_costs(Chunk(MODULE, (0, 0), 0), Workload((100,)))
    assert selective.forward_s == pytest.approx(keep.forward_s)
    assert selective.backward_s == pytest.approx(keep.backward_s)
    assert recompute.backward_s == pytest.approx(0.9)


def test_strategies_are_measured_in_enough_microbatches() -> None:
    measured = Measurements([], [1.0], step=1)
    for microbatch in range(8):
        assert not measured.cover(OFFERED)
        for strategy in OFFERED:
            size = (1 + microbatch % 4,)
            measured.note([Row(0, "B", strategy, size, 1.0), Row(0, BYTES, strategy, size, 1.0)], {})
    assert measured.cover(OFFERED)


def test_a_stage_of_several_layers_costs_the_same_and_mixes_strategies() -> None:
    layout = stage_layout([0, 1], 2)
    profile = stage_profile([row for step in range(4) for row in _rows(2, 4 + 5 * step)], layout)
    whole = PlannedStages(stages_spec(layout, [4.0, 4.0]), layout, profile)
    parts = divide_stages(whole, [1, 5])
    assert [chunk.layers for chunk in parts.layout.chunks] == [(0, 0), (1, 5)]
    before, after = (ProfileCosts(each.model, each.profile, strategies=OFFERED) for each in (whole, parts))
    for chunk, divided, size in itertools.product((0, 1), (whole, parts), (7, 100)):
        of, costs = Workload((size,)), before if divided is whole else after
        found = costs.chunk_costs(divided.layout.chunks[chunk], of)[:3]
        wanted = before.chunk_costs(layout.chunks[chunk], of)
        for one, other in zip(found, wanted, strict=True):
            assert (one.forward_s, one.backward_s) == pytest.approx((other.forward_s, other.backward_s))
            assert one.activation_bytes == pytest.approx(other.activation_bytes, abs=2)
    keep, _, recompute, *mixed = after.chunk_costs(parts.layout.chunks[1], Workload((100,)))
    assert mixed
    for cost in mixed:
        assert recompute.activation_bytes < cost.activation_bytes < keep.activation_bytes
        assert keep.backward_s < cost.backward_s < recompute.backward_s
    # The backward recomputes one layer at a time.
    assert after.workspace_bytes(parts.layout.chunks[1], Workload((100,))) < 0.5 * (
        before.workspace_bytes(layout.chunks[1], Workload((100,)))
    )


def test_plans_keep_what_fits_and_name_the_limit_if_nothing_does() -> None:
    layout = Layout(2, (ModuleLayout(MODULE),), tuple(Chunk(MODULE, (i, i), i % 2) for i in range(4)))
    orders = {}
    for limit in (10**6, 8000, 2000):
        planner = StepPlanner(layout, Planning(budget_s=0.0), "gloo", StepMemory(limit))
        for step in range(20):
            sizes = tuple(4 + (5 * step + 7 * number) % 21 for number in range(8))
            planner.begin(step)
            if planner.is_measured:
                break
            planner.measurements.note(_measured(planner.order(sizes, True), 4), dict.fromkeys(range(4), 4.0))
        assert planner.is_measured
        if limit > 2000:
            orders[limit] = planner.order((20, 9, 12, 7, 16, 20, 5, 24), True)
            continue
        with pytest.raises(InfeasibleError, match=r"activation_bytes: 1\.953 KiB is not enough for this step: rank 0"):
            planner.order((24,) * 6, True)
    assert {each for row in orders[10**6].strategies for each in row} == {"keep"}
    chosen = [each for row in orders[8000].strategies for each in row]
    assert "keep" in chosen
    assert chosen.count("keep") < len(chosen)


def _measured(order: Order, num_stages: int) -> list[Row]:
    return [
        row
        for number, size in enumerate(order.sizes)
        for row in _rows(num_stages, size)
        if row.strategy == order.strategy(number, row.stage)
    ]


def _rows(num_stages: int, size: int) -> list[Row]:
    rows = []
    for stage, strategy in itertools.product(range(num_stages), OFFERED):
        backward = {"keep": 2e-3, "selective": 2.2e-3, "recompute": 3e-3}[strategy]
        held = {"keep": 100 * size + 3 * size**2, "selective": 80 * size, "recompute": 20 * size}[strategy]
        values = {"F": 1e-3 * size, "B": backward * size, BYTES: held}
        rows += [Row(stage, what, strategy, (size,), value) for what, value in values.items()]
    return rows


def test_steps_that_measure_hold_little_and_cover_all_strategies() -> None:
    memory, seen = StepMemory(1), set()
    for step in range(4):
        chosen = memory.to_measure(8, 4, step)
        assert len(chosen) == 8
        assert sum(each[0] != "recompute" for each in chosen) == 2
        seen |= {(each[0], number) for number, each in enumerate(chosen)}
    assert {strategy for strategy, _ in seen} == {"keep", "selective", "recompute"}


def test_memory_of_an_encoder_of_images_is_not_planned():
    layout = encoder_layout([0, 1, 0, 1], 2, 2, most_images=None, frozen=False)
    with pytest.raises(InputError, match="activation_bytes: is given for a model with an encoder of images"):
        StepPlanner(layout, Planning(budget_s=0.0), "gloo", StepMemory(1 << 30))
