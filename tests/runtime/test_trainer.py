import pytest

from pipeloom.runtime.launch.processes import launch
from tests.runtime.training import Step, losses_undivided, steps_on_rank

pytestmark = pytest.mark.ranks

ITERATIONS = 8


@pytest.fixture(scope="module")
def undivided() -> list[float]:
    return losses_undivided(ITERATIONS)


def train(num_ranks: int, disturbances: list[str], undivided: list[float]) -> dict[str, list[Step]]:
    """Train over ranks while something goes wrong: the losses are those of undivided training, on every rank."""
    ranks = launch(steps_on_rank, num_ranks, num_ranks, len(undivided), disturbances)
    for disturb in disturbances:
        for rank in ranks:
            assert [step.loss for step in rank[disturb]] == pytest.approx(undivided, abs=1e-8, rel=0), disturb
        assert all(step.fresh == (not step.reason) for step in ranks[0][disturb])
    return dict(ranks[0])


@pytest.fixture(scope="module")
def disturbed(undivided: list[float]) -> dict[str, list[Step]]:
    """What goes wrong on two ranks, one after the other: starting ranks takes longer than running them."""
    return train(2, ["garbage", "hang", "store fails"], undivided)


@pytest.fixture(scope="module")
def disturbed_more(undivided: list[float]) -> dict[str, list[Step]]:
    return train(2, ["kill for good", "other shapes", "slow", "store hangs"], undivided)


@pytest.mark.parametrize(
    "disturbances", [["nothing", "replicated"], pytest.param(["tag zero"], marks=pytest.mark.full)], ids="-".join
)
def test_training_over_ranks_equals_undivided_training(undivided: list[float], disturbances: list[str]) -> None:
    # The fourth batch has no images.
    for steps in train(3, disturbances, undivided[:5]).values():
        assert steps[-1].loss < steps[0].loss
        assert all(step.fresh for step in steps)


def test_a_killed_planner_costs_no_batch(undivided: list[float]) -> None:
    steps = train(4, ["kill"], undivided)["kill"]
    assert [step.reason for step in steps[:4]] == ["", "", "", "the planner is not running"]
    assert {step.reason for step in steps} <= {"", "the planner is still starting", "the planner is not running"}
    assert steps[7].fresh, "the planner was started again, and its plans are used again"


@pytest.mark.full
def test_a_planner_that_always_dies_is_done_without(disturbed_more: dict[str, list[Step]]) -> None:
    steps = disturbed_more["kill for good"]
    # The plan of the next batch may have come before the end did.
    assert not any(step.fresh for step in steps[2:])
    assert steps[-1].reason.endswith("and is disabled")


@pytest.mark.full
def test_answers_that_are_nonsense_are_not_run(disturbed: dict[str, list[Step]]) -> None:
    steps = disturbed["garbage"]
    assert [i for i, step in enumerate(steps) if not step.fresh] == [3, 5]
    assert "is not valid" in steps[3].reason
    assert "for iteration 3, not 5" in steps[5].reason


@pytest.mark.full
def test_plans_for_other_shapes_are_not_run(disturbed_more: dict[str, list[Step]]) -> None:
    steps = disturbed_more["other shapes"]
    assert [i for i, step in enumerate(steps) if not step.fresh] == [3, 5]
    assert "the plan does not fit the batch" in steps[3].reason
    assert "the plan does not fit the batch" in steps[5].reason


def test_a_hung_planner_is_waited_for_no_longer_than_the_deadline(disturbed: dict[str, list[Step]]) -> None:
    steps = disturbed["hang"]
    assert "no plan within the deadline" in steps[3].reason
    assert steps[-1].fresh


@pytest.mark.full
def test_a_slow_planner_is_waited_for_no_longer_than_the_deadline(disturbed_more: dict[str, list[Step]]) -> None:
    steps = disturbed_more["slow"]
    late = "no plan within the deadline of 0.1 s"
    assert [step.reason for step in steps[:3]] == [late] * 3
    # Then it is taken to hang, and started again.
    assert steps[3].reason == "the planner is still starting"
    assert {step.reason for step in steps} == {late, "the planner is still starting"}


def assert_replaced(steps: list[Step], reason: str) -> None:
    assert all(step.fresh for step in steps[:3])
    # Only a call that has waited for long shows that the store hangs, and not that the planner is late.
    assert steps[3].reason in (reason, "no plan within the deadline of 0.5 s")
    assert reason in [step.reason for step in steps[3:6]]
    assert steps[-1].fresh, "another store and another planner took over"


def test_a_lost_store_is_replaced(disturbed: dict[str, list[Step]]) -> None:
    assert_replaced(disturbed["store fails"], "the plan store is gone")


@pytest.mark.full
def test_a_store_that_hangs_is_replaced(disturbed_more: dict[str, list[Step]]) -> None:
    assert_replaced(disturbed_more["store hangs"], "the plan store has not answered for 1 s")
