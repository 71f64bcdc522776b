from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost.mixtures import LayerOption
from pipeloom.errors import InputError
from pipeloom_instances.candidates import pair_candidates


def test_without_a_limit_everyone_gets_the_fastest():
    layer = [LayerOption("keep", 10, 20, 100), LayerOption("full", 10, 30, 10)]
    options = pair_candidates([layer] * 3, 4)
    assert options[0] == ("keep", 30, 60, 0, 300, 300, ("keep",) * 3, 0)
    assert options[-1].activation_bytes == 30
    assert [c.strategy for c in options] == ["keep", "mixed", "full"]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.integers(2, 10),
)
def test_candidates_are_the_best_of_their_range(layers, most):
    options = [[LayerOption(f"s{i}", *row) for i, row in enumerate(rows)] for rows in layers]
    found = pair_candidates(options, most)
    everything = [(sum(o[3] for o in c), sum(o[1] + o[2] for o in c)) for c in product(*options)]
    assert 1 <= len(found) <= most
    times = [c.forward_ns + c.backward_ns for c in found]
    assert times == sorted(times)
    assert times[0] == min(time for _, time in everything)
    assert found[-1].activation_bytes == min(held for held, _ in everything)
    for c, time in zip(found, times, strict=True):
        assert time == min(t for held, t in everything if held <= c.activation_bytes)


def test_candidates_of_nothing_are_refused():
    with pytest.raises(InputError, match="layer without options"):
        pair_candidates([[]])
    with pytest.raises(InputError, match="1 is below 2"):
        pair_candidates([[LayerOption("keep", 1, 1, 1)]], 1)
