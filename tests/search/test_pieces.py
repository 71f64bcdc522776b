"""Large graphs, searched piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.lab.instances import family, generate
from pipeloom.search import Evaluations, context, solve
from pipeloom.search.jobs import components
from pipeloom.search.params import DEFAULTS, PieceParams
from pipeloom.search.pieces import Parts, cut
from pipeloom.search.state import Search
from pipeloom.taskgraph import topological_order
from pipeloom.timeline import Schedule, check, simulate
from tests.strategies import graphs, random_order


def with_pieces(**changes):
    return type(DEFAULTS)(pieces=PieceParams(**{"most_tasks": 0, **changes}))


@given(graphs(num_candidates=0), st.integers(0, 2**31))
def test_a_part_runs_as_in_the_whole(graph, seed):
    """Half of the jobs alone: the same tasks, costs and edges, so the same times in the same order."""
    rng = np.random.default_rng(seed)
    job_of_task = components(graph)
    tasks = np.flatnonzero(rng.integers(0, 2, job_of_task.max() + 1)[job_of_task])
    if not len(tasks):
        return
    part = Parts(graph)(tasks)
    order = random_order(graph, rng).order
    mine = tuple(np.searchsorted(tasks, each[np.isin(each, tasks)]) for each in order)
    alone = simulate(part, Schedule(mine))
    assert not {v.kind for v in check(part, Schedule(mine), alone)} - {"memory"}
    # In the whole graph the others come last, and are in nobody's way.
    rest = [each[~np.isin(each, tasks)] for each in order]
    whole = simulate(graph, Schedule(tuple(np.append(tasks[a], b) for a, b in zip(mine, rest, strict=True))))
    assert (whole.end_ns[tasks] == alone.end_ns).all()
    assert len(topological_order(part)) == len(tasks)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_fit_and_are_better_than_static_orders(seed):
    graph = generate(family("vlm-s", num_microbatches=24, memory=1.5), seed)
    static = solve(graph, budget=Evaluations(30), seed=0, method="portfolio")
    found = solve(graph, budget=Evaluations(400), seed=seed, params=with_pieces(tasks=100))
    again = solve(graph, budget=Evaluations(400), seed=seed, params=with_pieces(tasks=100))
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.timeline.makespan_ns < static.timeline.makespan_ns
    assert all((a == b).all() for a, b in zip(found.schedule.order, again.schedule.order, strict=True))


def test_a_job_is_never_cut():
    graph = generate(family("vlm-s", num_microbatches=12, memory=1.5), 0)
    search = Search(graph, context.begin(Evaluations(1)))
    pieces = cut(search, 60)
    assert len(pieces) > 2
    assert sorted(np.concatenate(pieces).tolist()) == list(range(graph.num_tasks))
    owners = [set(search.jobs.job_of_task[tasks].tolist()) for tasks in pieces]
    assert sum(map(len, owners)) == len(set.union(*owners))
