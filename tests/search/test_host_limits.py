"""Random instances whose candidates hold bytes on the host, under limits of device and host: every method finds a
schedule where there is one, and says so where there is none.

The truth comes from trying all orders and candidates of tiny instances, and by construction for larger ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.search import Budget, solve
from pipeloom.search.components import make_walks
from pipeloom.search.fitting import any_lasts_no_time
from pipeloom.search.plain import first_in_first_out
from pipeloom.taskgraph import Candidate, Edges, Pairs, TaskGraph, Tasks, make_graph
from pipeloom.timeline import Schedule, check, host_peaks, lower_bound, simulate
from tests.search.methods import ALL
from tests.strategies import Shape, random_graph, random_order

from .test_feasible import small_graph, some_schedule_fits

NO_CANDIDATES = {"milp", "gurobi", "z3"}
"""Methods that refuse instances with candidates."""
FAST = sorted(set(ALL) - NO_CANDIDATES - {"cp-sat", "windows"})
SOLVERS = sorted({"cp-sat", "windows"} & set(ALL))


def offering_hosts(graph: TaskGraph, rng: np.random.Generator) -> TaskGraph:
    """The graph with bytes on the host for some of its candidates, and more candidates that offload or do not split."""
    rows = []
    for row in graph.candidates:
        options = [option._replace(host_bytes=int(rng.integers(0, 9)) * int(rng.integers(0, 2))) for option in row]
        for _ in range(int(rng.integers(0, 3))):
            option = options[int(rng.integers(0, len(options)))]
            held = int(rng.integers(0, option.activation_bytes + 1))
            whole = {"backward_ns": option.backward_ns + option.weight_ns, "weight_ns": 0} if rng.random() < 0.3 else {}
            moved = int(rng.integers(0, 9)) if rng.random() < 0.7 else 0
            options.append(option._replace(activation_bytes=held, host_bytes=moved, **whole))
        rows.append(tuple(options[i] for i in rng.permutation(len(options))))
    return replace(graph, candidates=tuple(rows))


def taking_time(graph: TaskGraph) -> TaskGraph:
    """The graph with forwards and backwards of at least 1 ns.

    No graph is searched for orders whose tasks hold too much for no time.
    """
    rows = [
        tuple(o._replace(forward_ns=max(1, o.forward_ns), backward_ns=max(1, o.backward_ns)) for o in row)
        for row in graph.candidates
    ]
    return replace(graph, candidates=tuple(rows))


def with_random_limits(graph: TaskGraph, rng: np.random.Generator) -> TaskGraph:
    """The graph with limits of the hosts, and in some cases with bytes that are staged; it may have no schedule."""
    staging = rng.integers(0, 5, graph.num_ranks) if rng.random() < 0.3 else None
    host = rng.integers(0, 14, graph.num_ranks) if rng.random() < 0.9 else None
    capacity = None if rng.random() < 0.1 else graph.capacity_bytes
    return replace(graph, capacity_bytes=capacity, host_capacity_bytes=host, staging_bytes=staging)


def with_limits_that_fit(graph: TaskGraph, rng: np.random.Generator) -> TaskGraph:
    """The graph with the limits that one random schedule needs, which runs one microbatch after the other."""
    choice = np.array([int(rng.integers(0, len(row))) for row in graph.candidates])
    walk = make_walks(graph).order
    order = tuple(walk[graph.rank[walk] == rank] for rank in range(graph.num_ranks))
    schedule = Schedule(order, choice)
    peak, host = simulate(graph, schedule).peak_bytes, host_peaks(graph, schedule)
    staging = None
    if rng.random() < 0.3:
        staging = rng.integers(0, 5, graph.num_ranks)
        away = [
            rank
            for rank in range(graph.num_ranks)
            if any(
                row[c].host_bytes
                for row, c, f in zip(graph.candidates, choice.tolist(), graph.forward_of.tolist(), strict=True)
                if graph.rank[f] == rank
            )
        ]
        peak = peak + np.isin(np.arange(graph.num_ranks), away) * staging
    made = replace(graph, capacity_bytes=peak, host_capacity_bytes=host, staging_bytes=staging)
    assert check(made, schedule) == ()
    return made


def tiny(seed: int, shortest_ns: int) -> TaskGraph:
    """Up to seven tasks, whose schedules can all be tried."""
    rng = np.random.default_rng(seed)
    graph = small_graph(seed - seed % 2, 3, shortest_ns)
    if graph.num_tasks > 7:
        graph = small_graph(seed - seed % 2, 2, shortest_ns)
    return with_random_limits(offering_hosts(graph, rng), rng)


def pipeline(seed: int) -> TaskGraph:
    """Modules over a few ranks, with limits that some schedule keeps."""
    rng = np.random.default_rng(seed)
    shape = Shape(
        num_ranks=int(rng.integers(1, 4)),
        num_microbatches=int(rng.integers(1, 4)),
        num_modules=int(rng.integers(1, 3)),
        max_segments=int(rng.integers(1, 3)),
        max_parts=int(rng.integers(1, 3)),
        split=str(rng.choice(["no", "some", "all"])),
        frozen=bool(rng.integers(0, 2)),
        jitter=bool(rng.integers(0, 2)),
        delays=bool(rng.integers(0, 2)),
        edge_bytes=bool(rng.integers(0, 2)),
        num_candidates=3,
        memory=1.0,
        longest_ns=int(rng.choice([3, 9, 1000])),
    )
    return with_limits_that_fit(taking_time(offering_hosts(random_graph(seed, shape), rng)), rng)


def finds(graph: TaskGraph, method: str) -> bool | None:
    """Whether a method finds a schedule, which is checked. None: it is not sure, since tasks last no time."""
    try:
        found = solve(graph, budget=Budget(evaluations=4), seed=0, method=method)
    except NothingFoundError:
        assert any_lasts_no_time(graph)
        return None
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            first_in_first_out(graph)
        return False
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.lower_bound.ns <= found.timeline.makespan_ns
    try:
        assert check(graph, first_in_first_out(graph)) == ()
    except NothingFoundError:
        assert any_lasts_no_time(graph)
    return True


@given(st.integers(0, 2**31), st.integers(0, 1))
def test_tiny_instances_are_solved_or_refused_rightly(seed: int, shortest_ns: int) -> None:
    graph = tiny(seed, shortest_ns)
    assert finds(graph, "default") in (None, some_schedule_fits(graph))


@given(st.integers(0, 2**31))
def test_what_fits_is_found(seed: int) -> None:
    graph = pipeline(seed)
    if graph.num_tasks:
        assert finds(graph, "default")


@pytest.mark.parametrize("method", FAST)
def test_every_method_finds_what_fits(method: str) -> None:
    for seed in range(6):
        graph = tiny(seed, seed % 2)
        assert finds(graph, method) in (None, some_schedule_fits(graph)), seed
        graph = pipeline(seed)
        assert not graph.num_tasks or finds(graph, method), seed


@pytest.mark.full
@pytest.mark.parametrize("method", [*FAST, *SOLVERS])
def test_every_method_finds_what_fits_on_many_instances(method: str) -> None:
    for seed in range(100, 130):
        graph = tiny(seed, seed % 2)
        assert finds(graph, method) in (None, some_schedule_fits(graph)), seed
        graph = pipeline(seed)
        assert not graph.num_tasks or finds(graph, method), seed


@pytest.mark.soak
def test_ten_thousand_instances_with_host_limits() -> None:
    for seed in range(10_000):
        graph = tiny(seed, seed % 2) if seed % 4 < 3 else pipeline(seed)
        truth = seed % 4 == 3 or some_schedule_fits(graph)
        assert not graph.num_tasks or finds(graph, "default") in (None, truth), seed


@pytest.mark.parametrize("seed", [92, 107])
def test_whole_backwards_hold_no_weight_gradients(seed: int) -> None:
    """Their weight gradients take no time, right behind the input gradients: bytes of both never count."""
    assert finds(pipeline(seed), "default")


@pytest.mark.parametrize(
    ("seed", "shortest_ns"),
    [(257067, 0), (850953628, 0), (498001196, 0), (1493675373, 1), (1156359067, 1), (393116411, 1)],
)
def test_a_weight_gradient_that_waits_holds_its_bytes(seed: int, shortest_ns: int) -> None:
    """It takes no time, but another task or a delay comes before it."""
    graph = tiny(seed, shortest_ns)
    assert finds(graph, "default") in (None, some_schedule_fits(graph))


def one_pair(kinds: str, capacity: int, host: int, rows: list[Candidate]) -> TaskGraph:
    """One pair on one rank, under limits of device and host."""
    first = rows[0]
    duration = {"F": first.forward_ns, "B": first.backward_ns, "I": first.backward_ns, "W": first.weight_ns}
    graph = make_graph(
        name="one pair",
        num_ranks=1,
        tasks=Tasks(
            kind=["FBIW".index(kind) for kind in kinds],
            rank=[0] * len(kinds),
            duration_ns=[duration[kind] for kind in kinds],
            pair=[0] * len(kinds),
            pass_id=range(len(kinds)),
            microbatch=[0] * len(kinds),
            module=[0] * len(kinds),
            module_names=("m",),
        ),
        pairs=Pairs(
            activation_bytes=[first.activation_bytes],
            weight_gradient_bytes=[first.weight_gradient_bytes],
            candidates=(tuple(rows),),
        ),
        edges=Edges(source=[], target=[], delay_ns=[]),
        capacity_bytes=[capacity],
    )
    return replace(graph, host_capacity_bytes=np.array([host]))


@pytest.mark.parametrize("method", FAST)
def test_a_whole_backward_that_the_host_has_no_room_for_is_no_choice(method: str) -> None:
    rows = [Candidate("split", 1, 1, 2, 6, 9), Candidate("whole", 10, 0, 0, 5, 9, host_bytes=17)]
    found = solve(one_pair("FIW", 84, 0, rows), budget=Budget(evaluations=4), seed=0, method=method)
    assert found.schedule.candidate.tolist() == [0]


@pytest.mark.parametrize("method", FAST)
def test_of_three_candidates_the_only_one_that_fits_is_found(method: str) -> None:
    rows = [
        Candidate("large", 774, 532, 0, 622, 0),
        Candidate("too much on the host", 214, 1511, 0, 178, 0, host_bytes=16),
        Candidate("fits", 994, 946, 0, 198, 0, host_bytes=2),
    ]
    found = solve(one_pair("FB", 497, 3, rows), budget=Budget(evaluations=4), seed=0, method=method)
    assert found.schedule.candidate.tolist() == [2]


def test_a_pair_that_no_candidate_fits_is_named() -> None:
    rows = [Candidate("large", 1, 1, 0, 9, 0), Candidate("offload", 1, 1, 0, 1, 0, host_bytes=5)]
    with pytest.raises(InfeasibleError, match=r"pair 0 .* each of its candidates holds more"):
        solve(one_pair("FB", 5, 4, rows), budget=Budget(evaluations=4), seed=0)


@given(st.integers(0, 2**31), st.integers(0, 1))
def test_bounds_hold_under_limits_of_the_host(seed: int, shortest_ns: int) -> None:
    """No schedule of a tiny instance that keeps to all limits is faster than the bound."""
    graph = tiny(seed, shortest_ns)
    bound = lower_bound(graph).ns
    rng = np.random.default_rng(seed)
    for _ in range(8):
        schedule = random_order(graph, rng)
        if check(graph, schedule) == ():
            assert bound <= simulate(graph, schedule).makespan_ns
