from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import LayerOption, pair_candidates
from pipeloom.search.components import find_components
from pipeloom.search.kernels.exchange import exchange
from pipeloom.search.kernels.strategies import THOROUGH_ROUNDS, fill_allocated, lay_out
from pipeloom.search.kernels.tables import Options, Work
from pipeloom.search.kernels.tighten import tighten
from pipeloom.search.params import StrategyParams
from pipeloom.search.plain import Rules, decode_plain, minimum_memory, segment_priority
from pipeloom.search.strategies import StrategyChooser, choose_on_rank, choose_strategies
from pipeloom.timeline import Schedule, check, memory_changes
from pipeloom.timeline.options import pair_options
from pipeloom_instances import family, generate
from tests.strategies import graphs, with_strategies


def lean_schedule(graph):
    lean = graph.with_candidates(minimum_memory(graph))
    order = decode_plain(lean, find_components(lean), segment_priority(lean), Rules())
    return Schedule(tuple(np.array(tasks, np.int64) for tasks in order), np.array(minimum_memory(graph)))


def best_on_rank(graph, schedule, rank):
    """Least total time over all choices of one rank's pairs that fit, by trying all."""
    pairs = [p for p in range(graph.num_pairs) if graph.rank[graph.forward_of[p]] == rank]
    options = pair_options(graph)
    total = options.forward_ns + options.backward_ns + options.weight_ns
    best = None
    for picks in product(*(range(len(graph.candidates[p])) for p in pairs)):
        choice = np.zeros(graph.num_pairs, np.int64)
        choice[pairs] = picks
        at_start, at_end = memory_changes(graph.with_candidates(choice))
        allocated, fits = 0, True
        for task in schedule.order[rank]:
            fits &= graph.capacity_bytes is None or bool(
                allocated + at_start[task] <= graph.capacity_bytes[rank] - graph.static_bytes[rank]
            )
            allocated += at_start[task] + at_end[task]
        if fits:
            spent = int(sum(total[p, j] for p, j in zip(pairs, picks, strict=True)))
            best = spent if best is None else min(best, spent)
    return best


def assert_between_bound_and_optimum(graph, whole, one_rank, most):
    """What ``whole`` chooses is feasible, on each rank not below the bound, nor above ``most`` times the optimum."""
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    chosen = whole(graph, schedule)
    assert check(graph, chosen) == ()
    for rank in range(graph.num_ranks):
        found = one_rank(graph, schedule, rank)
        best = best_on_rank(graph, schedule, rank)
        assert found.bound_ns <= best + 1e-3
        assert best <= found.total_ns <= most * best
        assert found.total_ns == best or found.gap > 0


FEW_CHOICES = {
    "num_candidates": 3,
    "num_microbatches": 2,
    "num_modules": 1,
    "max_parts": 1,
    "max_segments": 2,
    "num_ranks": 2,
}
"""Options of instances whose choices can all be tried."""


@given(graphs(**FEW_CHOICES))
def test_chosen_strategies_are_feasible_and_between_bound_and_optimum(graph):
    assert_between_bound_and_optimum(graph, choose_strategies, choose_on_rank, 1.35)


@given(st.data())
def test_a_tightened_capacity_is_the_most_that_candidates_can_fill(data):
    """With one pair of each, or all at once, every choice that fits still fits, and the place can be filled."""
    num_pairs, num_options = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    amounts = st.lists(st.integers(0, 9), min_size=num_pairs * num_options, max_size=num_pairs * num_options)
    activation, gradient = (np.array(data.draw(amounts), np.int64).reshape(num_pairs, num_options) for _ in range(2))
    places = 2 * num_pairs + 1
    span = np.sort(
        np.array([data.draw(st.tuples(*[st.integers(0, places - 1)] * 3)) for _ in range(num_pairs)]), axis=1
    )

    lean = np.zeros(num_pairs, np.int64)

    def options_of(capacity):
        nothing = np.zeros_like(activation)
        return Options(nothing, activation, gradient, lean, span, capacity, nothing, places)

    def held(choice):
        allocated = np.zeros(places + 1, np.int64)
        fill_allocated(options_of(np.zeros(places, np.int64)), np.array(choice), allocated)
        return allocated[:-1]

    choices = [held(choice) for choice in product(range(num_options), repeat=num_pairs)]
    allocated = data.draw(st.sampled_from(choices))
    capacity = allocated + np.array(data.draw(st.lists(st.integers(0, 5), min_size=places, max_size=places)))
    price = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=places, max_size=places)))
    lowered = capacity.copy()
    none, running, sums = np.zeros(num_pairs, np.int64), np.zeros(places), np.zeros((3, 200), np.int64)
    parts = (none, none, allocated, price, running, *[none.astype(float)] * 3, none, none, sums)
    tighten(options_of(lowered), Work(*parts), 300_000)
    for k in range(places):
        most = max(int(c[k]) for c in choices if c[k] <= capacity[k])
        assert lowered[k] == (most if price[k] > 0 else capacity[k])


