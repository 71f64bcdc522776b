"""Predicted memory is compared rank with rank, and its errors on published runs may not grow unnoticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pipeloom.validation import Prediction, PublishedRun, predict, read_runs, summarize
from pipeloom.validation.memory import RESERVED, comparable_bytes, memory_by_rank, memory_error, rank_errors
from tests.validation.test_runs import DATA, LLAMA


def measured(kind: str, number: float, *peaks: int) -> Prediction:
    run = PublishedRun(id="a", source="s", gpus=8, mem_bytes=number, mem_kind=kind)
    return Prediction(run, 1.0, 0.9, 1.1, peaks, "fused")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("peak allocated, fullest rank", 40),
        ("max allocated (rank that logs)", 10),
        ("allocated, mean over ranks", 25),
        ("peak", 40),
        ("peak reserved", 40 * RESERVED),
        ("", 40),
    ],
)
def test_memory_is_compared_by_rank_and_kind(kind: str, expected: float) -> None:
    one = measured(kind, 20.0, 40, 10) if "mean" in kind else measured(kind, 20.0, 40, 20, 10)
    assert comparable_bytes(one) == expected
    assert memory_error(one) == expected / 20 - 1


def test_the_summary_of_memory_names_the_extremes_and_counts_what_is_below() -> None:
    found = summarize([measured("peak", 100.0, peak) for peak in (90, 97, 99, 120)]).memory
    assert [each.name for each in found] == ["all runs", "attention: fused", "source: s (peak)"]
    assert found[0].lowest == pytest.approx(-0.1)
    assert found[0].highest == pytest.approx(0.2)
    assert found[0].num_below == 2
    assert summarize([replace(measured("peak", 1.0, 2), rank_bytes=())]).memory == ()
    unstated = measured("peak", 1.0, 2)
    assert memory_error(replace(unstated, run=replace(unstated.run, recompute="unknown"))) is None


def published(source: str) -> Iterator[Prediction]:
    for run in read_runs(DATA):
        if run.source == source and run.mem_bytes:
            found = predict(run)
            if not found.reason:
                yield found


def test_every_rank_of_simumax_is_within_two_percent() -> None:
    found = list(published("simumax"))
    assert len(found) == len(memory_by_rank()) == 37
    errors = np.array([memory_error(each) for each in found], float)
    assert np.median(np.abs(errors)) < 0.002
    assert np.abs(errors).max() < 0.01
    ranks = np.array([error for each in found for error in rank_errors(each)])
    assert len(ranks) == 37 * 8
    assert np.abs(ranks).max() < 0.02


# nanotron's own loss lacks the gradient of the log-probabilities that PyTorch's has, and the emulator counts.
@pytest.mark.parametrize(
    ("source", "lowest", "highest", "median"),
    [("nanotron", 0.0, 0.12, 0.05), ("vocab-parallel", -0.22, 0.03, 0.012), ("zero-bubble", -0.06, 0.02, 0.035)],
)
def test_errors_of_other_sources_stay_within_their_bounds(
    source: str, lowest: float, highest: float, median: float
) -> None:
    """The one row of ``vocab-parallel`` far below is among those that data/README.md doubts."""
    errors = np.array([memory_error(each) for each in published(source)], float)
    assert lowest <= errors.min()
    assert errors.max() <= highest
    assert np.median(np.abs(errors)) <= median


def test_the_fullest_rank_is_the_predicted_peak() -> None:
    found = predict(LLAMA)
    assert found.peak_bytes == max(found.rank_bytes)
    assert len(found.rank_bytes) == 2


OTHER_MEMORY = re.compile("grpo|cross_entropy|multi_dist|modelopt|defer_emb|uninstall")
"""Tests of Megatron-LM whose names say what the table does not: inference beside training, a teacher, an optimizer
divided over fewer replicas; and those whose memory is that of unfused attention."""


def test_memory_of_megatrons_tests_with_fused_attention() -> None:
    errors = []
    for run in read_runs(DATA):
        test, _, container = run.ref.partition(" ")
        if test.startswith("gpt/") and "_te_" in test and container.endswith("dev") and run.attention != "unfused":
            found = predict(run)
            if not (found.reason or OTHER_MEMORY.search(test)) and run.mem_bytes:
                errors.append(memory_error(found))
    error = np.array(errors, float)
    assert len(error) > 90
    assert np.median(np.abs(error)) < 0.02
    assert np.quantile(error, 0.05) > -0.03
    assert error.min() > -0.05
