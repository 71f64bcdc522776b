"""The example of three modules in a chain learns, and trains on two ranks as one process would."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.training import PlannerConfig
from tests.examples.on_ranks import EXAMPLES, losses_by_one_process

sys.path.append(str(EXAMPLES))

import edit_images as example

ITERATIONS = 2


@pytest.mark.full
def test_it_learns() -> None:
    losses = losses_by_one_process(example, 20)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_samples_fit_the_model() -> None:
    model = example.build_model()
    assert model.describe is not None
    sizes = [model.describe(sample) for sample in next(example.batches())]
    assert [module.name for module in model.modules] == ["vision", "lm", "transformer"]
    assert all(sum(each["lengths"]["transformer"]) > 0 for each in sizes)


@pytest.mark.full
@pytest.mark.ranks
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    config = pl.RunConfig(iterations=ITERATIONS, planner=PlannerConfig(budget_s=0.02, deadline_s=60.0))
    result = pl.fit(example.build_model, example.batches, ranks=2, folder=tmp_path / "run", config=config)
    losses = losses_by_one_process(example, ITERATIONS)
    assert result.losses == pytest.approx(losses, rel=1e-4)
