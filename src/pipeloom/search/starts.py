"""All starts of a search: rules of the layout, static orders and standard rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from pipeloom.search import portfolio
from pipeloom.search.lists import chunks_of, priorities_of, standard_rules
from pipeloom.search.rule import OrderRule
from pipeloom.search.state import Search

_TURNS = ("first in, first out", "small first", "large between")
"""Orders of the microbatches that suit rules best. They are tried first."""


def starts(search: Search) -> Iterator[Callable[[], int]]:
    """Yield starts, the most promising first.

    If the layout has a rule, its order and the first order of groups come before all others.
    """
    graph, packed, groups = search.graph, search.packed, search.groups
    orders = (
        partial(search.try_order, start.order, start.choice)
        for start in portfolio.starts(packed, groups, search.rule, search.params.static_orders.late_parts)
    )
    chunks = chunks_of(graph)
    if chunks is None:
        yield from orders
        return
    turns = portfolio.turns_of(groups)

    def ruled(rules: Iterable[OrderRule], names: Iterable[str]) -> Iterator[Callable[[], int]]:
        for name in names:
            for rule in rules:
                yield partial(search.try_rule, priorities_of(graph, packed, chunks, rule, turns[name]))

    layout_rules = search.params.rules
    yield from ruled(layout_rules, _TURNS[:1])
    yield next(orders)
    yield from ruled(layout_rules, _TURNS[1:])
    yield from orders
    yield from ruled(standard_rules(graph, chunks), _TURNS[:1])
    yield from ruled(layout_rules, [name for name in turns if name not in _TURNS])
