"""Rules that came with a layout, run on random graphs; and the starts of a search that they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.layout.cooptimize import evaluate, graph_of, schedule_of
from pipeloom.layout.cooptimize.evaluate import arrays_of, make_scratch
from pipeloom.layout.cooptimize.kernels.evaluate import evaluate as evaluate_draft
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.rules import order_rule, to_draft
from pipeloom.search import Budget, ChunkRule, OrderRule, SearchParams, one_f_one_b, solve
from pipeloom.search.context import begin
from pipeloom.search.lists import choice_of, chunks_of, priorities_of, priorities_of_sequence
from pipeloom.search.starts.standard_rules import standard_rules
from pipeloom.search.state import Search
from pipeloom.spec import Chunk, Layout, ModuleLayout
from pipeloom.taskgraph import TaskGraph, build_graph
from pipeloom.timeline import Schedule, check, simulate
from tests.cases import ToyCosts, random_case
from tests.chains import uniform_chain
from tests.layout.cooptimize.chains import placed_chains


def run_rule(graph: TaskGraph, rule: OrderRule, turn: np.ndarray) -> tuple[int, Schedule]:
    """Makespan and schedule of what a rule gives, on a graph without candidates."""
    search = Search(graph, begin(Budget(evaluations=1)))
    chunks = chunks_of(graph)
    assert chunks is not None
    makespan = search.try_rule(priorities_of(graph, search.packed, chunks, rule, turn))
    return makespan, Schedule(search.orders(), None, "rule")


def random_rule(graph: TaskGraph, rng: np.random.Generator) -> OrderRule:
    assert graph.labels is not None
    count = 1 + max(label.chunk for label in graph.labels)
    return OrderRule(
        tuple(
            ChunkRule(
                (0, 0),
                0,
                *(float(x) for x in rng.normal(0, 3, 3)),
                *(float(x) for x in rng.random(2) * (rng.random(2) < 0.4)),
                limit=int(rng.integers(1, 5)) if rng.random() < 0.3 else None,
            )
            for _ in range(count)
        ),
        int(rng.integers(1, 4)),
    )


def with_room(graph: TaskGraph, room: float | None) -> TaskGraph:
    """Limit memory to so many times what the largest microbatch holds on each rank, or not at all."""
    if room is None:
        return graph
    home = graph.microbatch[graph.forward_of] * graph.num_ranks + graph.rank[graph.forward_of]
    held = np.bincount(home, weights=np.maximum(graph.activation_bytes, graph.weight_gradient_bytes))
    held.resize((int(graph.microbatch.max()) + 1) * graph.num_ranks)
    most = held.reshape(-1, graph.num_ranks).max(axis=0)
    return replace(graph, capacity_bytes=graph.static_bytes + (most * room).astype(np.int64))


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 1.0, 1.3, 2.5]))
def test_any_rule_gives_a_feasible_order_of_any_graph(seed, split, room):
    """Uneven microbatches with sub-microbatches, encoders that feed a language model, frozen ones, split backwards."""
    model, layout, packing = random_case(seed)
    graph = build_graph(layout, packing, ToyCosts(model, 1e-3, split), backward="split" if split else "whole")
    graph = with_room(graph, room)
    rng = np.random.default_rng(seed)
    turn = rng.permutation(int(graph.microbatch.max()) + 1)
    makespan, schedule = run_rule(graph, random_rule(graph, rng), turn)
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    assert timeline.makespan_ns == makespan


@given(placed_chains())
def test_on_the_batch_that_it_was_found_with_a_rule_gives_what_was_found(case):
    chain, placement, rule = case
    # Tasks of no time might change places.
    chain = replace(chain, forward_ns=chain.forward_ns + 1, backward_ns=chain.backward_ns + 1)
    graph, schedule = schedule_of(chain, placement, rule)
    chosen = graph.with_candidates(schedule.candidate)
    makespan, found = run_rule(chosen, order_rule(chain, placement, rule), np.arange(chain.num_microbatches))
    assert makespan <= evaluate(chain, placement, rule)
    for mine, theirs in zip(found.order, schedule.order, strict=True):
        assert np.array_equal(mine, theirs)


@given(placed_chains())
def test_a_rule_travels_with_the_keys_that_it_was_found_with(case):
    chain, placement, rule = case
    arrays = arrays_of(chain, placement.num_chunks)
    scratch = make_scratch(arrays)
    evaluate_draft(to_draft(placement, rule, arrays.most_chunks), arrays, scratch, NEVER, np.empty(0, np.int64))
    keys = [(one.forward, one.backward, one.weight) for one in order_rule(chain, placement, rule).chunks]
    assert np.array_equal(np.rint(np.transpose(keys) * chain.stride_ns), scratch.sums.key[:, : placement.num_chunks])


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 1.0, 1.3, 2.5]))
def test_what_a_sequence_gives_as_a_rule_is_a_rule_that_gives_it_again(seed, split, room):
    model, layout, packing = random_case(seed)
    graph = build_graph(layout, packing, ToyCosts(model, 1e-3, split), backward="split" if split else "whole")
    graph = with_room(graph, room)
    search, again = (Search(graph, begin(Budget(evaluations=1))) for _ in range(2))
    makespan = search.try_rule(priorities_of_sequence(graph, np.random.default_rng(seed).permutation(graph.num_tasks)))
    assert again.try_rule(priorities_of_sequence(graph, search.sequence)) == makespan > 0
    assert np.array_equal(again.sequence, search.sequence)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 7), (4, 8)])
def test_1f1b_is_a_rule(ranks, microbatches):
    graph = uniform_chain(ranks, microbatches, forward_ns=10, backward_ns=20)
    chunks = chunks_of(graph)
    (rule,) = standard_rules(graph, chunks)
    _, found = run_rule(graph, rule, np.arange(microbatches))
    for mine, theirs in zip(found.order, one_f_one_b(graph).order, strict=True):
        assert np.array_equal(mine, theirs)


@settings(deadline=None, max_examples=40)
@given(placed_chains(), st.integers(0, 1000))
def test_a_search_with_a_rule_is_never_slower_than_the_rule(case, seed):
    chain, placement, rule = case
    graph = graph_of(chain, placement)
    travels = order_rule(chain, placement, rule)
    found = solve(graph, budget=Budget(evaluations=30), seed=seed, params=SearchParams(rules=(travels,)))
    assert check(graph, found.schedule, found.timeline) == ()
    if chain.capacity_bytes is not None or graph.candidates is None:
        assert found.timeline.makespan_ns <= evaluate(chain, placement, rule)


def test_strategies_travel_with_the_rule():
    """Under the arrangement's own strategies nothing else fits so well: they are what the search begins with."""
    graph = uniform_chain(2, 6, forward_ns=10, backward_ns=20, activation_bytes=8, capacity_bytes=20, candidates=True)
    names = [option.strategy for option in graph.candidates[0]]
    layout = [label.chunk for label in graph.labels]
    said = tuple(
        ChunkRule((chunk, chunk), chunk, 0.0, 0.0, strategies=(names[chunk % 2],)) for chunk in range(max(layout) + 1)
    )
    choice = choice_of(graph, OrderRule(said))
    assert [names[c] for c in choice] == [names[chunk % 2] for chunk in layout]
    assert choice_of(graph.with_candidates(choice), OrderRule(said)) is None, "nothing is left to choose"
    assert choice_of(graph, OrderRule(tuple(ChunkRule((0, 0), 0, 0.0, 0.0) for _ in said))) is None
    odd = tuple(ChunkRule(one.layers, one.rank, 0.0, 0.0, strategies=("teleport",)) for one in said)
    assert not choice_of(graph, OrderRule(odd)).any(), "what is not offered is the base"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward": float("nan")}, "forward: nan is not between -1e"),
        ({"backward": 1e12}, "backward: 1e\\+12 is not between"),
        ({"forward_wait": -1.0}, "forward_wait: -1 is not between 0 and"),
        ({"backward_wait": float("inf")}, "backward_wait: inf is not between"),
        ({"limit": 0}, "limit: 0 is below 1"),
        ({"strategies": ("keep",) * 3}, "strategies: are 3, the chunk has 2 layers"),
    ],
)
def test_strange_rules_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        ChunkRule(**{"layers": (0, 1), "rank": 0, "forward": 0.0, "backward": 0.0} | fields)


