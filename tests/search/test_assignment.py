"""Assigning parts of replicated modules: never behind the even assignment, feasible, bounded, the same from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import StrategyCost
from pipeloom.errors import InfeasibleError, InputError, NothingFoundError
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.packing import Packing, PackingSpec, pack
from pipeloom.search import Budget, solve, solve_assignable, strategies
from pipeloom.search.assignment import reassign, rebalanced
from pipeloom.spec import Batch, Chunk, Layout, ModelSpec, Sample, Workload
from pipeloom.taskgraph import Assignable, Edges, Pairs, TaskGraph, Tasks, build_assignable, build_graph, make_graph
from pipeloom.timeline import assignable_bound, check, lower_bound, simulate
from tests.cases import ToyCosts, random_batch, vlm_spec


def random_laid_out(seed: int) -> tuple[ModelSpec, Layout, Packing]:
    """A vision-language model on two to four ranks with the vision encoder whole on each, and a packed batch."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    model = vlm_spec(rng.randint(4, 6), ranks * 2, vision_frozen=rng.random() < 0.2)
    places = {"vision": ModulePlacement(1, rng.choice((1, 2))), "lm": ModulePlacement(rng.randint(1, 2))}
    layout = replicated(separate(model, ranks, places, lambda _m, _l: 1.0), ["vision"])
    return model, layout, pack(random_batch(seed), model, layout, PackingSpec(40))


def random_assignable(
    seed: int, *, limited: bool = False, split: bool = False, slowness: tuple[float, ...] = ()
) -> Assignable:
    model, layout, packing = random_laid_out(seed)
    rng = random.Random(seed)
    costs = ToyCosts(model, transfer_s=rng.choice((0.0, 1e-3)), split=split, slowness=slowness)
    made = build_assignable(layout, packing, costs, backward="split" if split else "whole")
    if limited:
        graph = made.graph
        largest = int(graph.activation_bytes.max())
        total = np.bincount(made.assignment, weights=graph.activation_bytes, minlength=graph.num_ranks)
        made = made.within(graph.static_bytes + np.int64(max(3 * largest, rng.uniform(0.3, 0.8) * total.max())))
    return made


def random_assignment(made: Assignable, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, made.graph.num_ranks, made.graph.num_pairs)
    return np.where(made.free, drawn, made.assignment)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.booleans())
def test_a_graph_assigned_anew_is_the_graph_that_would_be_built(seed: int, split: bool) -> None:
    """Delays, labels and rows agree with a graph made from scratch of the same parts."""
    made = random_assignable(seed, split=split)
    other = made.assigned(random_assignment(made, seed))
    back = other.assigned(made.assignment).graph
    for field in ("rank", "edge_delay_ns", "predecessor", "predecessor_delay_ns", "successor", "successor_delay_ns"):
        assert (getattr(back, field) == getattr(made.graph, field)).all()
    assert back.labels == made.graph.labels
    graph = other.graph
    model, layout, _ = random_laid_out(seed)
    wire = ToyCosts(model, transfer_s=random.Random(seed).choice((0.0, 1e-3)))
    # As `make_graph` closes it, from what lowering would read.
    again = make_graph(
        name="again",
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
        pairs=Pairs(activation_bytes=graph.activation_bytes, weight_gradient_bytes=graph.weight_gradient_bytes),
        edges=Edges(source=graph.edge_source, target=graph.edge_target, delay_ns=graph.edge_delay_ns),
    )
    assert (again.predecessor_delay_ns == graph.predecessor_delay_ns).all()
    assert (again.predecessor == graph.predecessor).all()
    for pair, label in enumerate(graph.labels or ()):
        assert layout.chunks[label.chunk].rank == other.assignment[pair]
    apart = graph.rank[graph.edge_source] != graph.rank[graph.edge_target]
    assert (graph.edge_delay_ns == np.where(apart, round(wire.transfer_s(1) * 1e9), 0)).all()