@given(graphs(num_candidates=3, num_microbatches=2, num_modules=1, max_parts=1, max_segments=2, num_ranks=2))
def test_no_two_pairs_can_be_exchanged_for_better(graph):
    """The kernel leaves a choice that fits and that no change of two candidates improves, by trying all."""
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    chooser = StrategyChooser(graph)
    t, d = chooser.tables, chooser.workspace
    for rank in range(graph.num_ranks):
        order = schedule.order[rank]
        rows, n = slice(int(t.rank_start[rank]), int(t.rank_start[rank + 1])), len(order)
        lay_out(t, d, order, rank)
        time, activation, gradient, span = t.time[rows], t.activation[rows], t.gradient[rows], d.span[rows]
        choice, allocated, capacity = t.minimum_memory[rows].copy(), np.zeros(n + 1, np.int64), d.capacity[:n]
        options = Options(time, activation, gradient, t.minimum_memory[rows], span, capacity, t.host[rows], n)
        fill_allocated(options, choice, allocated)
        places = (d.multiplier[: n + 1], d.running[: n + 1])
        pairs = (d.price[rows], d.host_price[rows], d.gain[rows], d.move[rows])
        exchange(options, Work(choice, d.trial[rows], allocated, *places, *pairs, d.headroom, d.sums))
        exact = np.zeros(n + 1, np.int64)
        fill_allocated(options, choice, exact)
        assert (allocated[:n] == exact[:n]).all()
        assert (exact[:n] <= capacity).all()
        total = time[np.arange(len(choice)), choice].sum()
        for i, j in product(range(len(choice)), repeat=2):
            meet = span[i, 0] <= span[j, 2] and span[j, 0] <= span[i, 2]
            for a, b in product(range(time.shape[1]), repeat=2):
                other = choice.copy()
                other[i], other[j] = a, b
                fill_allocated(options, other, exact)
                better = time[np.arange(len(choice)), other].sum() < total
                assert not (meet and i != j and better and (exact[:n] <= capacity).all())


def test_without_a_limit_everyone_gets_the_fastest():
    layer = [LayerOption("keep", 10, 20, 100), LayerOption("full", 10, 30, 10)]
    options = pair_candidates([layer] * 3, 4)
    assert options[0] == ("keep", 30, 60, 0, 300, 300, ("keep",) * 3, 0)
    assert options[-1].activation_bytes == 30
    assert [c.strategy for c in options] == ["keep", "mixed", "full"]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.integers(2, 10),
)
def test_candidates_are_the_best_of_their_range(layers, most):
    options = [[LayerOption(f"s{i}", *row) for i, row in enumerate(rows)] for rows in layers]
    found = pair_candidates(options, most)
    everything = [(sum(o[3] for o in c), sum(o[1] + o[2] for o in c)) for c in product(*options)]
    assert 1 <= len(found) <= most
    times = [c.forward_ns + c.backward_ns for c in found]
    assert times == sorted(times)
    assert times[0] == min(time for _, time in everything)
    assert found[-1].activation_bytes == min(held for held, _ in everything)
    for c, time in zip(found, times, strict=True):
        assert time == min(t for held, t in everything if held <= c.activation_bytes)


def test_candidates_of_nothing_are_refused():
    with pytest.raises(InputError, match="layer without options"):
        pair_candidates([[]])
    with pytest.raises(InputError, match="1 is below 2"):
        pair_candidates([[LayerOption("keep", 1, 1, 1)]], 1)


def test_orders_of_large_graphs_get_strategies_in_fewer_rounds():
    """Nothing that takes seconds a rank, and yet nearly as good; what it chooses fits."""
    graph = with_strategies(generate(family("vlm-s", num_microbatches=12, memory=1.0, num_ranks=3), 1))
    order = lean_schedule(graph)
    thorough = choose_strategies(graph, order)
    params = StrategyParams(large_tasks=(graph.num_tasks - 1) // 3)
    assert StrategyChooser(graph, params).rounds < THOROUGH_ROUNDS
    quick = choose_strategies(graph, order, params)
    assert check(graph, quick) == ()
    totals = [graph.with_candidates(found.candidate).duration_ns.sum() for found in (thorough, quick)]
    assert totals[0] <= totals[1] <= 1.05 * totals[0]
