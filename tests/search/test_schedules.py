"""One registry of static schedules by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from pipeloom.errors import InputError
from pipeloom.search.schedules import SCHEDULES, ScheduleSettings, schedule_name
from pipeloom.spec.current_run import RunSchedule
from pipeloom.timeline import check
from tests.chains import uniform_chain

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"


def test_every_name_that_a_run_may_have_is_registered() -> None:
    assert tuple(SCHEDULES) == get_args(RunSchedule)


def test_the_page_lists_every_schedule() -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| `schedule` |"))
    assert set(re.findall(r"`(\w+)`", row)) - {"schedule"} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("as_megatron", [False, True])
def test_every_form_of_a_schedule_is_feasible(name: RunSchedule, as_megatron: bool) -> None:
    graph = uniform_chain(4, 8, split=SCHEDULES[name].splits_backward)
    for order in SCHEDULES[name].orders(4, ScheduleSettings(as_megatron=as_megatron)):
        assert check(graph, order(graph)) == ()


def test_names_in_pytorch_lead_to_names_here_and_no_two_schedules_share_one() -> None:
    words = [word for name, schedule in SCHEDULES.items() for word in {name, schedule.pytorch} if word]
    assert len(set(words)) == len(words)
    assert schedule_name("Interleaved1F1B") == "interleaved"
    with pytest.raises(InputError, match="'dualpipe' is none of gpipe"):
        schedule_name("dualpipe")
