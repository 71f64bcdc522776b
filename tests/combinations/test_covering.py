"""The rows that are trained have every pair of choices; what is left out is refused in one line."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError
from pipeloom.planner.client import fallback_plan
from pipeloom.spec import batch_from_dicts
from pipeloom.training import RunConfig

from . import task
from .covering import EXCLUDED, FACTORS, Choice, Excluded, covering, covering_set, pairs, wanted
from .rows import prepare, run_of, settings_of


def test_every_pair_of_choices_is_in_some_row_or_excluded() -> None:
    rows = covering_set()
    excluded = {frozenset((each.first, each.second)) for each in EXCLUDED}
    met = set().union(*map(pairs, rows))
    assert met == wanted(FACTORS, excluded)
    assert not met & excluded
    # No set can be smaller than the product of the two largest factors.
    assert len(rows) < 1.25 * len(FACTORS["policy"]) * len(FACTORS["layout"])


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10**9))
def test_any_factors_are_covered(seed: int) -> None:
    rng = random.Random(seed)
    factors = {name: tuple(map(str, range(rng.randint(2, 5)))) for name in "abcd"}
    # One level of the first factor, with all levels but the first of the others left out at random.
    chosen: list[Choice] = [(name, x) for name in "bcd" for x in factors[name][1:]]
    excluded = {frozenset((("a", "0"), other)) for other in chosen if rng.random() < 0.5}
    rows = covering(factors, excluded, seed)
    assert set().union(*map(pairs, rows)) == wanted(factors, excluded)
    assert rows == covering(factors, excluded, seed)


NAMED = [each for each in EXCLUDED if each.first == ("early", "clusters") and each.second != ("layout", "file")]


@pytest.mark.parametrize("each", NAMED, ids=lambda each: each.second[1])
def test_a_method_by_name_says_what_it_wants(each: Excluded) -> None:
    row = {name: levels[0] for name, levels in FACTORS.items()} | {"layout": "encoder_first"}
    row |= dict((each.first, each.second))
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(settings_of(row), RunConfig)
    assert "tuning.order = 'clusters'" in str(refused.value)
    assert "let tuning.order be 'search'" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("capacity_bytes", [100_000, 250_000])
@pytest.mark.parametrize("kind", FACTORS["layout"])
def test_what_does_not_fit_ends_in_one_line(kind: str, capacity_bytes: int, tmp_path: Path) -> None:
    row = {name: levels[0] for name, levels in FACTORS.items()} | {"layout": kind, "strategies": "chosen"}
    run = run_of(row, tmp_path)
    memory = msgspec.structs.replace(run.config.cluster, memory_capacity_bytes=capacity_bytes)
    run = replace(run, config=msgspec.structs.replace(run.config, cluster=memory))
    batch = batch_from_dicts([task.describe(sample) for sample in next(task.batches(1))], 0)
    with pytest.raises(InfeasibleError) as refused:
        fallback_plan(prepare(run).read_problem(), batch)
    # Who, how many bytes, and what to do about it.
    assert re.search(r"(rank \d:|layers?) .*[\d.]+ (B|KiB)\b.*; .*use (more ranks|smaller)", str(refused.value))
    assert "\n" not in str(refused.value)
