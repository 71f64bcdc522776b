"""Arguments of `PlannedSchedule` and `Planning` that are none are refused where they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.steps.planning import Planning, check_whole, checked_sizes


@pytest.mark.parametrize("change", [{"backward": "x"}, {"order": 5}, {"budget_s": math.nan}, {"budget_s": "1"}])
def test_planning_of_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"planner.{next(iter(change))}: "):
        Planning(**change)


@pytest.mark.parametrize("number", [0, -1, 2.5, "x", True, 10**30, math.nan])
def test_a_number_of_microbatches_is_a_whole_one(number: Any) -> None:
    with pytest.raises(InputError, match="n_microbatches: "):
        check_whole("n_microbatches", number)


@pytest.mark.parametrize("size", [math.nan, math.inf, "x", None, 10**30, 0, -1, [1]])
def test_sizes_are_numbers(size: Any) -> None:
    with pytest.raises(InputError, match="sizes, microbatch 1: "):
        checked_sizes([3, size])
    assert checked_sizes([3, 2.0]) == (3, 2)
