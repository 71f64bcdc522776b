"""Orders that steps follow before the search has one."""

from __future__ import annotations

import pytest

from pipeloom.integrations.steps.costs import Row, stage_profile
from pipeloom.integrations.steps.orders import KnownOrders
from pipeloom.integrations.steps.planning import Planning, StepPlanner
from pipeloom.integrations.steps.running import stage_layout
from pipeloom.plan import Verb

LAYOUT = stage_layout([0, 1, 0, 1], 2)


@pytest.mark.parametrize(
    ("backward", "of_step"), [("whole", ["B"] * 5), ("split", ["IW"] * 5), ("either", ["B", "B", "IW", "B", "B"])]
)
def test_whole_and_split_backwards_run_in_steps_that_measure_them(backward: str, of_step: list[str]) -> None:
    planner = StepPlanner(LAYOUT, Planning(budget_s=0.0, backward=backward), "gloo")  # type: ignore[arg-type]
    found = []
    for step in range(5):
        planner.begin(step)
        order = planner.order((8, 3, 5, 8), True)
        verbs = [action.verb for actions in order.plan.ranks for action in actions]
        found.append("".join(str(verb) for verb in (Verb.B, Verb.I, Verb.W) if verb in verbs))
        assert verbs.count(Verb.F) == 16
        planner.order((8, 3, 5, 8), False)
    assert found == of_step
    assert planner.counts == {"heuristic": 5}


def test_sizes_of_outputs_are_returned_again_when_their_first_step_is_repeated() -> None:
    """Ranks whose step fails before it runs have not got them."""
    planner = StepPlanner(LAYOUT, Planning(budget_s=0.0), "gloo")
    for step in range(4):
        assert planner.begin(step) is None
        planner.measurements.note([], dict.fromkeys(range(4), 64.0))
    for _ in range(2):
        assert planner.begin(4) == (64.0,) * 4
    assert planner.begin(5) is None


def test_an_order_that_was_not_received_is_sent_again() -> None:
    """Making the executor may have failed."""
    order, orders = StepPlanner(LAYOUT, Planning(budget_s=0.0), "gloo").order((8, 3), True), KnownOrders(LAYOUT)
    orders.message(order, ((8,), (3,)), False, None)
    message = orders.message(order, ((8,), (3,)), False, None)
    assert orders.receive(message).order is order
    assert orders.message(order, ((8,), (3,)), False, None).order is None


def test_sizes_of_outputs_are_measured_beside_a_given_profile() -> None:
    profile = stage_profile([Row(0, "F", "keep", (8,), 1.0)], LAYOUT)
    planner = StepPlanner(LAYOUT, Planning(budget_s=0.0, profile=profile), "gloo")
    assert planner.begin(0) is None
    assert planner.measures
    planner.order((8, 3), True)
    planner.measurements.note([Row(0, "F", "keep", (8,), 9.0)], dict.fromkeys(range(4), 64.0))
    assert planner.begin(1) == (64.0,) * 4
    assert not planner.measures
    shapes = {action.shape for actions in planner.order((8, 3), True).plan.ranks for action in actions if action.shape}
    assert shapes == {(8, 64), (3, 64)}
    assert planner.problem.profile_costs.profile == profile
