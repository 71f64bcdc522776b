"""Systems on ranks that wait instead of computing."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from pipeloom.compare.batches import chain_layouts, compare_systems
from pipeloom.errors import InputError
from pipeloom.runtime.launch.coordination import LongBarrier
from pipeloom.runtime.launch.processes import launch
from pipeloom.search import Budget
from pipeloom.training import RunConfig
from pipeloom.training.config import LayoutConfig, ParallelConfig
from pipeloom.training.loop_config import LogConfig
from pipeloom.training.waiting import Systems, WaitedSystems, run_waiting, take_part
from tests.cases import random_batch
from tests.planner.cases import random_problem

SECONDS = 2.0


def on_rank(seed: int, batches: int) -> WaitedSystems | None:
    if dist.get_rank():
        take_part(LongBarrier())
        return None
    problem = random_problem(seed)
    drawn = [random_batch(seed + i) for i in range(batches)]
    systems: dict[str, list[object]] = {}
    if drawn:
        layouts = chain_layouts(problem, problem.profile_costs.profile.load, drawn)
        for batch in drawn:
            for result in compare_systems(problem, layouts, batch, budget=Budget(evaluations=10)):
                systems.setdefault(result.name, []).append(result)
    given: Systems = systems  # type: ignore[assignment]
    return run_waiting(given, problem, SECONDS, LongBarrier())


@pytest.mark.ranks
@pytest.mark.parametrize("seed", [11, pytest.param(3, marks=pytest.mark.full)])
def test_every_system_takes_as_long_as_its_tasks_and_messages(seed: int) -> None:
    num_ranks = random_problem(seed).layout.num_ranks
    found = launch(on_rank, num_ranks, seed, 2)[0]
    assert found is not None
    assert {"1f1b", "per-batch plan"} <= found.systems.keys()
    numbers = {len(each) for each in found.systems.values()}
    assert len(numbers) == 1
    for name, runs in found.systems.items():
        for one in runs:
            graph, planned = one.result.graph, one.result.timeline
            lasted = one.measured.end_ns - one.measured.start_ns
            # A rank never wakes up early; times are rounded to nanoseconds after the stretch.
            assert (lasted >= graph.duration_ns - 2).all()
            assert one.measured.makespan_ns >= planned.makespan_ns - 2 * graph.num_tasks
            for order in one.result.schedule.order:
                assert (np.diff(one.measured.start_ns[list(order)]) >= 0).all()
        assert found.means.mean_measured_s[name] >= found.means.mean_planned_s[name] * (1 - 1e-6)


@pytest.mark.ranks
def test_without_batches_the_other_ranks_are_released() -> None:
    assert launch(on_rank, random_problem(3).layout.num_ranks, 3, 0)[0] is None


def test_replicas_do_not_wait() -> None:
    with pytest.raises(InputError, match=r"log\.waiting_s"):
        RunConfig(layout=LayoutConfig(ranks=2), parallel=ParallelConfig(dp=2), log=LogConfig(waiting_s=1.0))
    with pytest.raises(InputError, match=r"log\.waiting_s"):
        LogConfig(waiting_s=-1.0)
