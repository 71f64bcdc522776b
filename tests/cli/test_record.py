from __future__ import annotations

import itertools
import math
import os
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cost import Correction
from pipeloom.errors import InputError
from pipeloom.explain.difference import Difference
from pipeloom.planner import answer_of, plan_batch
from pipeloom.runtime import StepReport
from pipeloom.search import Budget
from pipeloom.training.loop_config import LogConfig
from pipeloom.training.record import HISTORY, Recorder, RunFacts, WaitingRanks, append_line, fresh_folder, read_history
from tests.cases import random_batch
from tests.planner.cases import random_problem


@dataclass
class Reports:
    """Reports of iterations that all ran the same plan."""

    def __post_init__(self) -> None:
        planned = plan_batch(random_problem(1), random_batch(1), budget=Budget(evaluations=1))
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
    summary = again.summarize(RunFacts("n", 1, 1, 0, ""), 1.0)
    assert (summary.iterations, summary.resumed_at) == (9, (5,))
    assert (summary.loss_first, summary.loss_last) == (1.0, 9.0)


def test_the_time_of_a_resumed_run_is_that_of_all_iterations(tmp_path: Path) -> None:
    reports, first = Reports(), Recorder(tmp_path)
    for iteration in range(4):
        first.add(reports(iteration, step_s=2.0))
    again = Recorder(tmp_path, first_iteration=3)
    again.add(reports(3, step_s=3.0))
    assert again.summarize(RunFacts("n", 1, 1, 0, ""), 3.5).elapsed_s == 9.5


def test_results_remain_until_a_resumed_run_trains(tmp_path: Path) -> None:
    run, reports, first = RunFacts("n", 1, 1, 0, ""), Reports(), Recorder(tmp_path)
    for iteration in range(2):
        first.add(reports(iteration))
    explained = Difference(2, *(0.5,) * 11, 3, ())
    waiting = WaitingRanks({"1f1b": 1.0}, {"1f1b": 1.5}, 2, 1.0)
    first.summarize(run, 1.0, {"1f1b": [1.0, 2.0]}, explained, "choose a layout", waiting)
    (tmp_path / "timeline.html").write_text("drawn")
    (tmp_path / "layers.json").write_text("measured")
    fresh_folder(tmp_path, go_on=True)
    again = Recorder(tmp_path, first_iteration=2)
    summary = again.summarize(run, 1.0)
    assert (summary.comparison, summary.comparison_batches) == ({"1f1b": 1.5}, 2)
    assert (summary.waiting, summary.advice, summary.difference) == (waiting, "choose a layout", explained)
    assert (tmp_path / "timeline.html").exists()
    assert not (tmp_path / "layers.json").exists()
    again = Recorder(tmp_path, first_iteration=2)
    again.add(reports(2))
    assert not (tmp_path / "timeline.html").exists()
    assert not (tmp_path / "summary.json").exists()
    summary = again.summarize(run, 1.0)
    assert (summary.comparison, summary.comparison_batches, summary.waiting) == ({}, 0, None)
    # Anything else in the place of a result goes, and a link's target stays.
    (tmp_path / "timeline.html").symlink_to(tmp_path / HISTORY)
    fresh_folder(tmp_path, go_on=True)
    assert not (tmp_path / "timeline.html").is_symlink()
    assert (tmp_path / HISTORY).exists()


def test_a_last_line_that_was_cut_off_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports, first = Reports(), Recorder(tmp_path)
    for iteration in range(4):
        first.add(reports(iteration))
    path = tmp_path / HISTORY
    path.write_bytes(path.read_bytes()[:-5])
    again = Recorder(tmp_path, first_iteration=4)
    assert "history.jsonl: line 4 was cut off when the process died and is ignored" in caplog.text
    assert "history.jsonl: has 3 of the 4 iterations before the checkpoint" in caplog.text
    assert again.summarize(RunFacts("n", 1, 1, 0, ""), 1.0).iterations == 3


@pytest.mark.parametrize("whole", ["", '{"a":1}\n'])
@pytest.mark.parametrize("torn", ["", '{"a"'])
def test_a_line_takes_the_place_of_one_that_was_cut_off(tmp_path: Path, whole: str, torn: str) -> None:
    path = tmp_path / "layouts.jsonl"
    path.write_text(whole + torn)
    append_line(path, {"a": 2})
    assert path.read_text() == whole + '{"a":2}\n'


