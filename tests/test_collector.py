from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from pipeloom.collector import collector_paused
from pipeloom.planner import PlannedBatch, client, plan_batch
from tests.cases import random_batch
from tests.planner.cases import random_problem


def test_the_collector_rests_until_the_last_of_all_threads_is_done() -> None:
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with collector_paused():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(30)
    with pytest.raises(ValueError, match="in between"), collector_paused():
        raise ValueError("in between")
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_fallback_is_made_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(*args: Any, **options: Any) -> PlannedBatch:
        seen.append(gc.isenabled())
        return plan_batch(*args, **options)

    monkeypatch.setattr(client, "plan_batch", watched)
    problem, batch = random_problem(5), random_batch(5, num_samples=60)
    planned = client.fallback_plan(problem, batch)
    assert seen == [False]
    assert gc.isenabled()
    actions = [action for rank in planned.plan.ranks for action in rank]
    assert len(actions) > 100
    assert not any(gc.is_tracked(action) for action in actions)
