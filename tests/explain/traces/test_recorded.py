"""Traces that torch.profiler recorded of PyTorch's own schedules on two gloo ranks, cut to what is read of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.explain.traces.explained import Explanation
from pipeloom.explain.traces.read import explain_traces
from pipeloom.search import Budget
from pipeloom.taskgraph import KIND_NAMES

RECORDED = Path(__file__).parent / "recorded"
ORDERS = {
    "gpipe": ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"),
    "1f1b": ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"),
    "interleaved": (
        "0F0 0F1 2F0 2F1 0F2 2B0 2F2 2B1 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3F2 1B1 3B2 1B2",
    ),
}
"""What PyTorch runs with three microbatches: two stages of a rank are cut by its interleaved schedule alone."""


@pytest.fixture(scope="module", params=list(ORDERS))
def found(request: pytest.FixtureRequest) -> tuple[str, Explanation]:
    return request.param, explain_traces([RECORDED / request.param], budget=Budget(evaluations=20))


def test_every_computation_is_found_in_the_schedules_order(found: tuple[str, Explanation]) -> None:
    name, explained = found
    for iteration in explained.run.iterations:
        for rank, expected in zip(iteration.ranks, ORDERS[name], strict=True):
            order = [f"{one.unit.stage}{KIND_NAMES[one.unit.kind]}{one.unit.microbatch}" for one in rank]
            if name == "interleaved":
                assert sorted(order) == sorted(expected.split())
            else:
                assert order == expected.split()


def test_replays_come_out(found: tuple[str, Explanation]) -> None:
    _, explained = found
    assert len(explained.replays) == 2
    for one in explained.replays:
        assert abs(one.error) < 0.03
        assert max(map(abs, one.bubble_errors)) < 0.05
        assert (one.compute_ns + one.measured_idle_ns.sum(axis=1) == one.measured_ns).all()
        assert (one.measured_idle_ns >= 0).all()


def test_messages_have_sizes(found: tuple[str, Explanation]) -> None:
    _, explained = found
    assert explained.layers.boundary_bytes == 64 * 128 * 4
    assert explained.run.clock_shift_ns == (0, 0)
    # The first stage has half as many blocks again, but one block has no half: all stages are equal.
    assert all(layer.forward_s > 0 and layer.total_backward_s > 0 for layer in explained.layers.layers)
