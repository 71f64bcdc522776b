"""A training whose layout is changed since a rank stays slow: the same losses, and nothing trained twice or never."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from pipeloom.cost import Correction
from pipeloom.errors import InfeasibleError
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.layout.slow_ranks import RelayoutResult, layers_in_words, shifted
from pipeloom.packing import PackingSpec
from pipeloom.planner import PlanningProblem
from pipeloom.planner.client import fallback_plan
from pipeloom.spec import Layout, RankSpec, batch_from_dicts
from pipeloom.training import TrainingRun
from pipeloom.training.config import CheckpointConfig, LayoutConfig, RunConfig
from pipeloom.training.job import Job
from pipeloom.training.loop_config import EvaluationConfig
from pipeloom.training.rank import _Evaluator, _train
from pipeloom.training.record import LAYOUTS, append_line, read_history, read_lines
from pipeloom.training.relayout import LayoutChange, Relayout, lasting, may_change, newest_change, why_not
from pipeloom.training.task import Task
from tests.cli.test_record import Reports
from tests.planner.cases import on_cluster, random_problem

RELAYOUT, RANK = sys.modules[Relayout.__module__], sys.modules[_train.__module__]

TASK = Path(__file__).parent / "slow_task.py"
CONFIG = """
name = "slow"
task = "{task}"
iterations = {iterations}
dtype = "float64"
[layout]
ranks = {ranks}
adapt = {adapt}
[packing]
token_budget = 60
[parallel]
dp = {dp}
[model.slowness]
{slowness}
[scheduler]
name = "constant"
[checkpoint]
every = 12
"""


def trained(
    folder: Path, *, slowness: str = "", iterations: int = 28, adapt: bool = True, dp: int = 1, ranks: int = 2
) -> TrainingRun:
    """Train, or go on where ``folder`` has been trained in before."""
    file = folder / "train.toml"
    known = file.exists()
    folder.mkdir(exist_ok=True)
    fields = {"task": os.path.relpath(TASK, folder), "iterations": iterations, "slowness": slowness, "ranks": ranks}
    file.write_text(CONFIG.format(**fields, adapt=str(adapt).lower(), dp=dp))
    run = TrainingRun.from_toml(file, runs=folder / "runs")
    run.train(resume=known)
    return run


def losses(run: TrainingRun) -> list[float]:
    rows = read_history(run.folder / "history.jsonl")
    assert [row.iteration for row in rows] == list(range(len(rows)))
    return [row.loss for row in rows]


def layout_of(run: TrainingRun) -> Layout:
    return run.read_problem().layout


@pytest.mark.ranks
@pytest.mark.full
def test_a_layout_that_changes_changes_nothing_that_is_learned(tmp_path: Path) -> None:
    even = trained(tmp_path / "even", adapt=False)
    run = trained(tmp_path / "slow", slowness="1 = 2.0", iterations=26)
    changes = read_lines(run.folder / LAYOUTS, LayoutChange)
    assert [change.iteration for change in changes] == [24]
    assert changes[0].planned_s < 0.95 * changes[0].before_s
    assert layers_in_words(layout_of(even)) == "lm 5+5"
    assert layout_of(run) == changes[0].layout
    assert sum(chunk.num_layers for chunk in layout_of(run).chunks if chunk.rank == 1) < 5
    assert losses(run) == pytest.approx(losses(even)[:26], abs=1e-9, rel=0)
    # It goes on under the layout that it had changed to.
    run = trained(tmp_path / "slow", slowness="1 = 2.0", iterations=28)
    assert layout_of(run) == changes[0].layout
    assert losses(run) == pytest.approx(losses(even), abs=1e-9, rel=0)


@pytest.mark.ranks
@pytest.mark.full
def test_replicas_change_their_layout_together(tmp_path: Path) -> None:
    even = trained(tmp_path / "even", adapt=False, dp=2)
    run = trained(tmp_path / "slow", slowness="2 = 2.5\n3 = 2.5", dp=2)
    assert [change.iteration for change in read_lines(run.folder / LAYOUTS, LayoutChange)] == [24]
    assert losses(run) == pytest.approx(losses(even), abs=1e-9, rel=0)


@pytest.mark.parametrize(
    ("kind", "adapt", "wanted"),
    [
        ("separate", None, True),
        ("chosen", None, True),
        ("chosen", False, False),
        ("file", None, False),
        ("file", True, True),
    ],
)
def test_a_layout_that_was_given_changes_only_where_that_is_asked_for(
    kind: Literal["separate", "chosen", "file"], adapt: bool | None, wanted: bool
) -> None:
    layout = LayoutConfig(2, kind=kind, path="layout.json" if kind == "file" else "", adapt=adapt)
    saved = RunConfig(
        name="run", task="task.py", iterations=9, layout=layout, packing=PackingSpec(9), checkpoint=CheckpointConfig()
    )
    task = Task(pl.Model, list)
    assert may_change(Job(saved, task, Path("run"))) == wanted
    assert may_change(Job(saved, task, Path("run"), layout=random_problem(3).layout)) == bool(adapt)
    assert not may_change(Job(msgspec.structs.replace(saved, checkpoint=None), task, Path("run")))


def test_a_change_must_gain_enough_and_pay_for_the_new_start() -> None:
    layout = random_problem(3).layout
    before, better, hardly = (LayoutEvaluation("", layout, seconds, seconds) for seconds in (1.0, 0.8, 0.96))
    assert why_not(RelayoutResult(before, better), left=100, start_s=10.0) == ""
    assert "40 iterations are left" in why_not(RelayoutResult(before, better), left=40, start_s=10.0)
    assert "less than 5%" in why_not(RelayoutResult(before, hardly), left=10**6, start_s=0.0)


def fits(problem: PlanningProblem, batch: pl.Batch) -> bool:
    try:
        fallback_plan(problem, batch)
    except InfeasibleError:
        return False
    return True


def tight_problem(long: pl.Batch) -> PlanningProblem:
    """A problem of two ranks with just the memory for a batch."""
    problem = next(p for p in map(random_problem, range(100)) if p.layout.num_ranks == 2 and not p.split_backward)
    low, high = 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        if fits(on_cluster(problem, RankSpec(memory_capacity_bytes=middle)), long):
            high = middle
        else:
            low = middle
    return on_cluster(problem, RankSpec(memory_capacity_bytes=high))


@pytest.mark.parametrize("long_on", ["this replica", "another replica", "none"])
def test_the_longest_sample_must_fit_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_on: str
) -> None:
    both = batch_from_dicts([{"id": str(n), "text_tokens": n} for n in (2, 30)])
    short, long = both.part([0]), both.part([1])
    problem = tight_problem(long)
    layouts = (replace(problem, layout=made) for made in shifted(problem.layout))
    other = next(each.layout for each in layouts if fits(each, short) and not fits(each, long))
    before, best = (LayoutEvaluation("", made, s, s) for made, s in ((problem.layout, 1.0), (other, 0.8)))
    monkeypatch.setattr(RELAYOUT, "relaid", lambda *_, **__: RelayoutResult(before, best))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    config = RunConfig(iterations=10**6, layout=LayoutConfig(2), checkpoint=CheckpointConfig())
    relayout, reports = Relayout(Job(config, Task(pl.Model, list), tmp_path), problem), Reports()
    first = {"this replica": (long, both), "another replica": (short, both), "none": (short, short)}[long_on]
    for iteration, (own, whole) in enumerate([first, *[(short, short)] * 12]):
        relayout.note(reports(iteration, batch=own, global_batch=whole, replicas=(Correction(),)))
    change = relayout._evaluate(((1.0, 1.5),), 13)
    assert (change is None) == (long_on != "none")
    assert relayout.problem.layout == (other if long_on == "none" else problem.layout)


def test_an_evaluation_before_the_first_iteration_is_no_cost_of_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def take(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Trainer:
        """Compiles for 5 s, evaluates for 100 s, and trains one iteration of 3 s."""

        membership = SimpleNamespace(is_planner_rank=True)

        def evaluate(self, *_: object, **__: object) -> None:
            take(100.0)

        def run(self, *_: object, **__: object) -> Generator[object]:
            take(3.0)
            yield SimpleNamespace(iteration=8, step_s=3.0)

    problem = random_problem(3)
    compiled = SimpleNamespace(compile_kernels=lambda: take(5.0))
    clock = SimpleNamespace(monotonic=lambda: now_s)
    for module in (RELAYOUT, RANK):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(RANK, "broadcast_bytes", lambda *_, **__: msgspec.msgpack.encode((0, 0.0)))
    monkeypatch.setattr(RANK, "LongBarrier", lambda: SimpleNamespace(wait=lambda _: None))
    monkeypatch.setattr(RANK, "group_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    config = RunConfig(iterations=9, layout=LayoutConfig(2), evaluation=EvaluationConfig(4))
    job = Job(config, Task(pl.Model, list, eval_batches=list), tmp_path)
    relayout = Relayout(job, problem)
    evaluator = _Evaluator(job, problem, cast("Any", Trainer()), None, lambda: None)
    evaluator._problem = cast("Any", compiled)
    _train(evaluator, [], 8, relayout)
    assert relayout._start_s == 5.0


def test_a_run_that_may_no_longer_change_has_its_first_layout(tmp_path: Path) -> None:
    layout = random_problem(3).layout
    change = LayoutChange(12, "first", ((1.0,) * layout.num_ranks,), 1.0, 0.8, layout)
    append_line(tmp_path / LAYOUTS, change)
    for adapt in (None, True, False):
        config = RunConfig(layout=LayoutConfig(2, adapt=adapt), checkpoint=CheckpointConfig())
        job = Job(config, Task(pl.Model, list), tmp_path)
        assert newest_change(job, "first") == (None if adapt is False else change)
        assert newest_change(job, "other") is None


def test_a_rank_that_is_now_slow_now_quick_does_not_stay_slow() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        steady = random.uniform(1.4, 1.6, 20)
        half = np.where(np.arange(20) % 2, steady, 1.0)
        quick = random.uniform(0.5, 0.7, 20)
        found = lasting(list(zip(steady.tolist(), half.tolist(), quick.tolist(), [1.0] * 20, strict=True)))
        assert 1.4 < found[0] < 1.6
        assert found[1] == 1.0
        assert 0.5 < found[2] < 0.7
        assert found[3] == 1.0
