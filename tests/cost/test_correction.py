from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Correction, fit_link
from pipeloom.errors import InputError


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_a_link_is_found_again_though_some_messages_were_held_up(seed: int, latency_s: float, rate: float) -> None:
    rng = random.Random(seed)
    sizes = [size for size in (1000, 5000, 20_000, 10**6) for _ in range(12)]
    messages = [(size, latency_s + rate * size) for size in sizes]
    for at in rng.sample(range(len(messages)), 5):
        messages[at] = (messages[at][0], messages[at][1] + 1.0)
    rng.shuffle(messages)
    found = fit_link(messages)
    assert found is not None
    assert all(part >= 0 for part in found)
    for size in set(sizes):
        assert found[0] + found[1] * size == pytest.approx(latency_s + rate * size, rel=0.01)


def test_few_messages_give_what_they_can() -> None:
    assert fit_link([(100, 0.002), (100, 0.003), (100, 0.5)]) == (0.003, 0.0)
    assert fit_link([(100, 0.002), (200, 0.001)]) is not None
    assert fit_link([]) is None


@pytest.mark.parametrize(
    "wrong",
    [{"modules": {"lm": (0.0, 1.0)}}, {"link": (-1.0, 0.0)}, {"link": (0.0, float("inf"))}, {"slowness": (1.0, 0.0)}],
)
def test_corrections_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="finite"):
        Correction(**wrong)


def test_corrections_of_older_checkpoints_are_read() -> None:
    older = b'{"modules": {"lm": [1.1, 0.9]}, "link": [0.001, 1e-9]}'
    assert msgspec.json.decode(older, type=Correction) == Correction({"lm": (1.1, 0.9)}, (0.001, 1e-9))
