from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.search import Share
from pipeloom.search.params import DEFAULTS
from pipeloom.search.stopping import Before, Begun, Both, Deadline, Evaluations, Meter, Stretch, Until, Watch


@pytest.mark.parametrize(
    ("seconds", "evaluations", "room"), [(8.0, None, 300.0), (None, 1000, 750.0), (8.0, 200, 150.0), (8.0, 600, 300.0)]
)
def test_room_of_a_part_of_the_budget(seconds, evaluations, room):
    """Three quarters of eight seconds at a hundred evaluations in two, and of so many evaluations."""
    watch = Watch(lambda: 0.0, 0.0, seconds, evaluations)
    assert watch.expected(100, 2.0, 0.75) == room


def test_a_part_that_is_over_before_it_begins_has_room_for_none():
    for seconds, evaluations in ((8.0, None), (None, 1000), (8.0, 200)):
        assert Watch(lambda: 0.0, 0.0, seconds, evaluations).expected(100, 2.0, -0.25) == 0.0


@given(st.floats(0, 1e-9), st.integers(0, 10))
def test_nothing_is_expected_of_a_speed_that_is_not_known(took_s, made):
    assert Deadline(1.0).start().expected(made, 0.0, 0.5) == 0.0
    assert Deadline(1.0).start().expected(0, took_s, 0.5) == 0.0
    assert Both(Deadline(1.0), Evaluations(3)).start().expected(made, 0.0, 0.5) == 0.0


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_longer_annealing_begins_no_colder(one, other):
    orders = DEFAULTS.orders
    heats = [orders.long_heat(changes) for changes in sorted((one, other))]
    assert orders.heat <= heats[0] <= heats[1] <= orders.most_heat


def test_a_short_annealing_begins_as_cold_as_ever_and_a_long_one_ten_times_hotter():
    orders = DEFAULTS.orders
    assert orders.long_heat(20) == orders.heat
    assert orders.long_heat(2_500) == pytest.approx(orders.most_heat)


def test_a_share_is_a_part_of_every_limit() -> None:
    watch = Share(Both(Deadline(8.0), Evaluations(11)), 0.25).start()
    assert (watch.seconds, watch.evaluations) == (2.0, 2)
    assert Share(Deadline(8.0), 0.5).start().evaluations is None
    assert Share(Evaluations(10), 1.0).start().seconds is None
    assert Share(Evaluations(10), 0.5).start().left(4, 9) == 1
    for part in (0.0, 1.5):
        with pytest.raises(InputError, match="is not above 0 and at most 1"):
            Share(Deadline(1.0), part)


def test_what_was_spent_before_the_search_counts():
    spent = [5.0]
    watch = Watch(lambda: spent[0], 5.0, 4.0, None)
    rule = Begun(watch)
    spent[0] = 8.0
    assert rule.start().share(0) == 0.75
    spent[0] = 9.0
    assert rule.start().left(0, 10) == 0


def test_orders_are_annealed_at_a_real_heat_where_no_time_is_left():
    assert DEFAULTS.orders.long_heat(-3.0) == DEFAULTS.orders.long_heat(0.0) > 0


def test_searches_one_after_the_other_share_what_a_watch_has_left() -> None:
    """Also where the watch began before the first of them, as planning's does."""
    now = [10.0]
    watch = Watch(lambda: now[0], 8.0, 10.0, 100)
    first = Until(watch, 0, 0.5).start()
    assert (first.seconds, first.evaluations) == (3.0, 50)
    now[0] = 12.0
    assert first.share(0) == pytest.approx(2 / 3)
    second = Until(watch, 60, 1.0).start()
    assert (second.seconds, second.evaluations) == (6.0, 40)
    over = Until(watch, 60, 0.3).start()
    assert (over.seconds, over.evaluations, over.left(0, 5)) == (0.0, 0, 0)


def test_a_meter_counts_for_all_that_share_it() -> None:
    now = [0.0]
    meter = Meter(Watch(lambda: now[0], 0.0, 10.0, 100))
    meter.used += 30
    assert meter.spent == 0.3
    assert (meter.left(50), meter.left(50, until=0.5), meter.left(50, until=0.3)) == (50, 20, 0)
    meter.take(4.0)
    assert meter.spent == 0.4
    now[0] = 6.0
    assert (meter.spent, meter.left(1)) == (1.0, 0)


def test_a_part_of_a_budget_is_divided_and_cools() -> None:
    stretch = Stretch(0.2, 1.0)
    assert stretch.first(0.25) == pytest.approx((0.2, 0.4))
    assert [stretch.cooling(spent) for spent in (0.2, 0.6, 1.0, 1.1)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_what_follows_a_search_is_kept_once_and_of_seconds_alone() -> None:
    watch = Before(Both(Deadline(8.0), Evaluations(11)), 0.002).start()
    kept = watch.before(1000)
    assert (kept.seconds, kept.evaluations) == (6.0, 11)
    assert kept.before(1000) == kept
    assert watch.before(10_000).seconds == 0.0
    assert Deadline(8.0).start().before(1000).seconds == 8.0
    only_counted = Before(Evaluations(11), 0.002).start().before(1000)
    assert (only_counted.seconds, only_counted.evaluations) == (None, 11)
