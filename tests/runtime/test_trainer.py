import pytest

from pipeloom.runtime import launch
from tests.runtime.training import losses_on_rank, losses_undivided

ITERATIONS = 8


@pytest.fixture(scope="module")
def undivided() -> list[float]:
    return losses_undivided(ITERATIONS)


def train(num_ranks: int, disturb: str) -> tuple[list[float], list[bool], list[str]]:
    ranks = launch(losses_on_rank, num_ranks, num_ranks, ITERATIONS, disturb)
    losses, fresh, reasons = zip(*ranks[0], strict=True)
    for other in ranks[1:]:
        assert [loss for loss, _, _ in other] == list(losses)
    return list(losses), list(fresh), list(reasons)


@pytest.mark.parametrize("disturb", ["nothing", "tag zero"])
def test_training_over_ranks_equals_undivided_training(undivided: list[float], disturb: str) -> None:
    losses, fresh, _ = train(3, disturb)
    assert losses == pytest.approx(undivided, abs=1e-8, rel=0)
    assert losses[-1] < losses[0]
    assert all(fresh)


def test_a_killed_planner_costs_no_batch(undivided: list[float]) -> None:
    losses, fresh, reasons = train(4, "kill")
    assert losses == pytest.approx(undivided, abs=1e-8, rel=0)
    assert fresh[:3] == [True] * 3
    assert not fresh[3]
    assert reasons[3] == "the planner is not running"
    assert set(reasons) <= {"", "the planner is still starting", "the planner is not running"}
    assert fresh[7], "the planner was started again, and its plans are used again"


def test_a_planner_that_always_dies_is_done_without(undivided: list[float]) -> None:
    losses, fresh, _ = train(2, "kill for good")
    assert losses == pytest.approx(undivided, abs=1e-8, rel=0)
    assert fresh[1:] == [False] * (ITERATIONS - 1)


def test_answers_that_are_nonsense_are_not_run(undivided: list[float]) -> None:
    losses, fresh, reasons = train(2, "garbage")
    assert losses == pytest.approx(undivided, abs=1e-8, rel=0)
    assert [i for i, ok in enumerate(fresh) if not ok] == [3, 5]
    assert "is not valid" in reasons[3]
    assert "for iteration 3, not 5" in reasons[5]


def test_a_hung_planner_is_waited_for_no_longer_than_the_deadline(undivided: list[float]) -> None:
    losses, fresh, reasons = train(2, "hang")
    assert losses == pytest.approx(undivided, abs=1e-8, rel=0)
    assert not fresh[3]
    assert "no plan within the deadline" in reasons[3]
    assert fresh[-1]
