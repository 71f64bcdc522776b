from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from pipeloom.errors import InputError
from pipeloom.search import gpipe, interleaved_one_f_one_b, one_f_one_b
from pipeloom.taskgraph import PairLabel
from pipeloom.timeline import check, simulate
from tests.chains import uniform_chain
from tests.strategies import graphs


def words(graph, schedule):
    """Orders as text: ``F3`` or ``F3.1`` (microbatch and stage of the rank)."""
    lines = []
    for tasks in schedule.order:
        line = []
        for task in tasks:
            view, label = graph.task(int(task)), graph.labels[graph.pair[task]]
            stage = (
                f".{label.chunk // graph.num_ranks}" if max(x.chunk for x in graph.labels) >= graph.num_ranks else ""
            )
            line.append(f"{view.kind}{view.microbatch}{stage}")
        lines.append(" ".join(line))
    return lines


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 4), (4, 8), (4, 6), (4, 3), (3, 7)])
def test_uniform_chain_takes_the_textbook_time(make, p, m):
    graph = uniform_chain(p, m, forward_ns=3, backward_ns=5)
    schedule = make(graph)
    timeline = simulate(graph, schedule)
    assert timeline.makespan_ns == (m + p - 1) * (3 + 5)
    assert check(graph, schedule, timeline) == ()
    held = [m] * p if make is gpipe else [min(m, p - r) for r in range(p)]
    assert timeline.peak_bytes.tolist() == held


def test_one_f_one_b_starts_by_hand():
    """Three ranks, two microbatches, F 1, B 2."""
    graph = uniform_chain(3, 2)
    timeline = simulate(graph, one_f_one_b(graph))
    # Tasks of a microbatch: F on ranks 0 1 2, B on ranks 2 1 0.
    assert timeline.start_ns.reshape(2, 6).tolist() == [[0, 1, 2, 3, 5, 7], [1, 2, 5, 6, 8, 10]]


def test_orders_of_gpipe_and_one_f_one_b():
    graph = uniform_chain(2, 3)
    assert words(graph, gpipe(graph)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert words(graph, one_f_one_b(graph)) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_order_of_interleaved():
    """Two ranks with two stages each, four microbatches: 4 and 2 forwards ahead, as Megatron's warm-up counts."""
    graph = uniform_chain(2, 4, chunks_per_rank=2)
    first, second = words(graph, interleaved_one_f_one_b(graph))
    assert first == "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    assert second == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (2, 4, 6), (4, 2, 4), (1, 2, 3)])
def test_interleaved_bubble_shrinks_with_the_stages(p, v, m):
    """Bubble (p - 1)(f + b) / v, with f and b of all stages of a rank together."""
    graph = uniform_chain(p, m, forward_ns=3, backward_ns=5, chunks_per_rank=v)
    schedule = interleaved_one_f_one_b(graph)
    timeline = simulate(graph, schedule)
    assert timeline.makespan_ns == m * v * (3 + 5) + (p - 1) * (3 + 5)
    assert check(graph, schedule, timeline) == ()


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 5), (4, 2, 9), (4, 3, 10), (3, 2, 4), (3, 4, 1)])
def test_interleaved_with_a_group_that_is_not_full(p, v, m):
    graph = uniform_chain(p, m, chunks_per_rank=v)
    schedule = interleaved_one_f_one_b(graph)
    assert check(graph, schedule) == ()
    full = uniform_chain(p, -(-m // p) * p, chunks_per_rank=v)
    assert simulate(graph, schedule).makespan_ns <= simulate(full, interleaved_one_f_one_b(full)).makespan_ns


def test_split_backwards_run_as_one():
    graph = uniform_chain(2, 3, split=True)
    assert words(graph, one_f_one_b(graph))[1] == "F0 I0 W0 F1 I1 W1 F2 I2 W2"


@given(graphs(memory=None, edge_bytes=False))
def test_any_layout_gives_orders_without_deadlock(graph):
    """Text-only microbatches, frozen and replicated modules, sub-microbatches, several modules."""
    for make in (gpipe, interleaved_one_f_one_b):
        assert check(graph, make(graph)) == ()
    ranks = {label.chunk: int(graph.rank[graph.forward_of[p]]) for p, label in enumerate(graph.labels)}
    runs = [r for i, (c, r) in enumerate(sorted(ranks.items())) if i == 0 or sorted(ranks.items())[i - 1][1] != r]
    if len(runs) == len(set(runs)):
        assert check(graph, one_f_one_b(graph)) == ()
    else:
        with pytest.raises(InputError, match="stages, 1F1B takes one"):
            one_f_one_b(graph)


def test_two_modules_that_meet_on_a_rank_are_one_stage():
    """Two ranks; chunks vision.0 on rank 0, vision.1 and lm.0 on rank 1; microbatch 1 has no images."""
    graph = uniform_chain(2, 2)
    graph = replace(graph, labels=(PairLabel(0, 0, 0), PairLabel(1, 0, 0), PairLabel(0, 1, 0), PairLabel(2, 1, 0)))
    assert check(graph, one_f_one_b(graph)) == ()
    assert simulate(graph, one_f_one_b(graph)).makespan_ns == 9


def test_graphs_without_labels_are_refused():
    with pytest.raises(InputError, match="has no labels"):
        gpipe(replace(uniform_chain(2, 2), labels=None))


def test_candidates_get_the_base():
    graph = uniform_chain(2, 2, candidates=True)
    assert np.array_equal(one_f_one_b(graph).candidate, np.zeros(4))
    assert check(graph, one_f_one_b(graph)) == ()
