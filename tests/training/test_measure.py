"""The batches that are read before training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import pipeloom as pl
from pipeloom.planner.problem_file import write_problem
from pipeloom.runtime.train.evaluate import seed_generators
from pipeloom.spec import HostLink, RankSpec
from pipeloom.training.config import LayoutConfig
from pipeloom.training.job import Job
from pipeloom.training.measure import FirstBatches, known_links, known_profile, show_first_sample
from pipeloom.training.task import Task
from tests.examples.on_ranks import EXAMPLES
from tests.planner.cases import random_problem, with_costs

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("copies_overlap", [True, False])
def test_measurements_are_those_of_the_same_kind_of_device(tmp_path: Path, device: str, copies_overlap: bool) -> None:
    problem = random_problem(1)
    profile = msgspec.structs.replace(problem.profile_costs.profile, copies_overlap=copies_overlap)
    rank = RankSpec(hosts=(0, 1), links=(HostLink((0, 1), 1e9, 1e-5),))
    write_problem(tmp_path / "setup.json", with_costs(problem, profile=profile, rank=rank))
    config = pl.RunConfig(layout=LayoutConfig(2), cluster=RankSpec(hosts=(0, 1)))
    job = Job(config, Task(example.build_model, list), tmp_path)
    job.__dict__["device"] = device
    model = example.build_model()
    model.__dict__["spec"] = problem.model
    same = copies_overlap == (device == "cuda")
    assert known_profile(job, model) == (profile if same else None)
    assert known_links(job).cluster.links == (rank.links if same else ())