class FarApart(ToyCosts):
    """Even and odd ranks are on two hosts."""

    def link_between(self, first: int, second: int) -> int:
        return 1 + (first + second) % 2

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        return (0.0, 1e-3, 1e-2)[link]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_messages_of_assigned_parts_take_as_long_as_on_the_link_of_their_ranks(seed: int) -> None:
    model, layout, packing = random_laid_out(seed)
    costs = FarApart(model)
    made = build_assignable(layout, packing, costs)
    found = solve_assignable(made, budget=Budget(evaluations=200), seed=seed)
    graph, solution = found.assignable.graph, found.solution
    assert check(graph, solution.schedule, solution.timeline) == ()
    assert assignable_bound(made).ns <= solution.timeline.makespan_ns
    for assigned in (graph, made.assigned(random_assignment(made, seed)).graph):
        ends = zip(assigned.rank[assigned.edge_source], assigned.rank[assigned.edge_target], strict=True)
        wanted = [0 if a == b else round(costs.transfer_s(1, costs.link_between(a, b)) * 1e9) for a, b in ends]
        assert assigned.edge_delay_ns.tolist() == wanted


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.booleans(), st.lists(st.sampled_from((0.7, 1.0, 1.5, 2.0)), min_size=2, max_size=4))
def test_parts_take_as_long_as_on_the_rank_they_are_assigned_to(seed: int, split: bool, speeds: list[float]) -> None:
    even = random_assignable(seed, split=split)
    made = random_assignable(seed, split=split, slowness=tuple(speeds))
    slowness = np.array(([*speeds, 1.0, 1.0])[: made.graph.num_ranks])
    drawn = random_assignment(made, seed)
    other = made.assigned(random_assignment(made, seed + 1)).assigned(drawn)
    wanted = even.assigned(drawn).graph.duration_ns * slowness[drawn[made.graph.pair]]
    assert other.graph.duration_ns.tolist() == pytest.approx(wanted.tolist(), abs=1)
    found = solve_assignable(made, budget=Budget(evaluations=200), seed=seed)
    graph, solution = found.assignable.graph, found.solution
    assert check(graph, solution.schedule, solution.timeline) == ()
    bound = assignable_bound(made)
    assert bound.ns == assignable_bound(other).ns <= solution.timeline.makespan_ns
    assert solve(other.graph, budget=Budget(evaluations=30), seed=0).timeline.makespan_ns >= bound.ns


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_the_answer_is_feasible_and_above_the_bound_of_every_assignment(seed: int, limited: bool, split: bool) -> None:
    made = random_assignable(seed, limited=limited, split=split)
    try:
        found = solve_assignable(made, budget=Budget(evaluations=300), seed=seed)
    except InfeasibleError:
        assert limited
        return
    graph, solution = found.assignable.graph, found.solution
    assert check(graph, solution.schedule, solution.timeline) == ()
    assert solution.lower_bound.ns <= solution.timeline.makespan_ns
    again = solve_assignable(made, budget=Budget(evaluations=300), seed=seed).solution
    assert again.timeline.makespan_ns == solution.timeline.makespan_ns
    # The bound holds for any other assignment, and never says more than that assignment's own.
    bound = assignable_bound(made)
    other = made.assigned(random_assignment(made, seed))
    assert assignable_bound(other).ns == bound.ns
    try:
        assert solve(other.graph, budget=Budget(evaluations=30), seed=0).timeline.makespan_ns >= bound.ns
    except InfeasibleError:
        assert limited


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.booleans())
def test_annealing_never_makes_it_slower_and_tells_the_truth(seed: int, limited: bool) -> None:
    made = random_assignable(seed, limited=limited)
    try:
        first = solve(made.graph, budget=Budget(evaluations=30), seed=seed)
    except InfeasibleError:
        assert limited
        return
    other, schedule, used = reassign(made, first.schedule, target_ns=0, budget=Budget(evaluations=400), seed=seed)
    timeline = simulate(other.graph, schedule)
    assert timeline.makespan_ns <= first.timeline.makespan_ns
    assert check(other.graph, schedule, timeline) == ()
    assert 0 < used <= 400


