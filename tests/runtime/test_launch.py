from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeloom.errors import ExecutionError
from pipeloom.plan import Verb
from pipeloom.runtime.launch import processes
from pipeloom.runtime.launch.device import place_of
from pipeloom.runtime.launch.processes import launch
from tests.plan.cases import EVERY_STRATEGY
from tests.warm import _process, _start_server

from .cases import random_run
from .on_ranks import die_after_the_complaint, run_many, run_with_a_broken_rank, tensors_of, wait_for_a_first_plan

pytestmark = pytest.mark.ranks


def test_any_plan_is_exact_on_gloo_with_tags_and_without() -> None:
    counts = launch(run_many, 4, list(range(80)), {"strategies": EVERY_STRATEGY})
    assert [c["iterations"] for c in counts] == [80, 60, 40, 20]
    assert all(c["sent_bytes"] > 0 for c in counts)
    assert sum(c["recomputed"] for c in counts) > 0
    assert sum(c["verified"] for c in counts) == 80
    assert sum(c["tied"] for c in counts) > 10


@pytest.mark.soak
def test_a_thousand_plans_in_tag_zero_mode_never_hang() -> None:
    options = {"strategies": EVERY_STRATEGY}
    counts = launch(run_many, 8, list(range(1000, 2000)), options, 2, True, timeout_s=60.0)
    assert sum(c["verified"] for c in counts) == 1000
    assert sum(c["iterations"] for c in counts) == sum(seed % 7 + 2 for seed in range(1000, 2000))


def seed_with_messages() -> int:
    """An iteration in which rank 1 waits for rank 0."""
    seed = 0
    while True:
        if any(a.verb == Verb.WAIT_F for a in random_run(seed, 2).case.plan.ranks[1]):
            return seed
        seed += 1


def test_the_folder_of_the_store_stays_until_the_last_rank_has_left(tmp_path: Path) -> None:
    """PyTorch waits five minutes, with the GIL, for a store whose folder is gone."""
    folder = tmp_path / "group"
    folder.mkdir()
    for name in ("rank-0", "rank-1", "store"):
        (folder / name).touch()
    processes._leave(folder, 0)
    assert sorted(file.name for file in folder.iterdir()) == ["rank-1", "store"]
    processes._leave(folder, 1)
    processes._leave(folder, 2)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_have_ended_leave_nothing_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be killed before it removes the folder of the store."""
    left: list[Any] = []
    usual = processes._end

    def end(*args: Any) -> None:
        usual(*args)
        left.append(list(tmp_path.iterdir()))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes, "_end", end)
    launch(tensors_of, 2, 3.0)
    assert left == [[]]


def test_a_rank_that_starts_after_its_launcher_has_left_ends_at_once(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    start = processes._Start(1, 2, str(tmp_path / "gone" / "store"), 120.0, 1, place_of("cpu"))
    _start_server()
    rank = _process(processes._run_rank, args=(os.getpid, (), start, there))
    rank.start()
    there.close()
    assert here.poll(100.0), "waits for the store"
    assert here.recv()[0] == "failure"
    rank.join()
    assert rank.exitcode == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 0, step .* cosmic ray"),
        ("die", "rank 0: the process exited with code 7"),
        ("sleep", "rank 1, step .*'WAIT_[FB] .*Timed out"),
    ],
)
def test_a_broken_rank_ends_all_with_its_message(how: str, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        launch(run_with_a_broken_rank, 2, seed_with_messages(), how, timeout_s=3.0)


@pytest.mark.full
@pytest.mark.cold
def test_a_rank_that_died_is_the_cause_even_where_others_complain_first() -> None:
    with pytest.raises(ExecutionError, match="rank 0: the process exited with code 7"):
        launch(die_after_the_complaint, 2, 0.2)


def test_a_rank_that_cannot_be_started_ends_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = multiprocessing.get_context
    started: list[Any] = []

    def fail() -> None:
        raise EOFError

    def process(**named: Any) -> Any:
        made = usual("spawn").Process(**named)
        if started:
            made.start = fail
        started.append(made)
        return made

    def get_context(method: str | None = None) -> Any:
        given = usual(method)
        return SimpleNamespace(Pipe=given.Pipe, Process=process) if method == "spawn" else given

    monkeypatch.setattr(multiprocessing, "get_context", get_context)
    monkeypatch.setattr(processes, "can_fork", lambda: False)
    with pytest.raises(ExecutionError, match="rank 1: the process could not be started: it has ended"):
        launch(tensors_of, 2, 3.0)
    assert not started[0].is_alive()


STARTER = """
import subprocess, sys
child = "import time; from pipeloom.forks import end_with_starter as end; "
child += "end('gone'); print(1, flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child]).wait()
"""


def test_a_process_ends_with_the_one_that_started_it() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "1\n"
    starter.kill()
    # Ends when nobody has the other end of the pipe any more.
    assert "pipeloom: gone" in starter.communicate(timeout=60)[1]


def test_ranks_give_tensors_back() -> None:
    reports: list[torch.Tensor] = []

    def note(_: int, value: torch.Tensor) -> None:
        reports.append(value)
        # What a rank returned is read here only when no rank is left.
        for process in multiprocessing.active_children():
            process.join()

    found = launch(tensors_of, 2, 3.0, on_report=note)
    for rank, (tensor, named) in enumerate(found):
        assert torch.equal(tensor, torch.full((2, 2), 3.0 * rank))
        assert int(named["rank"]) == rank
    assert [each.tolist() for each in reports] == [[7.0] * 3]


@pytest.mark.full
def test_the_first_plan_is_waited_for_beyond_the_timeout() -> None:
    assert launch(wait_for_a_first_plan, 2, 5.0, timeout_s=3.0) == [True, True]
