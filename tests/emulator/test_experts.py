"""Layers of experts: dispatchers, a product for each expert, and eager biases and clamps."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from pipeloom.emulator import modules as m
from pipeloom.emulator.build import Placement
from pipeloom.emulator.rules import Device, RuleTable
from pipeloom.emulator.tape import NIC, NVLINK, Context, Group
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import Workload
from pipeloom.spec.catalog import load_cluster
from pipeloom.spec.hardware import EfficiencySpec
from pipeloom.spec.parallelism import Degrees
from tests.emulator.cases import PLAIN

WORK = Workload((64,))
EXPERTS = m.MixtureOfExperts(8, 16, 2, hidden=16)
"""16 experts of which a token of width 16 chooses two."""
EIGHT = Context(expert=8, expert_group=Group(NVLINK, 1.0, 8), fused_experts=False)
TWO_NODES = dataclasses.replace(EIGHT, expert_group=Group(NIC, 1.0, 4))


def costs(module: m.MixtureOfExperts, context: Context, part: str = "F"):
    """Return the operators of a pass."""
    return LayerTemplate(module, 16, context, PLAIN).passes["keep"].programs[part].costs


def sent(context: Context, part: str = "F", module: m.MixtureOfExperts = EXPERTS) -> float:
    """Return the bytes of a pass over the link, in copies of all tokens."""
    return sum(cost.network.of(WORK) for cost in costs(module, context, part)) / (64 * 16 * 2)


def kinds(module: m.MixtureOfExperts, context: Context, part: str = "F") -> list[str]:
    return [cost.kind for cost in costs(module, context, part)]


@pytest.mark.parametrize(
    ("dispatcher", "copies"),
    [
        ("alltoall", 2 * 7 / 8),
        ("allgather", 7),
        # Two experts are on 2 - 1/8 devices.
        ("deepep", (2 - 1 / 8) * 7 / 8),
        ("hybridep", (2 - 1 / 8) * 7 / 8),
    ],
)
def test_dispatchers_send_different_numbers_of_copies(dispatcher, copies):
    context = dataclasses.replace(EIGHT, dispatcher=dispatcher)
    # There and back, and the same of gradients.
    assert sent(context) == pytest.approx(2 * copies)
    assert sent(context, "B") == pytest.approx(2 * copies)


def test_over_the_network_deepep_sends_a_token_once_to_each_node():
    all_to_all, once = (sent(dataclasses.replace(TWO_NODES, dispatcher=d)) for d in ("alltoall", "deepep"))
    assert all_to_all == pytest.approx(2 * 2 * 4 / 8)
    # Two experts are on 1.5 of two nodes, one of which is its own.
    assert once == pytest.approx(2 * 1.5 / 2)
    # If all its experts are on one of the two nodes, half of the tokens stay.
    near = msgspec.structs.replace(EXPERTS, groups=2, chosen_groups=1)
    assert sent(dataclasses.replace(TWO_NODES, dispatcher="deepep"), module=near) == pytest.approx(2 / 2)


def test_computation_hides_a_share_of_the_messages():
    for dispatcher in ("alltoall", "hybridep"):
        context = dataclasses.replace(EIGHT, dispatcher=dispatcher)
        hidden = dataclasses.replace(context, hidden_expert=0.75)
        assert sent(hidden) == pytest.approx(sent(context) / 4)


def test_rows_are_sorted_by_expert_unless_the_dispatcher_does():
    number = {
        d: kinds(EXPERTS, dataclasses.replace(EIGHT, dispatcher=d)).count("permute") for d in ("alltoall", "deepep")
    }
    assert number == {"alltoall": 4, "deepep": 2}
    one_each = msgspec.structs.replace(EXPERTS, experts=8)
    assert kinds(one_each, EIGHT).count("permute") == 2


def test_experts_multiply_one_after_the_other():
    """Each product is as efficient as one of its size, and takes a launch."""
    grouped = [cost for cost in costs(EXPERTS, EIGHT) if cost.kind == "grouped_matmul"]
    assert [cost.pieces for cost in grouped] == [2, 2]
    assert {cost.pieces for cost in costs(EXPERTS, dataclasses.replace(EIGHT, fused_experts=True))} == {1}
    slope = EfficiencySpec(flops=((1e-3, 0.25), (4e-3, 0.75)))
    device = Device("gpu", flops_per_s=1e12, launch_s=1e-5, efficiency={"matmul": slope})
    table = RuleTable((device,), ("matmul",) * 4, np.zeros(4, np.int64), np.zeros(4), np.array([1.0, 4.0, 1.0, 4.0]))
    seconds = table.durations_ps(np.array([[4e9, 0, 0], [4e9, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])) / 1e12
    assert seconds == pytest.approx([4e-3 / 0.75, 4e-3 / 0.25, 1e-5, 4e-5])


def test_products_of_experts_overlap_operations_with_memory_only_in_part():
    device = Device("gpu", flops_per_s=1e12, memory_bytes_per_s=1e12)
    kinds = ("grouped_matmul", "grouped_matmul@fp8", "grouped_matmul", "matmul")
    table = RuleTable((device,), kinds, np.zeros(4, np.int64), np.zeros(4), np.array([2.0, 2.0, 1.0, 2.0]))
    seconds = table.durations_ps(np.array([[3e9, 4e9, 0]] * 4)) / 1e12
    assert seconds == pytest.approx([5e-3, 5e-3, 4e-3, 4e-3])


def test_biases_and_clamps_of_experts_are_eager_unless_they_are_fused():
    biased = msgspec.structs.replace(EXPERTS, expert_bias=True, clamped=True)
    plain, more = kinds(EXPERTS, EIGHT), kinds(biased, EIGHT)
    assert sorted(more) == sorted([*plain, "clamp", "add"])
    fused = dataclasses.replace(EIGHT, fused_experts=True)
    assert kinds(biased, fused) == kinds(EXPERTS, fused)
    one, two = (LayerTemplate(module, 16, EIGHT, PLAIN).num_parameters for module in (EXPERTS, biased))
    assert two - one == 16 * (2 * 8 + 16)


def test_peers_in_a_node_without_a_link_are_reached_over_the_network():
    cluster = load_cluster("8xH100")
    bare = msgspec.structs.replace(cluster, device=msgspec.structs.replace(cluster.device, nvlink_bytes_per_s=0.0))
    group = Placement(bare, Degrees(data=8, expert=8)).group(8)
    assert sent(Context(expert=8, expert_group=group)) == pytest.approx(2 * 2 * 7 / 8)
    assert sent(Context(expert=8, expert_group=group, dispatcher="deepep")) == pytest.approx(2 * (2 - 1 / 8) * 7 / 8)


@pytest.mark.parametrize("degrees", [{"expert": 32}, {"expert": 6}, {"expert": 2, "expert_tensor": 3}, {"tensor": 16}])
def test_experts_that_devices_cannot_divide_are_refused(degrees):
    with pytest.raises(InputError, match="is not a multiple of"):
        costs(EXPERTS, Context(**degrees))
