"""Ranks whose loaders disagree, for launched processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch.distributed as dist

from pipeloom.cost import Correction
from pipeloom.errors import InputError
from pipeloom.plan import Delivery, delivery_of
from pipeloom.planner import PlanningProblem, answer_of, plan_batch
from pipeloom.runtime import ExecutionOptions, Trainer
from pipeloom.search import Budget
from pipeloom.spec import Batch, Parallelism

from .training import CLIP, DOCUMENTS, data, invented_problem, model, optimizer, task


class PlansHere:
    """Plans in this process, when asked: neither a store nor a planner's process."""

    def __init__(self, made: PlanningProblem) -> None:
        self.problem = made.with_search(method="portfolio")
        self.batches: dict[int, Batch] = {}

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, batch: Batch, _: Any) -> None:
        self.batches[batch.iteration] = batch

    def collect(self, iteration: int) -> Delivery:
        planned = plan_batch(self.problem, self.batches.pop(iteration), budget=Budget(evaluations=1))
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        return delivery_of(answer, planned.packing, self.problem.layout, backend=self.problem.backend)

    def close(self) -> None:
        """Nothing to close."""


class AssignsHere(PlansHere):
    """And deals the batches to come, well and badly."""

    ASSIGNED: Sequence[tuple[int, ...]] = ((), (1, 0, 1, 1), (0, 1), (1, 1, 1, 1), (0, 1, 2, 0), (1, 0, 0, 0))
    """How each batch is: not at all, unevenly, of another size, nothing for a replica, a replica too many, unevenly."""

    def __init__(self, made: PlanningProblem) -> None:
        super().__init__(made)
        self.seen: dict[int, int] = {}

    def look_ahead(self, batch: Batch, corrections: Sequence[Correction] = ()) -> None:
        assert len(batch.samples) == DOCUMENTS
        assert len(corrections) in (0, 2)
        self.seen[batch.iteration] = len(batch.samples)

    def collect(self, iteration: int) -> Delivery:
        found = super().collect(iteration)
        if iteration + 1 not in self.seen:
            return found
        answer = msgspec.structs.replace(found.answer, replica_of_sample=self.ASSIGNED[iteration + 1])
        return replace(found, answer=answer)


def assigned(num_ranks: int, num_replicas: int) -> tuple[list[float], list[tuple[str, ...]]]:
    """The losses of a training whose batches are dealt so, and on planner ranks the samples of every share."""
    made = invented_problem(num_ranks)
    layout = msgspec.structs.replace(made.layout, parallelism=Parallelism(data=num_replicas))
    made = replace(made, layout=layout)
    options = ExecutionOptions(clip_norm=CLIP)
    trainer = Trainer(model(), layout, AssignsHere(made), describe=task.describe, optimizer=optimizer, options=options)
    reports = list(trainer.run(data.batches(3, len(AssignsHere.ASSIGNED), DOCUMENTS)))
    shares = [tuple(sample.id for sample in report.batch.samples) for report in reports if report.batch is not None]
    return [report.loss for report in reports], shares


def reported(num_ranks: int, num_replicas: int, wrongs: list[str]) -> dict[str, tuple[int, str]]:
    """For each kind of disagreement: after how many iterations this rank stopped, and what it said."""
    return {wrong: _reported(num_ranks, num_replicas, wrong) for wrong in wrongs}


def _reported(num_ranks: int, num_replicas: int, wrong: str) -> tuple[int, str]:
    made = invented_problem(num_ranks)
    layout = msgspec.structs.replace(made.layout, parallelism=Parallelism(data=num_replicas))
    made = replace(made, layout=layout)
    options = ExecutionOptions(compare_contents=3)
    trainer = Trainer(model(), layout, PlansHere(made), describe=task.describe, optimizer=optimizer, options=options)
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
            if wrong == "other contents":
                digits = tuple((digit + 1) % 10 for digit in documents[0].digits)
                documents = [replace(documents[0], digits=digits), *documents[1:]]
            if wrong == "another order":
                documents = [documents[1], documents[0], *documents[2:]]
            if wrong == "an early end":
                return
        if last and wrong == "none at all":
            return
        yield documents
