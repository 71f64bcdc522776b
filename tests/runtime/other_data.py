"""Ranks whose loaders disagree, for launched processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.plan import Delivery
from pipeloom.planner import Setup, answer_of, plan_batch
from pipeloom.planner.messages import encode
from pipeloom.runtime import Trainer
from pipeloom.search import Evaluations
from pipeloom.spec import Batch, Parallelism

from .training import DOCUMENTS, data, model, optimizer, setup, task


class PlansHere:
    """Plans in this process, when asked: neither a store nor a planner's process."""

    def __init__(self, made: Setup) -> None:
        self.problem = made.problem()
        self.batches: dict[int, Batch] = {}

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, batch: Batch, _: Any) -> None:
        self.batches[batch.iteration] = batch

    def collect(self, iteration: int) -> Delivery:
        planned = plan_batch(
            self.problem, self.batches.pop(iteration), budget=Evaluations(1), seed=0, method="portfolio"
        )
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        return Delivery(answer, planned.packing, encode(answer), True, 0.0)

    def close(self) -> None:
        """Nothing to close."""


def told(num_ranks: int, num_replicas: int, wrongs: list[str]) -> dict[str, tuple[int, str]]:
    """For each kind of disagreement: after how many iterations this rank stopped, and what it said."""
    return {wrong: _told(num_ranks, num_replicas, wrong) for wrong in wrongs}


def _told(num_ranks: int, num_replicas: int, wrong: str) -> tuple[int, str]:
    made = setup(num_ranks)
    layout = msgspec.structs.replace(made.layout, parallelism=Parallelism(data=num_replicas))
    made = msgspec.structs.replace(made, layout=layout)
    trainer = Trainer(model(), layout, PlansHere(made), describe=task.describe, optimizer=optimizer)
    count = 0
    try:
        for _ in trainer.run(batches(wrong)):
            count += 1
    except InputError as error:
        return count, str(error)
    return count, ""


def batches(wrong: str) -> Iterator[list[Any]]:
    """Three batches; the last rank's third one is another."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for i, documents in enumerate(data.batches(3, 3, DOCUMENTS)):
        if last and i == 2:
            if wrong == "other samples of equal sizes":
                documents = [replace(d, identifier=f"{d.identifier}, another") for d in documents]
            if wrong == "another order":
                documents = [documents[1], documents[0], *documents[2:]]
            if wrong == "an early end":
                return
        if last and wrong == "none at all":
            return
        yield documents
