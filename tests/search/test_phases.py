"""The default search as a list of phases, and what a search hands on."""

from __future__ import annotations

import pytest

from pipeloom.search import Budget, SearchParams
from pipeloom.search.budget import WHOLE
from pipeloom.search.context import begin
from pipeloom.search.local import portfolio
from pipeloom.search.params import TabuParams
from pipeloom.search.phases import default, default_phases
from pipeloom.search.state import Search
from pipeloom_instances import family, generate

FAR = "orders, annealed the hotter the longer"
TABU = "tabu search of tasks"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ["orders, improved"]),
        ({"memory": 1.5}, [FAR, TABU]),
        ({"memory": 1.5, "split": True}, [FAR, "orders, annealed", TABU]),
    ],
)
def test_a_graph_gets_the_phases_that_concern_it(changes, wanted):
    graph = generate(family("vlm-s", num_microbatches=12, **changes), 0)
    search = Search(graph, begin(Budget(evaluations=50)))
    assert [p.name for p in default_phases(search.params) if p.where(search)] == ["static orders", *wanted]
    # Near the bound, the search of group orders is not needed.
    search.best_ns = search.target_ns = 1
    near = [p.name for p in default_phases(search.params) if p.where(search)]
    assert FAR not in near
    assert TABU in near
    assert ("justification" in near) == (search.reverse is not None)
    many = SearchParams(tabu=TabuParams(most_tasks=graph.num_tasks))
    small = Search(graph, begin(Budget(evaluations=50), params=many))
    names = [p.name for p in default_phases(many) if p.where(small)]
    assert names == ["static orders", "orders, annealed", TABU]


def test_the_phases_spend_the_budget_and_no_more():
    graph = generate(family("vlm-s", num_microbatches=8, memory=1.5), 0)
    search = Search(graph, begin(Budget(evaluations=60)))
    default(search, WHOLE.first(0.5))
    assert search.meter.used == 30


def test_a_search_aimed_elsewhere_leaves_the_first_as_it_was():
    graph = generate(family("vlm-s", num_microbatches=4), 0)
    first = Search(graph, begin(Budget(evaluations=5)))
    portfolio(first)
    best, target = first.best_ns, first.target_ns
    other = first.aimed_at(best)
    assert (other.best_ns, other.done) == (best, True)
    assert (first.target_ns, first.done) == (target, False)
