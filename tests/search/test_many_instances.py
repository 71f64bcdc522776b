"""Ten thousand random instances of four kinds through the search, each answer judged by the independent checker.

What fits by construction must be solved; what may not fit is tried out exhaustively where it is small. No bound may lie
above a schedule: not above the one found, not above others that the checker passes, and not above the best of all where
there are few.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pipeloom.errors import InfeasibleError
from pipeloom.io.instance import instance_from_document
from pipeloom.search import Budget, solve
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, check, simulate
from tests.strategies import Shape, random_graph, random_order

from .foreign import foreign_document
from .test_feasible import all_orders, answer, own_candidates, small_graph, some_schedule_fits
from .test_fitting import crossed, edges_twice, fits_somehow

NUM, PARTS = 10_000, 20


def solved(graph: TaskGraph, seed: int, evaluations: int) -> None:
    """The instance has an order: it is found, and its times and bytes and the bound hold."""
    found = solve(graph, budget=Budget(evaluations=evaluations), seed=seed)
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.lower_bound.ns <= found.timeline.makespan_ns
    rng = np.random.default_rng(seed)
    for _ in range(3):
        other = random_order(graph, rng)
        if check(graph, other) == ():
            assert found.lower_bound.ns <= simulate(graph, other).makespan_ns


def tiny(seed: int) -> None:
    """Every form of pair, edges twice, tasks of no time: all orders and choices are tried."""
    graph = small_graph(seed, 1 + seed // 4 % 3, seed // 12 % 2)
    if graph.num_tasks > 7:
        graph = small_graph(seed, 2, seed // 12 % 2)
    assert answer(graph) in (None, some_schedule_fits(graph))
    if graph.num_tasks <= 6 and graph.candidates is None and answer(graph):
        found = solve(graph, budget=Budget(evaluations=4), seed=0)
        orders = (Schedule(tuple(np.array(tasks, np.int64) for tasks in order), None) for order in all_orders(graph))
        assert found.lower_bound.ns <= min(simulate(graph, o).makespan_ns for o in orders if not check(graph, o))


def small(seed: int) -> None:
    """Up to twelve tasks with little room and candidates that are lean in different ways: all sets are tried."""
    graph = crossed(seed) if seed // 4 % 2 else small_graph(seed, 3 + seed // 8 % 3, 1)
    if graph.num_tasks > 12:
        graph = small_graph(seed, 3, 1)
    rows = graph.candidates or tuple((c,) for c in own_candidates(graph))
    assert answer(graph) == fits_somehow(replace(graph, candidates=rows))


def pipeline(seed: int) -> None:
    """Modules over up to sixteen ranks, in which one microbatch after the other always fits."""
    rng = np.random.default_rng(seed)
    pick = rng.choice
    shape = Shape(
        num_ranks=int(pick([1, 2, 3, 4, 8, 16])),
        num_microbatches=int(rng.integers(1, 6)),
        num_modules=int(rng.integers(1, 4)),
        max_segments=int(rng.integers(1, 3)),
        max_parts=int(rng.integers(1, 4)),
        split=str(pick(["no", "some", "all"])),
        frozen=bool(pick([False, True])),
        jitter=bool(pick([False, True])),
        delays=bool(pick([False, True])),
        edge_bytes=bool(pick([False, True])),
        num_candidates=int(pick([0, 0, 3])),
        memory=pick([None, 1.0, 1.0, 1.1, 1.5]),
        longest_ns=int(pick([1, 3, 9, 1000, 10**9])),
    )
    graph = random_graph(seed, shape)
    if seed // 4 % 3 == 0:
        graph = edges_twice(graph)
    # A part without tasks for some modules leaves nothing to do at all.
    if graph.num_tasks:
        solved(graph, seed, int(pick([1, 20])))


def foreign(seed: int) -> None:
    """Tasks anywhere, as others may write them, in which the order of the file fits."""
    room = (None, 1.0, 1.0, 1.5)[seed // 4 % 4]
    solved(instance_from_document(json.loads(json.dumps(foreign_document(seed, room=room)))), seed, 20)


KINDS: tuple[Callable[[int], None], ...] = (tiny, small, pipeline, foreign)


def run(seeds: range) -> None:
    for seed in seeds:
        try:
            KINDS[seed % len(KINDS)](seed)
        except (AssertionError, InfeasibleError) as error:
            error.add_note(f"{KINDS[seed % len(KINDS)].__name__}({seed})")
            raise


def test_some_instances() -> None:
    run(range(100))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_instances(part: int) -> None:
    run(range(part * NUM // PARTS, (part + 1) * NUM // PARTS))


def test_the_kinds_are_what_they_say() -> None:
    """Both answers occur among the small ones, and what is hard occurs among all."""
    fits = [some_schedule_fits(small_graph(seed, 2, seed % 2)) for seed in range(40)]
    assert {True, False} <= set(fits)
    assert any(graph.candidates is not None for graph in map(crossed, range(8)))
    twice = edges_twice(random_graph(3, Shape(delays=True)))
    assert len(set(zip(twice.edge_source.tolist(), twice.edge_target.tolist(), strict=True))) < len(twice.edge_source)
