"""Large graphs, searched on a sample of their components."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.search import Budget, local, solve
from pipeloom.search.budget import WHOLE
from pipeloom.search.components import label_components
from pipeloom.search.context import begin
from pipeloom.search.local import portfolio
from pipeloom.search.params import DEFAULTS, SampleParams
from pipeloom.search.sample import part_of, search_sample, take_sample
from pipeloom.search.state import Search
from pipeloom.search.tabu import tabu_search
from pipeloom.taskgraph import topological_order
from pipeloom.timeline import Schedule, check, lower_bound, simulate
from pipeloom_instances import family, generate
from tests.strategies import graphs, random_order

SAMPLED = type(DEFAULTS)(sample=SampleParams(most_tasks=0, tasks=1500, most_filling=1.1))


@given(graphs(num_candidates=0), st.integers(0, 2**31))
def test_a_part_runs_as_in_the_whole(graph, seed):
    """Half of the components alone: the same tasks, costs and edges, so the same times in the same order."""
    rng = np.random.default_rng(seed)
    component_of_task = label_components(graph)
    tasks = np.flatnonzero(rng.integers(0, 2, component_of_task.max() + 1)[component_of_task])
    if not len(tasks):
        return
    part = part_of(graph, tasks)
    order = random_order(graph, rng).order
    mine = tuple(np.searchsorted(tasks, each[np.isin(each, tasks)]) for each in order)
    alone = simulate(part, Schedule(mine))
    assert not {v.kind for v in check(part, Schedule(mine), alone)} - {"memory"}
    # In the whole graph the others come last, and are in nobody's way.
    rest = [each[~np.isin(each, tasks)] for each in order]
    whole = simulate(graph, Schedule(tuple(np.append(tasks[a], b) for a, b in zip(mine, rest, strict=True))))
    assert (whole.end_ns[tasks] == alone.end_ns).all()
    assert len(topological_order(part)) == len(tasks)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("copies", [2, 3, 7])
def test_whatever_fits_for_the_sample_fits_for_all(copies, split):
    """Every task is there once, after what it waits for, and no rank holds more than the sample does."""
    rng = np.random.default_rng(copies)
    graph = generate(family("vlm-s", num_microbatches=40, split=split), copies)
    near = graph.rank[graph.edge_source] == graph.rank[graph.edge_target]
    assert near.any()
    graph = replace(graph, edge_bytes=np.where(near, rng.integers(0, 1 << 32, len(near)), 0))
    sample = take_sample(graph, label_components(graph), copies)
    part = sample.graph
    assert part.num_tasks < graph.num_tasks
    alone = random_order(part, rng)
    timeline = simulate(part, alone)
    sequence = sample.sequence(np.lexsort((np.arange(part.num_tasks), timeline.end_ns, timeline.start_ns)))
    assert sorted(sequence.tolist()) == list(range(graph.num_tasks))
    limited = replace(graph, capacity_bytes=timeline.peak_bytes)
    whole = Schedule(tuple(sequence[graph.rank[sequence] == r] for r in range(graph.num_ranks)))
    assert check(limited, whole, simulate(limited, whole)) == ()


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_leads_to_better_schedules_than_static_orders(seed):
    graph = generate(family("vlm-s", num_microbatches=400, memory=1.5), seed)
    search = Search(graph, begin(Budget(evaluations=4000), lower_bound(graph).ns, params=SAMPLED))
    portfolio(search, WHOLE.first(0.1))
    before = search.best_ns
    search_sample(search, WHOLE, lambda alone, stretch: (portfolio(alone, stretch.first(0.1)), tabu_search(alone)))
    assert search.best_ns < before
    schedule = Schedule(search.orders())
    assert check(graph, schedule, simulate(graph, schedule)) == ()
    # Components that are all unlike: the sample would be everything.
    rng = np.random.default_rng(seed)
    graph = replace(graph, module=rng.integers(0, 2, graph.num_tasks))
    other = Search(graph, begin(Budget(evaluations=4000), lower_bound(graph).ns, params=SAMPLED))
    search_sample(other, WHOLE, lambda *_: pytest.fail("searched"))


def test_the_default_search_samples_large_graphs():
    graph = generate(family("vlm-s", num_microbatches=400, memory=1.5), 0)
    static = solve(graph, budget=Budget(evaluations=30), seed=0, method="portfolio")
    found, again = (solve(graph, budget=Budget(evaluations=600), seed=0, params=SAMPLED) for _ in range(2))
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.timeline.makespan_ns < static.timeline.makespan_ns
    assert all((a == b).all() for a, b in zip(found.schedule.order, again.schedule.order, strict=True))


def test_what_was_found_since_the_last_meeting_is_kept(monkeypatch):
    """Large incumbents are not put in order after every round, but at the end."""
    monkeypatch.setattr(local, "_TASKS_PER_OFFER", 1)
    graph = generate(family("vlm-s", num_microbatches=24, memory=1.5), 0)
    search = Search(graph, begin(Budget(evaluations=1500)))
    portfolio(search, WHOLE.first(0.1))
    before = search.best_ns
    tabu_search(search)
    assert search.best_ns < before
    schedule = Schedule(search.orders())
    assert simulate(graph, schedule).makespan_ns == search.best_ns
