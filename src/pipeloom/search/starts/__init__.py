"""Starts of a search. A start is one class and one line here, in the order in which they are tried.

If the layout has a rule, its order and the first order of groups come before all others.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.search.lists import GroupPriorities, Priorities
from pipeloom.search.starts.late_ends import LateEnds
from pipeloom.search.starts.layout_rules import LayoutRules, LayoutRulesOther, LayoutRulesSorted
from pipeloom.search.starts.sorted_orders import FirstInFirstOut, SortedOrders
from pipeloom.search.starts.standard_rules import StandardRules
from pipeloom.search.starts.start import Start
from pipeloom.search.state import Search

STARTS: tuple[type[Start], ...] = (
    LayoutRules,
    FirstInFirstOut,
    LayoutRulesSorted,
    LateEnds,
    SortedOrders,
    StandardRules,
    LayoutRulesOther,
)


def starts(search: Search) -> Iterator[tuple[str, GroupPriorities | Priorities]]:
    """Yield the name and the priorities of all starts, the most promising first."""
    for start in STARTS:
        for priorities in start.propose(search):
            yield start.name, priorities