def test_a_rule_of_another_layout_is_refused():
    layout = Layout(2, (ModuleLayout("lm"),), (Chunk("lm", (0, 1), 0), Chunk("lm", (2, 3), 1)))
    good = OrderRule((ChunkRule((0, 1), 0, 0.0, 0.0), ChunkRule((2, 3), 1, 0.0, 0.0)))
    good.check_layout(layout)
    with pytest.raises(InputError, match="chunks: are none"):
        OrderRule(())
    with pytest.raises(InputError, match="period: 0 is below 1"):
        OrderRule(good.chunks, 0)
    with pytest.raises(InputError, match="chunks: are 1, the layout has 2; arrange the layers again"):
        OrderRule(good.chunks[:1]).check_layout(layout)
    with pytest.raises(
        InputError, match=r"chunks\[1\]: has layers \[2, 3\] on rank 0, in the layout it has .* on rank 1"
    ):
        OrderRule((good.chunks[0], ChunkRule((2, 3), 0, 0.0, 0.0))).check_layout(layout)
    short = (OrderRule(good.chunks[:1]), OrderRule((ChunkRule((0, 1), 0, 0.0, 0.0, strategies=("keep",) * 2),)))
    for rule in short:
        for graph in (uniform_chain(2, 3), uniform_chain(2, 3, activation_bytes=8, candidates=True)):
            with pytest.raises(InputError, match="rules: has 1 chunks, the graph's layout 2"):
                solve(graph, budget=Budget(evaluations=3), seed=0, params=SearchParams(rules=(rule,)))
