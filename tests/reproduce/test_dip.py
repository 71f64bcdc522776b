"""Parts of DIP's evaluation that take a second: they run, and what was timed once is not timed again."""

from __future__ import annotations

import pytest

from pipeloom.reproduce import Options
from pipeloom.reproduce.dip import runs
from pipeloom.reproduce.dip.characterise import section_2_2, table_1
from pipeloom.reproduce.dip.end_to_end import bounded_microbatches, image_bounds
from pipeloom.reproduce.dip.setups import Setup

ONCE = Options(seeds=(0,), iterations=1, search_s=0.05)


def test_dynamic_data_cost_more_than_static_ones_and_these_more_than_none() -> None:
    (table,) = table_1(ONCE).tables
    column = table.columns.index("overhead, cut by time")
    lost = [float(row[column].removesuffix(" %")) for row in table.rows]
    assert lost[0] == 0.0 < lost[1] < lost[2]


def test_the_best_cut_is_uneven() -> None:
    (table,) = section_2_2(ONCE).tables
    found = {row[0]: row[1] for row in table.rows}
    assert float(found["fastest stage, ms"]) < float(found["slowest stage, ms"])


def test_iterations_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup("vlm-7b", "dip-h800-64", 2, 2, num_microbatches=4)
    first = runs.seconds_of(setup, runs.MEGATRON_EVEN, [(0, 0), (0, 1)], 0.05)
    assert first is not None
    assert first[0] != first[1]

    def never(*_: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(runs, "run", never)
    assert runs.seconds_of(setup, runs.MEGATRON_EVEN, [(0, 1), (0, 0)], 0.05) == first[::-1]


def test_images_rise_then_fall_to_none() -> None:
    means = []
    for i in range(20):
        low, high = image_bounds(i)
        groups = bounded_microbatches(40, low, high, i)
        counts = [sum(len(sample.image_tokens) for sample in group) for group in groups]
        assert low <= min(counts) <= max(counts) <= high
        assert all(sum(sample.sequence_tokens for sample in group) == 8192 for group in groups)
        means.append(sum(counts) / len(counts))
    assert means[0] < max(means[:6])
    assert means[19] == 0