def test_a_history_that_is_gone_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, first_iteration=4)
    assert "history.jsonl: has 0 of the 4 iterations before the checkpoint" in caplog.text
    with pytest.raises(InputError, match=r"history\.jsonl: has no iterations, .*; raise iterations"):
        recorder.summarize(RunFacts("n", 1, 1, 0, ""), 1.0)


def test_the_newest_plans_are_kept(tmp_path: Path) -> None:
    def left() -> list[str]:
        return sorted(path.name for path in (tmp_path / "plans").iterdir())

    reports, recorder = Reports(), Recorder(tmp_path, num_plans=4)
    for iteration in range(9):
        recorder.add(reports(iteration))
        assert len(left()) == min(iteration + 1, 4)
    assert left() == ["00005.plan", "00006.plan", "00007.plan", "00008.plan"]
    # Whatever else lies there stays, and a pipe in place of a plan is not waited for.
    (tmp_path / "plans" / "best.plan").touch()
    os.mkfifo(tmp_path / "plans" / "00009.plan")
    again = Recorder(tmp_path, first_iteration=9, num_plans=2)
    assert left() == ["00007.plan", "00008.plan", "00009.plan", "best.plan"]
    again.add(reports(9))
    assert left() == ["00008.plan", "00009.plan", "best.plan"]
    assert (tmp_path / "plans" / "00009.plan").is_file()


def test_every_report_is_kept_after_a_new_layout(tmp_path: Path) -> None:
    reports, recorder = Reports(), Recorder(tmp_path)
    for iteration in range(65):
        recorder.add(reports(iteration))
    recorder.relaid()
    recorder.add(reports(65))
    assert [report.iteration for report in recorder.reports] == [65]


def test_no_plan_is_kept_where_none_is_asked_for(tmp_path: Path) -> None:
    Recorder(tmp_path, num_plans=0).add(Reports()(0))
    assert list((tmp_path / "plans").iterdir()) == []
    with pytest.raises(InputError, match=r"log\.plans: -1 is not"):
        LogConfig(plans=-1)


def test_what_a_recorder_holds_does_not_grow_with_the_iterations(tmp_path: Path) -> None:
    reports, recorder = Reports(), Recorder(tmp_path, num_plans=1)
    sizes = []
    tracemalloc.start()
    try:
        for iteration in range(200):
            recorder.add(reports(iteration))
            if iteration in (50, 199):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # A row takes more than 500 bytes.
    assert sizes[1] - sizes[0] < 40_000


@pytest.mark.parametrize("name", [HISTORY, "evaluations.jsonl", "layouts.jsonl", "setup.json"])
def test_a_pipe_in_a_run_folder_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: is not a regular file; remove it"):
        fresh_folder(tmp_path, go_on=True)
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(not a regular file\)"):
        read_history(tmp_path / name)
    fresh_folder(tmp_path)
    assert not (tmp_path / name).exists()


def test_a_link_in_a_run_folder_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("kept")
    (tmp_path / HISTORY).symlink_to(other)
    with pytest.raises(InputError, match=rf"{HISTORY}: is not a regular file; remove it"):
        fresh_folder(tmp_path, go_on=True)
    fresh_folder(tmp_path)
    assert other.read_text() == "kept"


def test_what_is_in_the_way_in_a_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / HISTORY).mkdir()
    with pytest.raises(InputError, match=f"{HISTORY}: cannot be written: is a directory; remove the folder"):
        fresh_folder(tmp_path)
    (tmp_path / "plans").touch()
    with pytest.raises(InputError, match="plans: is not a folder; remove it"):
        fresh_folder(tmp_path)


def test_a_history_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / HISTORY).write_text('{"iteration": 0}\n')
    with pytest.raises(InputError, match=r"history\.jsonl: line 1"):
        Recorder(tmp_path, first_iteration=1)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_history_of_a_training_that_diverged_can_be_read(tmp_path: Path, loss: float) -> None:
    reports, recorder = Reports(), Recorder(tmp_path)
    recorder.add(reports(0))
    recorder.add(reports(1, loss=loss, gradient_norm=loss))
    first, second = read_history(tmp_path / HISTORY)
    assert first.loss == 1.0
    assert math.isnan(second.loss)
    assert math.isnan(second.gradient_norm)
    assert second.num_microbatches == 2
