"""AdaPtis' performance model: its parts add up, and a hand-solved case."""

from __future__ import annotations

from hypothesis import given, settings

from pipeloom.arrange import Arrangement, LayerChain, Rule, chain_of_layers, schedule_of
from pipeloom.arrange.performance import performance
from pipeloom.arrange.systems import run_system
from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.timeline import simulate
from tests.arrange.chains import arranged_chains


@settings(deadline=None, max_examples=60)
@given(arranged_chains())
def test_the_parts_make_the_iteration(case: tuple[LayerChain, Arrangement, Rule]) -> None:
    chain, arrangement, rule = case
    graph, schedule = schedule_of(chain, arrangement, rule)
    timeline = simulate(graph, schedule)
    for device, peak in zip(
        performance(graph, schedule, timeline), timeline.peak_bytes.tolist(), strict=True
    ):
        parts = device.compute_ns + device.communication_ns + device.bubble_ns - device.overlap_ns
        assert parts == timeline.makespan_ns
        assert device.bubble_ns >= 0
        assert 0 <= device.overlap_ns <= device.communication_ns
        assert device.activation_bytes + device.weight_bytes <= peak == device.peak_bytes
        assert peak <= device.weight_bytes + device.activation_bytes + device.gradient_bytes


def test_two_stages_by_hand() -> None:
    # F 0-2 on rank 0, message 2-5, F 5-7, B 7-9, message 9-12, B 12-14.
    layer = LayerCost("layer", 2e-9, 3, 0, backward_s=2e-9, static_bytes=7)
    chain = chain_of_layers(LayerTable("two", 2, 1, 3e-9, 0, (layer, layer)))
    found = run_system("S-1F1B", chain)
    first, second = performance(found.graph, found.schedule, found.timeline)
    assert (first.compute_ns, first.communication_ns, first.bubble_ns, first.overlap_ns) == (4, 3, 7, 0)
    assert (second.compute_ns, second.communication_ns, second.bubble_ns, second.overlap_ns) == (4, 3, 7, 0)
    assert (first.activation_bytes, first.gradient_bytes, first.weight_bytes, first.peak_bytes) == (
        3,
        0,
        7,
        10,
    )
