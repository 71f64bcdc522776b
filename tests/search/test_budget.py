from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom
from pipeloom.errors import InputError
from pipeloom.search.budget import Budget, Stretch
from pipeloom.search.params import DEFAULTS


@pytest.mark.parametrize(
    ("seconds", "evaluations", "room"), [(8.0, None, 300.0), (None, 1000, 750.0), (8.0, 200, 150.0), (8.0, 600, 300.0)]
)
def test_room_of_a_part_of_the_budget(seconds, evaluations, room):
    """Three quarters of eight seconds at a hundred evaluations in two, and of a limit on evaluations."""
    meter = Budget(seconds=seconds, evaluations=evaluations).start()
    assert meter.expected(100, 2.0, 0.75) == room
    # A part that is over before it begins has room for none.
    assert meter.expected(100, 2.0, -0.25) == 0.0


@given(st.floats(0, 1e-9), st.integers(0, 10))
def test_nothing_is_expected_of_a_speed_that_is_not_known(took_s, made):
    assert Budget(seconds=1.0).start().expected(made, 0.0, 0.5) == 0.0
    assert Budget(seconds=1.0).start().expected(0, took_s, 0.5) == 0.0
    assert Budget(seconds=1.0, evaluations=3).start().expected(made, 0.0, 0.5) == 0.0


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_longer_annealing_begins_no_colder(one, other):
    orders = DEFAULTS.orders
    heats = [orders.long_heat(changes) for changes in sorted((one, other))]
    assert orders.heat <= heats[0] <= heats[1] <= orders.most_heat


def test_a_short_annealing_begins_as_cold_as_ever_and_a_long_one_ten_times_hotter():
    orders = DEFAULTS.orders
    assert orders.long_heat(20) == orders.heat
    assert orders.long_heat(2_500) == pytest.approx(orders.most_heat)


def test_orders_are_annealed_at_a_real_heat_where_no_time_is_left():
    assert DEFAULTS.orders.long_heat(-3.0) == DEFAULTS.orders.long_heat(0.0) > 0


def test_invalid_budgets() -> None:
    for budget, problem in (
        ({}, "budget: has neither seconds nor evaluations; give one of them, or both"),
        ({"seconds": -1.0}, "budget: -1.0 s is not at least 0"),
        ({"seconds": float("nan"), "evaluations": 3}, "budget: nan s is not at least 0"),
        ({"seconds": 1.0, "evaluations": -2}, "budget: -2 evaluations is not at least 0"),
    ):
        with pytest.raises(InputError) as raised:
            Budget(**budget)
        assert str(raised.value) == problem


def test_a_part_is_a_fraction_of_every_limit() -> None:
    assert Budget(seconds=8.0, evaluations=11).part(0.25) == Budget(seconds=2.0, evaluations=2)
    assert Budget(seconds=8.0, clock="cpu").part(0.5) == Budget(seconds=4.0, clock="cpu")
    assert Budget(evaluations=10).part(1.0) == Budget(evaluations=10)
    assert Budget(evaluations=1).part(0.5) == Budget(evaluations=1)
    for part in (0.0, 1.5):
        with pytest.raises(InputError, match="is not above 0 and at most 1"):
            Budget(seconds=1.0).part(part)


def test_deprecated_names_make_budgets() -> None:
    assert pipeloom.Deadline(2.0, "cpu") == Budget(seconds=2.0, clock="cpu")
    assert pipeloom.Evaluations(20) == Budget(evaluations=20)


def test_what_was_spent_before_the_search_counts():
    now = [5.0]
    begun = Budget(seconds=4.0, clock=lambda: now[0]).from_now()
    now[0] = 8.0
    assert begun.start().spent == begun.from_now().start().spent == 0.75
    now[0] = 9.0
    assert begun.start().left(10) == 0


def test_consecutive_searches_share_what_is_left() -> None:
    now = [8.0]
    meter = Budget(seconds=10.0, evaluations=100, clock=lambda: now[0]).start()
    now[0] = 10.0
    first = meter.rest(0.5).start()
    assert (first.budget.seconds, first.budget.evaluations, first.used) == (3.0, 50, 0)
    now[0] = 12.0
    assert first.spent == pytest.approx(2 / 3)
    meter.used += 60
    second = meter.rest()
    assert (second.seconds, second.evaluations) == (6.0, 40)
    over = meter.rest(0.3)
    assert (over.seconds, over.evaluations, over.start().left(5)) == (0.0, 0, 0)


def test_the_rest_ends_with_the_budget_also_if_its_search_begins_later() -> None:
    now = [0.0]
    meter = Budget(seconds=10.0, clock=lambda: now[0]).start()
    now[0] = 4.0
    rest = meter.rest()
    now[0] = 9.0
    search = rest.start()
    assert search.left(1) == 1
    now[0] = 10.0
    assert search.left(1) == 0


def test_a_meter_counts_for_all_that_share_it() -> None:
    now = [0.0]
    meter = Budget(seconds=10.0, evaluations=100, clock=lambda: now[0]).start()
    meter.used += 30
    assert meter.spent == 0.3
    assert (meter.left(50), meter.left(50, until=0.5), meter.left(50, until=0.3)) == (50, 20, 0)
    meter.add(4.0)
    assert meter.spent == 0.4
    now[0] = 6.0
    assert (meter.spent, meter.left(1)) == (1.0, 0)


def test_a_search_that_begins_after_the_clock_ran_out_ends_at_once() -> None:
    meter = Budget(seconds=10.0, clock=lambda: inf).start()
    assert (meter.spent, meter.left(1)) == (1.0, 0)


def test_a_part_of_a_budget_is_divided_and_cools() -> None:
    stretch = Stretch(0.2, 1.0)
    assert stretch.first(0.25) == pytest.approx((0.2, 0.4))
    assert [stretch.cooling(spent) for spent in (0.2, 0.6, 1.0, 1.1)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_what_follows_a_search_is_reserved_once_and_of_seconds_alone() -> None:
    def limits(budget: Budget, *num_tasks: int) -> tuple[float | None, int | None]:
        meter = budget.start()
        for number in num_tasks:
            meter.reserve(number)
        return meter.budget.seconds, meter.budget.evaluations

    both = Budget(seconds=8.0, evaluations=11, task_s=0.002)
    assert limits(both) == (8.0, 11)
    assert limits(both, 1000) == limits(both, 1000, 1000) == (6.0, 11)
    assert limits(both, 10_000) == (0.0, 11)
    assert limits(Budget(seconds=8.0), 1000) == (8.0, None)
    assert limits(Budget(evaluations=11, task_s=0.002), 1000) == (None, 11)
