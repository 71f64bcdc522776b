from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeloom.runtime.launch.coordination import Exchange, estimate_offset

WAYS = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))


@given(st.integers(-(10**15), 10**15), st.lists(WAYS, min_size=1, max_size=10), st.integers(0, 10**12))
def test_an_offset_is_never_further_off_than_it_says(offset: int, ways: list[tuple[int, int]], begin: int) -> None:
    """Fake clocks: what each of the two ways takes is anything."""
    exchanges = []
    for there, back in ways:
        exchanges.append(Exchange(begin + offset, begin + there, begin + there + back + offset))
        begin += there + back + 1000
    found = estimate_offset(exchanges)
    assert abs(found.ns - offset) <= found.error_ns
    assert found.error_ns <= min(there + back for there, back in ways) / 2 + 1
