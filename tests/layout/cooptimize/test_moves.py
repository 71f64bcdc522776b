"""Every move of the table, alone: what it makes of a draft is a placement under a rule again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, PriorityRule, evaluate
from pipeloom.layout.cooptimize.evaluate import arrays_of, make_scratch
from pipeloom.layout.cooptimize.kernels.anneal import Cooling, WalkArrays, anneal
from pipeloom.layout.cooptimize.kernels.balance import Balance
from pipeloom.layout.cooptimize.kernels.move_table import MOVES, TUNABLE
from pipeloom.layout.cooptimize.kernels.moves import MoveContext
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.rules import copy_of, from_draft, to_draft
from tests.layout.cooptimize.chains import placed_chains


def test_names_are_unique_and_everything_that_can_be_tuned_has_a_move() -> None:
    names = [move.name for move in MOVES]
    assert len(set(names)) == len(names)
    assert {move.tunes for move in MOVES} == set(TUNABLE)
    assert {move.needs for move in MOVES} == {"", "strategies", "exchanges"}


@pytest.mark.parametrize("number", range(len(MOVES)), ids=[move.name for move in MOVES])
@settings(deadline=None, max_examples=25)
@given(setting=placed_chains(), more=st.integers(0, 3), seed=st.integers(1, 2**32))
def test_a_move_leaves_a_placement(
    number: int, setting: tuple[LayerChain, PartitionPlacement, PriorityRule], more: int, seed: int
) -> None:
    chain, placement, rule = setting
    arrays = arrays_of(chain, min(chain.num_layers, placement.num_chunks + more))
    draft = to_draft(placement, rule, arrays.most_chunks)
    alone = np.zeros(len(MOVES))
    alone[number:] = 1.0  # running sums
    counts = np.zeros((3, len(MOVES)), np.int64)
    walk = WalkArrays(draft, copy_of(draft), copy_of(draft), alone, counts)
    balance = Balance(tries=40, exchanges=100, steps=300, hot=0.005, cold=0.0005)
    ns = evaluate(chain, placement, rule)
    context = MoveContext(arrays, balance, np.array([ns, ns]), np.array([seed], np.uint64))
    ran = anneal(walk, context, make_scratch(arrays), Cooling(20, 0.1 * ns + 1, 0.01 * ns + 1), -1)
    assert ran == counts[0].sum() == counts[0, number]
    for each, value in ((walk.present, context.values[0]), (walk.best, context.values[1])):
        made, under = from_draft(each)
        assert (made.cuts[0], made.cuts[-1]) == (0, chain.num_layers)
        assert all(a < b for a, b in zip(made.cuts, made.cuts[1:], strict=False))
        assert made.num_chunks <= arrays.most_chunks
        assert all(0 <= rank < chain.num_ranks for rank in made.ranks)
        chosen = zip(made.strategies, chain.strategies, strict=False)
        assert all(0 <= strategy < len(names) for strategy, names in chosen)
        assert under.period >= 1
        assert under.spread >= 0
        assert evaluate(chain, made, under) == value < NEVER
