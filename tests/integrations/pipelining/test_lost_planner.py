"""Planned steps whose planner dies."""

from __future__ import annotations

import logging

import pytest

from pipeloom.integrations.steps import planning
from pipeloom.integrations.steps.costs import stage_profile
from pipeloom.integrations.steps.planning import Planning, StepPlanner
from pipeloom.integrations.steps.running import MODULE
from pipeloom.planner import client
from pipeloom.planner.process import PlannerProcess
from pipeloom.planner.service import READY
from pipeloom.spec import Chunk, Layout, ModuleLayout
from tests.planner.cases import MemoryStore


class Process(PlannerProcess):
    """Starts, and has died when it is looked at again; the first one is up until it is killed."""

    runs = False

    def start(self) -> None:
        self.runs = self.num_restarts == 0

    def is_alive(self) -> bool:
        return self.runs

    def kill(self) -> None:
        self.runs = False

    def stop(self, grace_s: float = 2.0) -> None:
        self.runs = False


def test_a_planner_that_dies_is_restarted_and_in_the_end_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.put(READY, b"1")
    monkeypatch.setattr(client, "PlannerProcess", Process)
    monkeypatch.setattr(planning, "TcpPlanStore", type("Hosted", (), {"host": lambda: store}))
    layout = Layout(2, (ModuleLayout(MODULE),), tuple(Chunk(MODULE, (i, i), i) for i in range(2)))
    steps = StepPlanner(layout, Planning(profile=stage_profile([], layout)), "gloo")
    steps.begin(1)
    requests = steps._requests
    assert requests is not None
    requests._starting.join(60.0)
    process = requests._planner.process
    assert isinstance(process, Process)
    process.kill()
    restarts = []
    with caplog.at_level(logging.WARNING, planning.__name__):
        for step in range(6):
            sizes = (4, 5 + step)
            steps.ask(sizes)
            assert steps.order(sizes, True).sizes == sizes
            restarts.append(process.num_restarts)
    assert restarts == [1, 2, 3, 3, 3, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "The step runs in the order of the heuristic: the planner is not running",
        "The step runs in the order of the heuristic: the planner ended again after 3 restarts and is disabled",
    ]
    assert steps.counts == {"heuristic": 6}
    assert not requests.is_requested((4, 10))
    steps.close()
