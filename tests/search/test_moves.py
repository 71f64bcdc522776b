"""A move leaves an order of all groups, and changes no more than it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.compiled import callee, kernel, one_of
from pipeloom.compiled.arrays import assign
from pipeloom.search import Budget, solve
from pipeloom.search.kernels.codes import BANKER
from pipeloom.search.moves import BLOCK_MOVES, ORDER_MOVES, START_MOVES, propose_order, propose_starts
from pipeloom.search.moves.group_order import GroupOrder
from pipeloom.search.moves.move import Move, require_valid
from pipeloom.search.moves.start_times import StartTimes
from pipeloom_instances import family, generate

owners = st.lists(st.integers(0, 4), max_size=12)


@kernel
def change_order(which, now, count):
    for _ in range(count):
        assign(now.before, now.order)
        propose_order(which, now)


@kernel
def change_starts(which, now):
    propose_starts(which, now)


@pytest.mark.parametrize("which", range(len(ORDER_MOVES)), ids=lambda which: ORDER_MOVES[which].name)
@given(forward=owners.filter(bool), backward=owners, rule=st.sampled_from([0, BANKER]), seed=st.integers(1, 2**40))
def test_moves_of_orders_leave_every_group_in_its_half(which, forward, backward, rule, seed):
    """Also where a microbatch has groups in one half only."""
    microbatch = np.array(forward + backward)
    order, choice = np.arange(len(microbatch)), np.array([0, 0, rule, 1, 3])
    random = np.array([seed | 1], np.uint64)
    now = GroupOrder(order, order.copy(), choice, len(forward), microbatch, True, random)
    change_order(which, now, 30)
    assert sorted(order[: len(forward)]) == list(range(len(forward)))
    assert sorted(order[len(forward) :]) == list(range(len(forward), len(order)))
    policy, weights, same, lookahead, urgent = choice.tolist()
    assert policy in (0, 1, 2)
    assert weights in (0, 1)
    assert same == rule
    assert 1 <= lookahead <= 4
    assert 0 <= urgent <= max(3, len(backward))


@pytest.mark.parametrize("which", range(len(ORDER_MOVES)), ids=lambda which: ORDER_MOVES[which].name)
def test_a_move_of_orders_changes_something(which):
    microbatch = np.tile(np.repeat(np.arange(4), 2), 2)
    order, choice = np.arange(len(microbatch)), np.array([0, 0, BANKER, 1, 3])
    now = GroupOrder(order, order.copy(), choice, 8, microbatch, True, np.array([1], np.uint64))
    for _ in range(200):
        change_order(which, now, 1)
        if not np.array_equal(order, now.before) or choice.tolist() != [0, 0, BANKER, 1, 3]:
            return
    raise AssertionError("200 draws changed nothing")


@pytest.mark.parametrize("which", range(len(START_MOVES)), ids=lambda which: START_MOVES[which].name)
@given(seed=st.integers(1, 2**40))
def test_moves_of_starts_shift_by_a_few_spans(which, seed):
    start = np.arange(0, 1200, 100)
    component = np.arange(12) % 3
    rows, tasks = np.array([0, 4, 8, 12]), np.argsort(component, kind="stable")
    shifted = start.copy()
    random = np.array([seed | 1], np.uint64)
    now = StartTimes(start, shifted, np.arange(12) // 6, rows, tasks, 100.0, random)
    change_starts(which, now)
    assert (np.abs(shifted - start) <= 800).all()


def test_a_search_counts_its_moves():
    graph = generate(family("vlm-s", num_microbatches=16, memory=1.5, recompute=True), 0)
    solution = solve(graph, budget=Budget(evaluations=2000), seed=0)
    names = {move.name for moves in (ORDER_MOVES, START_MOVES, BLOCK_MOVES) for move in moves}
    assert {move.name for move in (*START_MOVES, *BLOCK_MOVES)} <= set(solution.moves) <= names
    assert all(0 <= count.improved <= count.tried for count in solution.moves.values())
    assert sum(count.improved for count in solution.moves.values()) > 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "Mine.name is None"),
        ({"name": ORDER_MOVES[0].name}, "but must be a string that no other move has"),
        ({"name": "mine"}, "Mine.weight is None"),
        ({"name": "mine", "weight": 0.9}, "0.9, but must be an integer of at least 0"),
        ({"name": "mine", "weight": -1}, "-1, but must be"),
    ],
)
def test_names_and_weights_are_checked_at_import(fields, problem):
    with pytest.raises(TypeError, match=problem):
        require_valid([ORDER_MOVES[0], type("Mine", (Move,), fields)])


def test_functions_to_choose_from_are_compiled_and_take_the_same_arguments():
    @callee
    def takes_two(now, more):
        return now + more

    def plain(now):
        return now

    with pytest.raises(TypeError, match="plain must be compiled: decorate it with @callee"):
        one_of([ORDER_MOVES[0].propose, plain])
    with pytest.raises(TypeError, match="takes_two takes 2 arguments, not 1 as the others"):
        one_of([ORDER_MOVES[0].propose, takes_two])
