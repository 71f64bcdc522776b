"""The batches that are read before training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import pipeloom as pl
from pipeloom.runtime.train.evaluate import seed_generators
from pipeloom.training.job import Job
from pipeloom.training.measure import FirstBatches, show_first_sample
from pipeloom.training.task import Task
from tests.examples.on_ranks import EXAMPLES

sys.path.append(str(EXAMPLES))

import fit as example


def shuffled(num_iterations: int) -> Iterator[list[Any]]:
    """Batches in an order of the global generators, some drawn at the call and some while they are read."""
    first = random.random()
    for i in range(num_iterations):
        names = [f"{first}.{i}.{j}.{random.random()}.{torch.rand(1).item()}" for j in range(4)]
        yield [(name, torch.zeros(3, dtype=torch.long)) for name in names]


def test_a_run_is_measured_on_its_first_batches_at_every_start() -> None:
    job = Job(pl.RunConfig(iterations=9, seed=7), Task(example.build_model, shuffled, example.describe), Path("run"))
    starts = []
    for start in range(2):
        random.seed(start)
        state = random.getstate()
        show_first_sample(job)
        metadata = FirstBatches(job, example.build_model()).metadata[0]
        assert random.getstate() == state
        starts.append([sample.id for sample in metadata.samples])
    # As ranks do before the first iteration.
    seed_generators(7)
    trained = [example.describe(text)["id"] for text in next(shuffled(9))]
    assert starts == [trained, trained]
