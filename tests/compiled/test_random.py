"""The generator of compiled code against the same in Python's integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.compiled.random import below, draw, draw31, fraction, uniform


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**31 - 1))
def test_draws_equal_xorshift_in_pythons_integers(seed, limit):
    x, drawn = seed, []
    for _ in range(5):
        x ^= x >> 12
        x = (x ^ (x << 25)) % 2**64
        x ^= x >> 27
        drawn.append(x * 2685821657736338717 % 2**64)
    state = np.array([seed], np.uint64)
    assert draw(state) == drawn[0] >> 2
    assert draw31(state) == drawn[1] >> 33
    assert below(state, limit) == (drawn[2] >> 33) % limit
    assert uniform(state) == ((drawn[3] >> 33) + 0.5) / 2**31
    assert fraction(state) == ((drawn[4] >> 2) % 2**52 + 1) / 2**52
    assert state[0] == x
