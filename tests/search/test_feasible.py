"""What fits is found: whatever the search calls infeasible is so, by trying all."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.io.instance import instance_from_document
from pipeloom.search import Budget, solve
from pipeloom.search.fitting import any_lasts_no_time
from pipeloom.search.plain import first_in_first_out
from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Candidate,
    Edges,
    IntArray,
    Pairs,
    TaskGraph,
    Tasks,
    make_graph,
)
from pipeloom.timeline import Schedule, check
from tests.chains import uniform_chain
from tests.search.test_fitting import fits_somehow


def instance(kind: str, **parts: Any) -> TaskGraph:
    """An instance of one module and microbatch, every task a segment of its own."""
    tasks = {"kind": list(kind), "module": ["m"] * len(kind), "microbatch": [0] * len(kind)}
    tasks |= {"segment": list(range(len(kind))), "rank": parts["rank"]}
    tasks |= {"duration_s": parts["duration_s"], "pair": parts["pair"]}
    document = {
        "format": "pipeloom.instance/1",
        "name": "small",
        "num_ranks": len(parts["capacity"]),
        "memory_capacity_bytes": parts["capacity"],
        "memory_static_bytes": parts.get("static", [0] * len(parts["capacity"])),
        "tasks": tasks,
        "pairs": {"activation_bytes": parts["activation"], "candidates": parts.get("candidates")}
        | {"weight_gradient_bytes": parts.get("gradient")},
        "edges": {"source": [], "target": [], "delay_s": []},
    }
    return instance_from_document(document)


def option(name: str, forward: float, inputs: float, weights: float, activation: int, gradient: int) -> dict[str, Any]:
    """A candidate of a split pair."""
    times = {"forward_s": forward, "backward_input_s": inputs, "backward_weight_s": weights}
    return {"strategy": name, **times, "activation_bytes": activation, "weight_gradient_bytes": gradient}


def one_split_pair() -> TaskGraph:
    """Only the candidate that splits its backward is lean enough."""
    return instance(
        "FIW",
        rank=[0, 0, 0],
        duration_s=[1.0, 1.0, 1.0],
        pair=[0, 0, 0],
        activation=[40],
        capacity=[10],
        candidates=[
            [
                option("keep", 1.0, 1.0, 1.0, 40, 40),
                option("keep whole", 1.0, 2.0, 0.0, 40, 40),
                option("full", 1.0, 2.0, 1.0, 4, 4),
            ]
        ],
    )


def test_what_fits_only_with_split_backwards_is_solved():
    graph = one_split_pair()
    found = solve(graph, budget=Budget(evaluations=20), seed=0)
    assert found.schedule.candidate is not None
    assert found.schedule.candidate.tolist() == [2]
    assert check(graph, found.schedule, found.timeline) == ()


def test_a_weight_gradient_that_is_held_for_no_time_does_not_count():
    whole = option("whole", 1.0, 1.0, 0.0, 4, 50)
    columns = {"rank": [0] * 3, "duration_s": [1.0, 1.0, 0.0], "pair": [0] * 3, "activation": [4], "gradient": [50]}
    graph = instance("FIW", **columns, capacity=[5], candidates=[[whole]])
    for schedule in (solve(graph, budget=Budget(evaluations=5), seed=0).schedule, first_in_first_out(graph)):
        assert check(graph, schedule) == ()


def small_graph(seed: int, num_pairs: int, shortest_ns: int) -> TaskGraph:
    """Pairs of every form on one or two ranks, with candidates, edges that hold bytes, and edges listed twice."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(1, 3))
    kind, pair = [], []
    for number in range(num_pairs):
        form = [(FORWARD,), (FORWARD, BACKWARD), (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)][int(rng.integers(0, 3))]
        kind += form
        pair += [number] * len(form)
    home = rng.integers(0, num_ranks, num_pairs)
    # Edges lead from earlier to later in an order that has all forwards first.
    stage = np.array([{FORWARD: 0, BACKWARD: 1, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: 2}[k] for k in kind])
    place = np.argsort(np.lexsort((rng.random(len(kind)), stage)))
    edges = []
    for _ in range(int(rng.integers(0, len(kind)))):
        a, b = sorted(rng.integers(0, len(kind), 2).tolist(), key=lambda task: place[task])
        if a != b:
            held = int(rng.integers(0, 5)) if home[pair[a]] == home[pair[b]] else 0
            edges += [(a, b, int(rng.integers(0, 2)), held)] * int(rng.integers(1, 3))

    def bytes_of() -> int:
        return int(rng.integers(0, 9))

    def option() -> Candidate:
        times = rng.integers(shortest_ns, 3, 3).tolist()
        return Candidate("x", *times, bytes_of(), bytes_of())

    rows = tuple(tuple(option() for _ in range(int(rng.integers(1, 3)))) for _ in range(num_pairs))
    graph = make_graph(
        name="small",
        num_ranks=num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=home[pair],
            duration_ns=[
                rows[p][0][{FORWARD: 1, BACKWARD: 2, INPUT_GRADIENT: 2, WEIGHT_GRADIENT: 3}[k]]
                for k, p in zip(kind, pair, strict=True)
            ],
            pair=pair,
            pass_id=range(len(kind)),
            microbatch=[0] * len(kind),
            module=[0] * len(kind),
            module_names=("m",),
        ),
        pairs=Pairs(
            activation_bytes=[row[0].activation_bytes for row in rows],
            weight_gradient_bytes=[row[0].weight_gradient_bytes for row in rows],
        ),
        edges=Edges(
            source=[e[0] for e in edges],
            target=[e[1] for e in edges],
            delay_ns=[e[2] for e in edges],
            bytes=[e[3] for e in edges],
        ),
        static_bytes=rng.integers(0, 3, num_ranks),
        capacity_bytes=rng.integers(4, 16, num_ranks),
    )
    return graph if seed % 2 else replace(graph, candidates=rows)


