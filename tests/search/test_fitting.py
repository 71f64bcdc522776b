"""Candidates that are lean in different ways, at memory that few choices fit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.components import find_components, make_walks
from pipeloom.search.fitting import fitting_schedule
from pipeloom.search.plain import first_in_first_out, minimum_memory
from pipeloom.taskgraph import NO_TASK, Candidate, Edges, Pairs, TaskGraph, Tasks, make_graph
from pipeloom.timeline import check
from pipeloom_instances import family, generate
from tests.chains import uniform_chain
from tests.strategies import Shape, random_graph


def crossed(seed: int) -> TaskGraph:
    """One microbatch whose pairs have candidates of random bytes, on ranks with little room."""
    rng = np.random.default_rng(seed)
    shape = Shape(
        num_ranks=int(rng.integers(1, 3)),
        num_microbatches=1,
        num_modules=int(rng.integers(1, 4)),
        max_segments=2,
        max_parts=2,
        split=("no", "all", "some")[seed % 3],
        frozen=bool(seed % 2),
        memory=1.0,
    )
    graph = random_graph(seed, shape)
    options = tuple(
        tuple(
            Candidate(
                "x", 1, 1, int(graph.weight_of[pair] != NO_TASK), int(rng.integers(0, 10)), int(rng.integers(0, 10))
            )
            for _ in range(int(rng.integers(1, 4)))
        )
        for pair in range(graph.num_pairs)
    )
    room = rng.integers(3, 16, graph.num_ranks)
    return replace(graph, candidates=options, capacity_bytes=graph.static_bytes + room)


def fits_somehow(
    graph: TaskGraph,
    done: int = 0,
    level: tuple[int, ...] = (),
    chosen: tuple[int, ...] = (),
    seen: set[object] | None = None,
) -> bool:
    """Whether any order and choice fits, by trying all: tasks one by one, nothing skipped."""
    seen = set() if seen is None else seen
    level = level or (0,) * graph.num_ranks
    chosen = chosen or (-1,) * graph.num_pairs
    if done == (1 << graph.num_tasks) - 1:
        return True
    if (done, chosen) in seen:
        return False
    seen.add((done, chosen))
    for task in range(graph.num_tasks):
        before = graph.predecessor[graph.predecessor_start[task] : graph.predecessor_start[task + 1]]
        if done >> task & 1 or not all(done >> int(p) & 1 for p in before):
            continue
        pair, rank, kind = int(graph.pair[task]), int(graph.rank[task]), int(graph.kind[task])
        for number, option in enumerate(graph.candidates[pair]):
            if kind != 0 and number != chosen[pair]:
                continue
            first = option.activation_bytes if kind == 0 else 0
            last = 0
            if kind in (1, 2) or (kind == 0 and graph.backward_of[pair] == NO_TASK):
                last -= option.activation_bytes
            if kind == 2:
                last += option.weight_gradient_bytes
            if kind == 3:
                last -= option.weight_gradient_bytes
            last += int(graph.edge_bytes[graph.edge_source == task].sum())
            last -= int(graph.edge_bytes[graph.edge_target == task].sum())
            room = int(graph.capacity_bytes[rank] - graph.static_bytes[rank])
            if level[rank] + max(first, first + last) > room:
                continue
            higher = (*level[:rank], level[rank] + first + last, *level[rank + 1 :])
            picked = (*chosen[:pair], number, *chosen[pair + 1 :])
            if fits_somehow(graph, done | 1 << task, higher, picked, seen):
                return True
    return False


def test_whatever_fits_is_found():
    answers = {True: 0, False: 0}
    for seed in range(400):
        graph = crossed(seed)
        if graph.num_tasks > 10:
            continue
        expected = fits_somehow(graph)
        answers[expected] += 1
        if not expected:
            with pytest.raises(InfeasibleError):
                first_in_first_out(graph)
            continue
        assert check(graph, first_in_first_out(graph)) == (), seed
    assert min(answers.values()) > 20


def test_an_edge_listed_twice_is_one_edge():
    for seed in range(100):
        graph = crossed(seed)
        found = [fitting_schedule(each)[0] for each in (graph, edges_twice(graph))]
        once, twice = (None if each is None else each.candidate.tolist() for each in found)
        assert once == twice, seed


def edges_twice(graph: TaskGraph) -> TaskGraph:
    """The same graph with every edge listed twice."""
    return make_graph(
        name=graph.name,
        num_ranks=graph.num_ranks,
        tasks=Tasks(
            kind=graph.kind,
            rank=graph.rank,
            duration_ns=graph.duration_ns,
            pair=graph.pair,
            pass_id=graph.pass_id,
            microbatch=graph.microbatch,
            module=graph.module,
            module_names=graph.module_names,
        ),
        pairs=Pairs(
            activation_bytes=graph.activation_bytes,
            weight_gradient_bytes=graph.weight_gradient_bytes,
            candidates=graph.candidates,
        ),
        edges=Edges(
            source=np.concatenate([graph.edge_source, graph.edge_source]),
            target=np.concatenate([graph.edge_target, graph.edge_target]),
            delay_ns=np.concatenate([graph.edge_delay_ns, graph.edge_delay_ns]),
            bytes=np.concatenate([graph.edge_bytes, np.zeros_like(graph.edge_bytes)]),
        ),
        static_bytes=graph.static_bytes,
        capacity_bytes=graph.capacity_bytes,
    )


def test_solve_takes_candidates_that_fit_together():
    hard = (graph for graph in map(crossed, itertools.count()) if _needs_fitting(graph))
    for graph in itertools.islice(hard, 3):
        found = solve(graph, budget=Budget(evaluations=40), seed=0)
        assert check(graph, found.schedule, found.timeline) == ()
        assert found.lower_bound.ns <= found.timeline.makespan_ns


def _needs_fitting(graph: TaskGraph) -> bool:
    try:
        find_components(graph.with_candidates(minimum_memory(graph)))
    except InfeasibleError:
        return fitting_schedule(graph)[0] is not None
    return False


def test_walks_serve_all_candidates_of_a_graph():
    """Components found with the walks of the graph are those found without them."""
    for seed in range(3):
        graph = generate(family("vlm-s", num_ranks=3, num_microbatches=6, memory=1.2, strategies=True), seed)
        walks = make_walks(graph)
        for choice in (minimum_memory(graph), [0] * graph.num_pairs):
            chosen = graph.with_candidates(choice)
            try:
                alone = find_components(chosen)
            except InfeasibleError:
                with pytest.raises(InfeasibleError):
                    find_components(chosen, walks)
                continue
            together = find_components(chosen, walks)
            for name in ("component_of_task", "order", "demand", "capacity", "scan_start", "scan_task"):
                assert np.array_equal(getattr(alone, name), getattr(together, name)), name


def test_the_message_says_whether_all_orders_were_tried():
    with pytest.raises(InfeasibleError, match="no order fits"):
        first_in_first_out(uniform_chain(2, 2, chunks_per_rank=2, activation_bytes=9, capacity_bytes=12))


def test_what_is_held_for_no_time_does_not_count():
    """A frozen forward that lasts no time, larger than the room."""
    frozen = make_graph(
        name="instant",
        num_ranks=1,
        tasks=Tasks(
            kind=[0, 0, 1],
            rank=[0, 0, 0],
            duration_ns=[0, 1, 1],
            pair=[0, 1, 1],
            pass_id=[0, 1, 2],
            microbatch=[0, 0, 0],
            module=[0, 0, 0],
            module_names=("m",),
        ),
        pairs=Pairs(activation_bytes=[9, 5], weight_gradient_bytes=None),
        edges=Edges(source=[0], target=[1], delay_ns=[0]),
        capacity_bytes=[8],
    )
    found = solve(frozen, budget=Budget(evaluations=5), seed=0)
    assert check(frozen, found.schedule, found.timeline) == ()
    assert check(frozen, first_in_first_out(frozen)) == ()
