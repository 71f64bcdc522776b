from __future__ import annotations

import pytest

from pipeloom.runtime import launch

from .on_ranks import against_theirs, changing, refused

pytestmark = pytest.mark.ranks


def test_gradients_are_those_of_pytorchs_schedules() -> None:
    for found in launch(against_theirs, 2, [0, 1, 2, 3], timeout_s=60.0):
        assert found["plans"] == 8
        assert found["kinds"] == ["1f1b", "interleaved", "v", "zero bubble"]


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_of_many_random_plans(num_ranks: int) -> None:
    for found in launch(against_theirs, num_ranks, list(range(100, 200)), timeout_s=120.0):
        assert found["plans"] == 200


@pytest.mark.parametrize("several", [False, True])
def test_microbatches_differ_from_step_to_step(several: bool) -> None:
    for found in launch(changing, 2, several, timeout_s=60.0):
        assert found["steps"] == 8


def test_nonsense_is_told_in_one_line_on_every_rank() -> None:
    for told in launch(refused, 2, timeout_s=60.0):
        print(told)