def all_orders(graph: TaskGraph) -> set[tuple[tuple[int, ...], ...]]:
    """Every order of the ranks' tasks that does not wait for itself."""
    found, stack, seen = set(), [(0, ((),) * graph.num_ranks)], set()
    rows = graph.predecessor_start
    while stack:
        done, order = stack.pop()
        if order in seen:
            continue
        seen.add(order)
        if done == (1 << graph.num_tasks) - 1:
            found.add(order)
        for task in range(graph.num_tasks):
            before = graph.predecessor[rows[task] : rows[task + 1]].tolist()
            if not done >> task & 1 and all(done >> p & 1 for p in before):
                rank = int(graph.rank[task])
                longer = (*order[:rank], (*order[rank], task), *order[rank + 1 :])
                stack.append((done | 1 << task, longer))
    return found


def some_schedule_fits(graph: TaskGraph) -> bool:
    """Whether the checker passes any order and choice, each tried from its first task to its last."""
    choices: list[IntArray | None] = [None]
    if graph.candidates is not None:
        choices = [np.array(c) for c in itertools.product(*(range(len(row)) for row in graph.candidates))]
    orders = [tuple(np.array(tasks, np.int64) for tasks in order) for order in all_orders(graph)]
    return any(not check(graph, Schedule(order, choice)) for order in orders for choice in choices)


def answer(graph: TaskGraph) -> bool | None:
    """Whether the search finds a schedule, which is checked. None: it is not sure, since tasks last no time."""
    try:
        found = solve(graph, budget=Budget(evaluations=4), seed=0)
    except NothingFoundError:
        assert any_lasts_no_time(graph)
        return None
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            first_in_first_out(graph)
        return False
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.lower_bound.ns <= found.timeline.makespan_ns
    assert check(graph, first_in_first_out(graph)) == ()
    return True


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 1))
def test_whatever_is_called_infeasible_is_so(seed: int, num_pairs: int, shortest_ns: int) -> None:
    graph = small_graph(seed, num_pairs, shortest_ns)
    if graph.num_tasks <= 7:
        assert answer(graph) in (None, some_schedule_fits(graph))


@given(st.integers(0, 2**31), st.integers(3, 6))
def test_up_to_twelve_tasks_the_answer_is_right(seed: int, num_pairs: int) -> None:
    """Where no task lasts no time, what a set of tasks holds does not depend on its order, so that sets are tried."""
    graph = small_graph(seed, num_pairs, 1)
    if graph.num_tasks <= 12:
        rows = graph.candidates or tuple((c,) for c in own_candidates(graph))
        assert answer(graph) == fits_somehow(replace(graph, candidates=rows))


@pytest.mark.parametrize(("forward_ns", "kind"), [(0, NothingFoundError), (1, InfeasibleError)])
def test_proofs_are_of_graphs_of_any_size(forward_ns: int, kind: type[InfeasibleError]) -> None:
    """Two pairs of a microbatch do not fit together. If forwards last no time, other orders may fit."""
    graph = uniform_chain(2, 8, chunks_per_rank=2, activation_bytes=5, capacity_bytes=8)
    row = Candidate("keep", forward_ns, 2, 0, 5, 0), Candidate("recompute", forward_ns, 3, 0, 5, 0)
    graph = replace(graph, candidates=(row,) * graph.num_pairs)
    with pytest.raises(InfeasibleError) as refused:
        solve(graph, budget=Budget(evaluations=4), seed=0)
    assert type(refused.value) is kind


def own_candidates(graph: TaskGraph) -> list[Candidate]:
    """What a graph without candidates says of its pairs, as the only candidate of each."""
    sizes = zip(graph.activation_bytes.tolist(), graph.weight_gradient_bytes.tolist(), strict=True)
    return [Candidate("only", 1, 1, 1, *each) for each in sizes]
