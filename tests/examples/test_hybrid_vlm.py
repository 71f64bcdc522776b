"""The Qwen3.5 example plans its model, trains on four ranks as one process would, and learns to read digits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipeloom as pl
from pipeloom.training import PlannerConfig
from tests.examples.on_ranks import EXAMPLES, losses_by_one_process

sys.path.append(str(EXAMPLES))

import hybrid_vlm as example

ITERATIONS = 2


def test_every_image_has_its_tokens_and_its_digit() -> None:
    for sample in next(example.batches()):
        grids, ids = sample["image_grid_thw"], sample["input_ids"]
        assert len({tuple(grid) for grid in grids.tolist()}) > 1
        assert len(sample["pixel_values"]) == grids.prod(1).sum() == 4 * (ids == example.IMAGE).sum()
        places = (sample["labels"] >= 0).nonzero()[:, 0]
        assert len(places) == len(grids)
        assert torch.equal(ids[places - 1], torch.full_like(places, example.END))


@pytest.mark.full
@pytest.mark.ranks
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    emulation = pl.emulate(example.build_model(), next(example.batches()), cluster="4xH100", pp=4)
    assert [(module.name, module.reads) for module in emulation.model.modules] == [
        ("vision", "images"),
        ("lm", "sequence"),
    ]
    config = pl.RunConfig(iterations=ITERATIONS, planner=PlannerConfig(budget_s=0.02, deadline_s=60.0))
    result = pl.fit(example.build_model, example.batches, ranks=4, folder=tmp_path / "run", config=config)
    assert result.summary.plans_fresh == ITERATIONS
    assert result.losses == pytest.approx(losses_by_one_process(example, ITERATIONS), rel=1e-4)
    assert example.accuracy(result.checkpoint) < example.GOAL / 2  # it has not learned yet


@pytest.mark.soak
@pytest.mark.ranks
def test_it_learns(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "hybrid_vlm.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
