"""Partition, placement and schedule as one program: it is as good as the best of all placements."""

from __future__ import annotations

from itertools import product

import pytest

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, chain_of_layers, graph_of
from pipeloom.search import gpipe
from pipeloom.timeline import check, simulate
from pipeloom_lab.reproduce.adaptis.generation import blocks_of
from pipeloom_lab.solvers.linear import milp
from pipeloom_lab.solvers.whole_program import whole_program


def chain(times: tuple[tuple[int, int], ...], ranks: int, microbatches: int, boundary_s: float) -> LayerChain:
    layers = tuple(LayerCost(f"l{i}", f / 1e3, 1, 0, backward_s=b / 1e3) for i, (f, b) in enumerate(times))
    return chain_of_layers(LayerTable("few", ranks, microbatches, boundary_s, 0, layers))


@pytest.mark.parametrize(
    ("times", "ranks", "boundary_s"),
    [
        (((1, 2), (3, 4), (2, 2)), 2, 0.001),
        (((1, 1), (1, 6)), 2, 0.004),
        pytest.param(((1, 2), (3, 4), (2, 2), (1, 1)), 2, 0.001, marks=pytest.mark.full),
    ],
)
def test_it_finds_the_best_of_all_placements(times: tuple[tuple[int, int], ...], ranks: int, boundary_s: float) -> None:
    given = chain(times, ranks, 2, boundary_s)
    found = whole_program(given, seconds=30.0)
    makespans = []
    for homes in product(range(ranks), repeat=len(times)):
        if homes[0]:  # ranks are alike
            continue
        graph = graph_of(given, PartitionPlacement(tuple(range(len(times) + 1)), homes))
        answer = milp(graph, seconds=10.0, hint=gpipe(graph), bound_ns=0)
        makespans.append(simulate(graph, answer.schedule).makespan_ns)
    assert found.proved
    assert found.makespan_ns == min(makespans)
    assert found.bound_ns <= found.makespan_ns <= found.bound_ns * (1 + 1e-5)
    graph = graph_of(given, found.placement)
    assert not check(graph, found.schedule)
    assert simulate(graph, found.schedule).makespan_ns == found.makespan_ns


def test_a_program_that_cannot_be_stated_in_time_is_cut() -> None:
    found = whole_program(chain(((1, 2),) * 8, 4, 6, 0.0), seconds=0.0)
    assert not found.proved
    assert found.num_rows == found.bound_ns == 0


def test_layers_are_put_together_into_blocks() -> None:
    given = chain(((1, 2), (3, 4), (2, 2), (1, 1)), 2, 2, 0.0)
    two = blocks_of(given, 2)
    assert two.num_layers == 2
    assert two.total_ns.sum() == given.total_ns.sum()
    assert two.total_ns[:, 0].tolist() == [10_000_000, 6_000_000]
