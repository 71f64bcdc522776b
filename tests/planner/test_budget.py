"""A plan's budget is of everything: by a clock that goes on when it is read, and by so much for every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from pipeloom.planner import FinishingTime, joint, plan_batch, planning
from pipeloom.search import Budget
from tests.cases import random_batch
from tests.planner.cases import random_problem

SECONDS, PACKING_S, PROVING_S, READING_S = 4.0, 1.0, 2.0, 0.1


@dataclass
class FakeClock:
    """A clock that goes on when it is read."""

    now_s: float = 100.0

    def read(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def slowed(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The function, taking so long."""

        def slow(*args: Any, **options: Any) -> Any:
            self.now_s += seconds
            return function(*args, **options)

        return slow


@pytest.mark.parametrize("policy", ["planned", "balanced"])
@pytest.mark.parametrize("seed", [3, 7])
def test_a_plan_is_proved_within_its_budget(seed: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, batch, clock = random_problem(seed), random_batch(seed), FakeClock()
    problem = replace(problem, packing=msgspec.structs.replace(problem.packing, policy=policy))
    finishing = FinishingTime()
    for name in ("packed_batch", "cost_loads"):
        monkeypatch.setattr(joint, name, clock.slowed(getattr(joint, name), PACKING_S))
    monkeypatch.setattr(planning, "verify", clock.slowed(planning.verify, PROVING_S))
    took = []
    for _ in range(3):
        began_s = clock.now_s
        planned = plan_batch(problem, batch, budget=Budget(seconds=SECONDS, clock=clock.read), finishing=finishing)
        took.append(clock.now_s - began_s)
        assert PROVING_S <= finishing.task_s * planned.graph.num_tasks <= 1.5 * PROVING_S
    # The first plan could not know; a search looks at the clock a few times more before it ends.
    assert took[0] > SECONDS + 0.6 * PROVING_S
    assert max(took[1:]) <= SECONDS + 0.1 * PROVING_S


def test_evaluations_are_the_search_s_alone() -> None:
    problem, batch, finishing = random_problem(5), random_batch(5), FinishingTime(1e9)
    first = plan_batch(problem, batch, budget=Budget(evaluations=60))
    again = plan_batch(problem, batch, budget=Budget(evaluations=60), finishing=finishing)
    assert (first.plan, first.evaluations, finishing.task_s) == (again.plan, again.evaluations, 1e9)
