"""The compiled list scheduler against the plain one, and against the checker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError, PlanError
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.climb import climb, evaluate, make_walk
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.moves import ORDER_MOVES
from pipeloom.search.moves.move import IMPROVED, TRIED, make_tally
from pipeloom.search.packed import pack_graph
from pipeloom.search.plain import Rules, decode_plain, first_in_first_out
from pipeloom.search.scratch import make_scratch
from pipeloom.timeline import Schedule, check, simulate
from tests.chains import uniform_chain
from tests.strategies import graphs


def run(graph, seed, policy, weights, rule, lookahead, urgent=codes.ALL_URGENT, bound=codes.NEVER):
    packed, _, components = pack_graph(graph)
    scratch = make_scratch(packed)
    forward, backward = packed.num_groups
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(forward), forward + rng.permutation(backward)])
    choice = np.array([policy, weights, rule, lookahead, urgent])
    makespan = evaluate(packed, scratch, order, choice, bound)
    return packed, scratch, components, makespan


def priority_of(scratch):
    """What the kernel calls a position, as the plain list scheduler expects it."""
    return scratch.position.tolist()


choices = st.tuples(
    st.integers(0, 2), st.integers(0, 1), st.integers(0, 2), st.sampled_from([1, 1, 3]), st.integers(0, 20)
)


@given(graphs(num_candidates=0), st.integers(0, 2**31), choices)
def test_equals_the_plain_decoder(graph, seed, choice):
    try:
        _, scratch, components, makespan = run(graph, seed, *choice)
    except InfeasibleError:
        return
    policy, weights, rule, lookahead, _ = choice
    mask = int(scratch.urgent[0])
    rules = Rules(policy, weights, rule, lookahead, 64 * (64 if mask < 0 else mask.bit_length()))
    if makespan == codes.DEADLOCK:
        assert rule == codes.FITS
        with pytest.raises(PlanError, match="memory deadlock"):
            decode_plain(graph, components, priority_of(scratch), rules)
        return
    order = decode_plain(graph, components, priority_of(scratch), rules)
    rank = graph.rank[scratch.sequence]
    assert [scratch.sequence[rank == r].tolist() for r in range(graph.num_ranks)] == order
    schedule = Schedule(tuple(np.array(tasks, np.int64) for tasks in order))
    timeline = simulate(graph, schedule)
    assert timeline.makespan_ns == makespan
    found = check(graph, schedule, timeline)
    assert found == () or (rule == codes.UNLIMITED and {v.kind for v in found} == {"memory"})


@pytest.mark.parametrize("choice", [(0, 0, 0, 1), (1, 1, 0, 1), (2, 0, 2, 2)])
def test_one_bit_of_a_summary_may_stand_for_several_words(choice):
    """As it must where a class has more than 64 words of 64 segments."""
    graph = uniform_chain(2, 150, chunks_per_rank=2, capacity_bytes=40, split=True)
    _, scratch, _, makespan = run(graph, 1, *choice)
    expected = scratch.sequence.tolist()
    packed, _, _ = pack_graph(graph)
    assert (scratch.word_shift, scratch.group_shift) == (3, 0)
    coarse = scratch._replace(group_shift=2)
    coarse.sequence[:] = -1
    order = np.random.default_rng(1)
    order = np.concatenate(
        [order.permutation(packed.num_groups[0]), packed.num_groups[0] + order.permutation(packed.num_groups[1])]
    )
    assert evaluate(packed, coarse, order, np.array(choice), codes.NEVER) == makespan
    assert coarse.sequence.tolist() == expected


def test_equals_the_plain_decoder_where_a_queue_has_many_words():
    graph = uniform_chain(1, 4200)
    _, scratch, components, _ = run(graph, 1, 0, 0, codes.UNLIMITED, 1)
    assert scratch.group_shift == 1
    order = decode_plain(graph, components, priority_of(scratch), Rules(admission=codes.UNLIMITED))
    assert scratch.sequence.tolist() == order[0]


@given(graphs(num_candidates=0), st.integers(0, 2**31), choices, st.floats(0.5, 1.5))
def test_aborts_exactly_at_the_bound(graph, seed, choice, part):
    try:
        makespan = run(graph, seed, *choice)[-1]
    except InfeasibleError:
        return
    if makespan < 0:
        return
    bound = int(part * makespan)
    expected = makespan if makespan < bound else codes.ABORTED
    assert run(graph, seed, *choice, bound=bound)[-1] == expected


@given(graphs(memory=1.0))
def test_the_banker_never_deadlocks_where_one_microbatch_fits(graph):
    schedule = first_in_first_out(graph)
    assert check(graph, schedule) == ()


def test_the_papers_rule_deadlocks():
    """Two ranks, three microbatches, two passes each; room for three of the four activations of two microbatches.

    Both ranks fill up with first passes, and no second pass can begin.
    """
    graph = uniform_chain(2, 3, chunks_per_rank=2, capacity_bytes=2)
    assert run(graph, 3, 0, 0, codes.FITS, 1)[-1] in (codes.DEADLOCK, 18)
    packed, _, _ = pack_graph(graph)
    scratch = make_scratch(packed)
    by_pass = np.array([0, 2, 4, 1, 3, 5, 6, 7, 8, 9, 10, 11])
    assert evaluate(packed, scratch, by_pass, np.array([0, 0, codes.FITS, 1]), codes.NEVER) == -1
    assert evaluate(packed, scratch, by_pass, np.array([0, 0, codes.BANKER, 1]), codes.NEVER) > 0


def test_pairs_that_cannot_fit_are_named():
    with pytest.raises(InfeasibleError, match=r"pair 0 \(task 0 \(F of lm, .*it holds 9 bytes.*rank 0 leaves 8"):
        first_in_first_out(uniform_chain(2, 2, activation_bytes=9, capacity_bytes=8))
    with pytest.raises(InfeasibleError, match=r"pair 2 .* needs 18 bytes at once on rank 0"):
        first_in_first_out(uniform_chain(2, 2, chunks_per_rank=2, activation_bytes=9, capacity_bytes=12))


def test_fallback_takes_the_minimum_memory_candidates_where_the_base_does_not_fit():
    graph = uniform_chain(2, 3, activation_bytes=8, capacity_bytes=7, candidates=True)
    schedule = first_in_first_out(graph)
    assert set(schedule.candidate.tolist()) == {1}
    assert check(graph, schedule) == ()
    assert set(first_in_first_out(uniform_chain(2, 3, candidates=True)).candidate.tolist()) == {0}


def test_alternating_gives_one_forward_one_backward_when_memory_says_so():
    graph = uniform_chain(4, 8, capacity_bytes=4)
    timeline = simulate(graph, first_in_first_out(graph))
    assert timeline.makespan_ns == (8 + 3) * 3


@given(graphs(num_candidates=0), st.integers(1, 2**40), st.sampled_from([0.0, 3.0]), st.integers(1, 41))
def test_local_search_tells_the_makespans_of_its_orders(graph, seed, temperature, count):
    try:
        packed, scratch, *_ = run(graph, seed % 100, 0, 0, codes.UNLIMITED, 1)
    except InfeasibleError:
        return
    order = np.arange(int(packed.num_groups.sum()))
    if len(order) < 2:
        return
    choice = np.array([0, 0, codes.UNLIMITED, 1, codes.ALL_URGENT])
    first = evaluate(packed, scratch, order, choice, codes.NEVER)
    walk, tally = make_walk(order, choice, first, np.array([seed | 1], np.uint64)), make_tally(ORDER_MOVES)
    used = climb(packed, scratch, walk, tally, Terms(temperature, -1, count))
    state, order, choice = walk.state, walk.order, walk.choice
    assert used == count == tally.counts[:, TRIED].sum()
    assert (tally.counts[:, IMPROVED] <= tally.counts[:, TRIED]).all()
    assert state[1] <= min(first, state[0])
    assert temperature > 0 or state[0] == state[1]
    assert evaluate(packed, scratch, order, choice, codes.NEVER) == state[0]
    assert evaluate(packed, scratch, walk.best_order, walk.best_choice, codes.NEVER) == state[1]