class _OrRecompute(ToyCosts):
    """Costs with a second strategy, which holds less and takes longer."""

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        (keep,) = super().chunk_costs(chunk, workload)
        smaller = replace(
            keep, strategy="recompute", backward_s=1.5 * keep.backward_s, activation_bytes=keep.activation_bytes // 5
        )
        return keep, smaller


@pytest.mark.parametrize(("tables_s", "choice_s"), [(0.0, 0.6), (1.2, 0.6), (0.0, 3.0)])
def test_choices_of_strategies_end_with_the_budget(
    tables_s: float, choice_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All took the most rounds, the last one began when the budget was spent, and some repeated the one before."""
    model, layout, packing = random_laid_out(3)
    made = build_assignable(layout, packing, _OrRecompute(model))
    least = made.graph.static_bytes + made.graph.activation_bytes.sum() // made.graph.num_ranks
    made = made.within(least)
    first = solve(made.graph, budget=Budget(evaluations=30), seed=0)
    now, choose, tables = [0.0], strategies.choose_rank, strategies.make_tables

    def clock() -> float:
        now[0] += 0.05
        return now[0]

    def choose_slowly(*arguments: Any) -> Any:
        now[0] += arguments[-1] * choice_s / (16 * made.graph.num_ranks)
        return choose(*arguments)

    def make_slowly(graph: TaskGraph) -> Any:
        now[0] += tables_s
        return tables(graph)

    monkeypatch.setattr(strategies, "choose_rank", choose_slowly)
    monkeypatch.setattr(strategies, "make_tables", make_slowly)
    budget = Budget(seconds=10.0, clock=clock)
    other, schedule, _ = reassign(made, first.schedule, target_ns=0, budget=budget, seed=0)
    assert check(other.graph, schedule) == ()
    assert 9.0 < now[0] < 11.0


def test_even_loads_from_uneven_ones() -> None:
    """Everything on one rank; afterwards no single move makes the ranks more even."""
    made = random_assignable(3)
    crowded = made.assigned(np.where(made.free, 0, made.assignment))
    first = solve(crowded.graph, budget=Budget(evaluations=30), seed=0)
    even = rebalanced(crowded, first.schedule).graph
    load = np.bincount(even.rank, weights=even.duration_ns)
    full, slack = int(load.argmax()), int(load.max() - load.min())
    pairs = np.bincount(even.pair, weights=even.duration_ns)
    movable = pairs[made.free & (even.rank[even.forward_of] == full)]
    assert slack <= movable.min(initial=slack)
    assert load.max() < np.bincount(crowded.graph.rank, weights=crowded.graph.duration_ns).max()


def test_of_four_assignments_the_best_is_found() -> None:
    """Two images, two ranks: as fast as the exact optimum of the best of all assignments."""
    model = vlm_spec(2, 2)
    samples = (Sample("a", 2, (1,), (6,)), Sample("b", 2, (1,), (2,)), Sample("c", 4), Sample("d", 4))
    layout = replicated(separate(model, 2, {"vision": ModulePlacement(1, 1)}, lambda _m, _l: 1.0), ["vision"])
    packing = pack(Batch(samples), model, layout, PackingSpec(4))
    made = build_assignable(layout, packing, ToyCosts(model, transfer_s=1e-3))
    assert made.free.sum() == 2
    best = min(
        solve(
            made.assigned(np.where(made.free, _bits(made, n), made.assignment)).graph,
            budget=Budget(evaluations=400),
            seed=0,
            method="cp-sat",
        ).timeline.makespan_ns
        for n in range(4)
    )
    found = solve_assignable(made, budget=Budget(evaluations=2000), seed=0).solution
    assert found.timeline.makespan_ns == best
    assert found.lower_bound.ns <= best


def _bits(made: Assignable, number: int) -> np.ndarray:
    """The two free pairs on the ranks that the bits of a number say."""
    out = np.zeros(made.graph.num_pairs, np.int64)
    out[np.flatnonzero(made.free)] = [number & 1, number >> 1]
    return out


def test_without_replicated_modules_it_is_the_search_of_orders() -> None:
    model = vlm_spec(4, 4)
    layout = separate(model, 2, {"vision": ModulePlacement(1, 1)}, lambda _m, _l: 1.0)
    packing = pack(random_batch(1), model, layout, PackingSpec(40))
    made = build_assignable(layout, packing, ToyCosts(model))
    plain = build_graph(layout, packing, ToyCosts(model))
    found = solve_assignable(made, budget=Budget(evaluations=100), seed=0)
    assert found.assignable is made
    assert (
        found.solution.timeline.makespan_ns == solve(plain, budget=Budget(evaluations=100), seed=0).timeline.makespan_ns
    )
    assert found.solution.lower_bound == lower_bound(plain)
    with pytest.raises(InputError, match="move only parts of replicated modules"):
        made.assigned(1 - made.assignment)
    with pytest.raises(InputError, match=r"to ranks 0\.\.2"):
        random_assignable(0).assigned(np.full(random_assignable(0).graph.num_pairs, 9))


def test_one_schedule_is_made_where_the_budget_has_one() -> None:
    made = random_assignable(5)
    found = solve_assignable(made, budget=Budget(evaluations=1), seed=0, method="portfolio")
    assert found.assignable is made
    assert replace(found.solution, elapsed_s=0.0).evaluations >= 1


def two_large_parts(homes: int, headroom_bytes: tuple[int, ...]) -> Assignable:
    """Two ranks; all parts of the vision encoder hold 1000 bytes and run on one rank, other pairs hold one byte."""
    model = vlm_spec(4, 4)
    places = {"vision": ModulePlacement(1, 1), "lm": ModulePlacement(1)}
    layout = replicated(separate(model, 2, places, lambda _m, _l: 1.0), ["vision"])
    batch = Batch((Sample("a", 4, (4, 4)), Sample("b", 4, (4, 4))))
    made = build_assignable(layout, pack(batch, model, layout, PackingSpec(12)), ToyCosts(model))
    graph = replace(made.graph, activation_bytes=np.where(made.free, 1000, 1))
    made = replace(made, graph=graph).assigned(np.where(made.free, homes, made.assignment))
    return made.within(graph.static_bytes + np.array(headroom_bytes))


@pytest.mark.parametrize("method", ["default", "portfolio"])
@pytest.mark.parametrize("headroom", [(500, 10_000), (1500, 1500)])
def test_another_assignment_may_fit(headroom: tuple[int, int], method: str) -> None:
    """A part does not fit on the first rank, or the parts of a microbatch do not fit there together."""
    made = two_large_parts(0, headroom)
    with pytest.raises(InfeasibleError):
        solve(made.graph, budget=Budget(evaluations=40), seed=0)
    for evaluations in (1, 40):
        found = solve_assignable(made, budget=Budget(evaluations=evaluations), seed=0, method=method)
        assert check(found.assignable.graph, found.solution.schedule, found.solution.timeline) == ()


def test_only_what_holds_for_every_assignment_is_called_infeasible() -> None:
    for headroom, kind in (((500, 900), InfeasibleError), ((500, 1500), NothingFoundError)):
        with pytest.raises(InfeasibleError) as caught:
            solve_assignable(two_large_parts(0, headroom), budget=Budget(evaluations=40), seed=0)
        assert type(caught.value) is kind


def test_parts_are_first_assigned_to_ranks_that_can_hold_them() -> None:
    model, layout, packing = random_laid_out(1)
    costs = ToyCosts(model)
    graph = build_assignable(layout, packing, costs).graph
    least = int(graph.activation_bytes[build_assignable(layout, packing, costs).free].min())
    headroom = np.full(graph.num_ranks, 2**40)
    headroom[0] = least - 1
    made = build_assignable(layout, packing, costs, capacity_bytes=graph.static_bytes + headroom)
    assert (build_assignable(layout, packing, costs).assignment == 0)[made.free].any()
    assert not (made.assignment == 0)[made.free].any()
