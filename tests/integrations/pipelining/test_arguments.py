"""Arguments of `PlannedSchedule` and `Planning` that are none are refused where they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from pipeloom.errors import InputError
from pipeloom.integrations.pipelining.schedule import PlannedSchedule, _checked
from pipeloom.integrations.steps.planning import Planning, UpcomingSizes, check_whole, checked_sizes


@pytest.mark.parametrize("change", [{"backward": "x"}, {"order": 5}, {"budget_s": math.nan}, {"budget_s": "1"}])
def test_planning_of_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"planner.{next(iter(change))}: "):
        Planning(**change)


def test_a_number_of_microbatches_by_position_is_refused() -> None:
    with pytest.raises(InputError, match="planner: is of type int, not Planning; give n_microbatches by name"):
        PlannedSchedule([], 8, loss_fn=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, -1, 2.5, "x", True, 10**30, math.nan])
def test_a_number_of_microbatches_is_a_whole_one(number: Any) -> None:
    with pytest.raises(InputError, match="n_microbatches: "):
        check_whole("n_microbatches", number)


@pytest.mark.parametrize("size", [math.nan, math.inf, "x", None, 10**30, 0, -1, [1]])
def test_sizes_are_numbers(size: Any) -> None:
    with pytest.raises(InputError, match="sizes, microbatch 1: "):
        checked_sizes([3, size])
    assert checked_sizes([3, 2.0]) == (3, 2)


def test_a_step_that_is_repeated_has_the_same_sizes() -> None:
    sizes = UpcomingSizes([[3, 4], [5]])
    with pytest.raises(InputError, match="sizes: step 0 has 2, and 1 microbatches"):
        sizes.take(0, 1)
    for _ in range(2):
        assert sizes.take(0, 2) == (3, 4)
    assert sizes.following == (5,)
    assert sizes.take(1, 1) == (5,)
    for _ in range(2):
        with pytest.raises(InputError, match="sizes: ends after 2 steps"):
            sizes.take(2, 1)


@pytest.mark.parametrize("step", [0, 1])
def test_invalid_sizes_are_refused_in_their_own_step(step: int) -> None:
    sizes = UpcomingSizes([[3, 4]] * step + [[math.nan], [5]])
    for number in range(step):
        assert sizes.take(number, 2) == (3, 4)
    assert sizes.following is None
    for _ in range(2):
        with pytest.raises(InputError, match="sizes, microbatch 0: 'nan' is not a finite number"):
            sizes.take(step, 1)


def test_a_stage_whose_parts_alone_are_sharded_is_refused() -> None:
    """Their gradients would not be reduced."""
    stage = object.__new__(PipelineStage)
    stage.submod = torch.nn.Sequential(torch.nn.Linear(1, 1))
    stage.submod[0].__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
    with pytest.raises(InputError, match=r"stages\[0\]: has modules under fully_shard, and is not under it itself"):
        _checked([stage])
