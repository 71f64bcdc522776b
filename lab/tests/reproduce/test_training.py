"""The small model that Fig. 9 trains: alike everywhere, and its loss does not depend on how a batch is packed."""

from __future__ import annotations

import pytest
import torch

from pipeloom_lab.reproduce import Options
from pipeloom_lab.reproduce.pipetune.training import (
    MOST_IMAGES,
    MOST_WORDS,
    SPECS,
    batches,
    describe,
    figure_9,
    problem,
    small_model,
)


def test_documents_are_datamix1s_and_the_same_for_every_rank() -> None:
    first, again = (list(batches(0, 2)) for _ in range(2))
    for one, other in zip(first[0], again[0], strict=True):
        assert one.words.equal(other.words)
        assert one.images.equal(other.images)
        assert 2 <= len(one.words) <= MOST_WORDS
        assert len(one.images) <= MOST_IMAGES
        assert describe(one)["image_tokens"] == [1] * len(one.images)


def test_models_of_one_seed_are_alike() -> None:
    one, other = (small_model(0, torch.float64) for _ in range(2))
    for mine, theirs in zip(one.module("lm").layers, other.module("lm").layers, strict=True):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert a.equal(b)
    assert one.module("vision").frozen
    assert {problem(name, 0, "float64").tuning for name in SPECS} == set(SPECS.values())


@pytest.mark.full
@pytest.mark.ranks
def test_losses_of_all_ways_are_one() -> None:
    (table,) = figure_9(Options(seeds=(0,), iterations=1)).tables
    place = table.columns.index("largest difference to Original")
    for row in table.rows:
        assert float(row[place]) < (1e-8 if row[0] == "float64" else 1e-3)
        assert float(row[3]) < float(row[2])
