from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cost import Correction
from pipeloom.errors import InputError
from pipeloom.planner import answer_of, plan_batch
from pipeloom.runtime import StepReport
from pipeloom.search import Evaluations
from pipeloom.training.record import HISTORY, Recorder, RunFacts, read_history
from tests.cases import random_batch
from tests.planner.cases import random_setup


@dataclass
class Reports:
    """Reports of iterations that all ran the same plan."""

    def __post_init__(self) -> None:
        planned = plan_batch(random_setup(1).problem(), random_batch(1), budget=Evaluations(1), seed=0)
        self.answer = answer_of(planned, search_s=0.0, ready_ns=0)

    def __call__(self, iteration: int, **changes: Any) -> StepReport:
        fields = {
            "iteration": iteration,
            "loss": 1.0 / (iteration + 1),
            "gradient_norm": 1.0,
            "num_microbatches": 2,
            "measured_s": 0.1,
            "measured_bubble_share": 0.2,
            "fresh": True,
            "lead_s": 0.0,
            "reason": "",
            "answer": self.answer,
            "batch": None,
            "correction": Correction(),
            "measured": None,
        }
        return StepReport(**fields | changes)


def test_the_history_has_every_iteration_and_few_reports_are_kept(tmp_path: Path) -> None:
    reports, recorder = Reports(), Recorder(tmp_path)
    for iteration in range(300):
        recorder.add(reports(iteration))
    assert [row.iteration for row in read_history(tmp_path / HISTORY)] == list(range(300))
    kept = [report.iteration for report in recorder.reports]
    assert len(kept) <= 64
    assert kept[0] == 0
    assert kept[-1] >= 290
    assert len({after - before for before, after in itertools.pairwise(kept)}) == 1


def test_iterations_after_the_checkpoint_are_replaced(tmp_path: Path) -> None:
    reports, first = Reports(), Recorder(tmp_path)
    for iteration in range(8):
        first.add(reports(iteration))
    with (tmp_path / HISTORY).open("a") as history:
        history.write('{"iteration": 8, "lo')  # the process was killed in the middle of a line
    again = Recorder(tmp_path, first_iteration=5)
    for iteration in range(5, 9):
        again.add(reports(iteration, loss=9.0))
    rows = read_history(tmp_path / HISTORY)
    assert [(row.iteration, row.start, row.loss == 9.0) for row in rows] == [
        *((i, 0, False) for i in range(5)),
        *((i, 1, True) for i in range(5, 9)),
    ]
    summary = again.summarise(RunFacts("n", 1, 1, 0, ""), 1.0)
    assert (summary.iterations, summary.resumed_at) == (9, (5,))
    assert (summary.loss_first, summary.loss_last) == (1.0, 9.0)


def test_a_history_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / HISTORY).write_text('{"iteration": 0}\n')
    with pytest.raises(InputError, match=r"history\.jsonl: line 1"):
        Recorder(tmp_path, first_iteration=1)
