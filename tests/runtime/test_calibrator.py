"""What ranks' speeds are taken to be, from iterations in which some were slow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pipeloom.cost import Correction
from pipeloom.plan import Measured
from pipeloom.planner import answer_of, plan_batch
from pipeloom.runtime.execute.result import Calibrator
from pipeloom.search import Budget
from tests.cases import random_batch
from tests.planner.cases import random_problem

SEED = next(seed for seed in range(100) if random_problem(seed).layout.num_ranks == 4)


class Training:
    """A trainer as the calibrator sees it: a plan is asked for while the iteration before runs."""

    def __init__(self, noise: float = 0.0, vision: float = 1.0) -> None:
        self.problem, self.vision = random_problem(SEED, everywhere=True), vision
        self.calibrator, self.asked = Calibrator(), Correction()
        self.noise, self.random, self.iteration = noise, random.Random(0), 0

    def run(self, slowness: Sequence[float]) -> Correction:
        """One iteration; with which correction its plan was made."""
        used, self.asked = self.asked, self.calibrator.correction
        batch = random_batch(self.iteration)
        planned = plan_batch(self.problem.corrected(used), batch, budget=Budget(evaluations=1))
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        planned_ns = iter(answer.planned_start_ns)
        times = []
        for rank, actions in enumerate(planned.plan.ranks):
            slow = slowness[rank] * (1 + self.random.uniform(-self.noise, self.noise))
            rows, now = [], 0
            for action in actions:
                begin = now
                if action.verb.is_compute:
                    start, end = next(planned_ns)
                    module = action.chunk.rpartition(".")[0]
                    factor = used.modules.get(module, (1.0, 1.0))[action.verb != "F"]
                    known = factor * (used.slowness[rank] if used.slowness else 1.0)
                    now += round((end - start) / known * slow * (self.vision if module == "vision" else 1.0))
                rows.append((begin, now))
            times.append(np.array(rows, np.int64).reshape(-1, 2))
        self.calibrator.learn(answer, used, Measured(tuple(times), (-1,) * len(times)))
        self.iteration += 1
        return used


def test_a_rank_that_becomes_slow_is_known_after_three_iterations_and_when_it_is_quick_again() -> None:
    training = Training(noise=0.03)
    for _ in range(5):
        assert training.run((1, 1, 1, 1)).slowness == ()
    for _ in range(3):
        assert training.run((1, 1, 1.5, 1)).slowness == ()
    for _ in range(4):
        assert training.run((1, 1, 1.5, 1)).slowness == pytest.approx((1, 1, 1.5, 1), rel=0.1)
    for _ in range(3):
        training.run((1, 1, 1, 1))
    assert training.run((1, 1, 1, 1)).slowness == ()


def test_noise_and_one_slow_iteration_are_no_speed() -> None:
    training = Training(noise=0.08)
    for i in range(12):
        assert training.run((1, 3 if i == 6 else 1, 1, 1)).slowness == ()


def test_a_rank_that_is_slow_from_the_start_is_known() -> None:
    training = Training()
    for _ in range(6):
        training.run((1.5, 1, 1, 1))
    assert training.run((1.5, 1, 1, 1)).slowness == pytest.approx((1.5, 1, 1, 1), rel=0.05)


def test_a_module_that_was_measured_wrongly_makes_no_rank_slow() -> None:
    training = Training(vision=2.0)
    for _ in range(6):
        assert training.run((1, 1, 1, 1)).slowness == ()
    assert training.calibrator.correction.modules["vision"] == pytest.approx((2.0, 2.0), rel=0.01)


def test_of_all_ranks_that_become_slower_none_is_slow() -> None:
    training = Training()
    for _ in range(4):
        training.run((1, 1, 1, 1))
    for _ in range(6):
        assert training.run((2, 2, 2, 2)).slowness == ()
