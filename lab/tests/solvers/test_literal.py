"""DIP to the letter: a program for every rank of every rollout, the papers' memory rule, ten knapsack candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeloom.compare.model_on_cluster import put_on_cluster
from pipeloom.search import Budget, solve
from pipeloom.search.strategies import StrategyChooser
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, check, simulate
from pipeloom_instances import family, generate
from pipeloom_lab.reproduce.dip.literal import MOST_CANDIDATES, knapsack_costs
from pipeloom_lab.solvers.integer_program import program_strategies, solve_program, state_program
from pipeloom_lab.solvers.literal import ProgramChooser, standstills


@pytest.fixture(scope="module")
def tight() -> TaskGraph:
    return generate(family("vlm-s", num_microbatches=4, memory=1.5, strategies=True), 0)


def test_every_rollout_has_programs_and_what_comes_out_fits(tight: TaskGraph) -> None:
    found = solve(tight, budget=Budget(evaluations=30), seed=0, method="dip literal")
    assert not check(tight, found.schedule, found.timeline)
    # The order's strategies are those of the programs, so that choosing again changes nothing.
    again = program_strategies(tight, found.schedule)
    assert simulate(tight, again).makespan_ns == found.timeline.makespan_ns
    several = solve(tight, budget=Budget(evaluations=30), seed=0, method="dip literal", threads=2)
    assert not check(tight, several.schedule, several.timeline)


def test_a_chooser_answers_alike_when_asked_again(tight: TaskGraph) -> None:
    schedule = solve(tight, budget=Budget(evaluations=10), seed=0, method="mcts uniform").schedule
    start = simulate(tight, schedule).start_ns
    sequence = np.lexsort((np.arange(tight.num_tasks), start))
    chooser = ProgramChooser(tight)
    first, choice = chooser.choose(sequence), chooser.choice().copy()
    other = chooser.another()
    assert other.choose(sequence) == first
    assert (other.choice() == choice).all()
    orders = tuple(sequence[tight.rank[sequence] == rank] for rank in range(tight.num_ranks))
    assert simulate(tight, Schedule(orders, choice, "")).makespan_ns == first


def test_standstills_are_of_memory_alone(tight: TaskGraph) -> None:
    assert 0 <= standstills(tight, 20, 0) <= 20
    assert standstills(generate(family("vlm-s", num_microbatches=4, strategies=True), 0), 20, 0) == 0


def test_a_program_to_the_end_is_no_worse_than_to_five_per_cent(tight: TaskGraph) -> None:
    schedule = solve(tight, budget=Budget(evaluations=10), seed=0, method="mcts").schedule
    for rank, order in enumerate(schedule.order):
        stated = state_program(StrategyChooser(tight), order, rank)
        warm, exact = solve_program(stated), solve_program(stated, gap=0.0, warm=False)
        assert exact.total_ns <= warm.total_ns
        assert warm.total_ns <= exact.total_ns * 1.06


def test_the_knapsack_offers_ten_beside_keeping_everything_and_some_offload() -> None:
    costs = knapsack_costs(put_on_cluster("t2v-s", "dip-h800-64", Degrees(tensor=4, pipeline=4), update=False))
    module = costs.model_spec.modules[-1]
    found = costs.chunk_costs(Chunk(module.name, (0, 3), 0), Workload((8192,)))
    assert len(found) == MOST_CANDIDATES + 1
    keep = found[0]
    assert all(cost.activation_bytes <= keep.activation_bytes for cost in found)
    assert any(cost.host_bytes for cost in found)
    times = [cost.forward_s + cost.backward_s for cost in found]
    assert min(times) == pytest.approx(times[0], rel=1e-6)


def test_a_rank_without_tasks_has_no_program() -> None:
    whole = generate(family("vlm-s", num_microbatches=2, num_ranks=2, strategies=True), 0)
    none = np.zeros(1, np.int64)
    graph = replace(whole, num_ranks=3, static_bytes=np.concatenate([whole.static_bytes, none]), capacity_bytes=None)
    found = solve(graph, budget=Budget(evaluations=10), seed=0, method="dip literal")
    assert not check(graph, found.schedule, found.timeline)
    assert len(found.schedule.order[2]) == 0
    assert program_strategies(graph, found.schedule).candidate is not None
