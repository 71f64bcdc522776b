"""Rules that were found together with the layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pipeloom.search.lists import Priorities, chunks_of, priorities_of
from pipeloom.search.starts.start import Start, turns_of
from pipeloom.search.state import Search


class LayoutRules(Start):
    """The rules of the layout (``SearchParams.rules``), with microbatches in their order."""

    name = "rules of the layout"
    turns: ClassVar[tuple[str, ...]] = ("first in, first out",)
    """Names of sort orders of the microbatches; see `turns_of`."""

    @classmethod
    def propose(cls, search: Search) -> Iterator[Priorities]:
        """Yield the rules for each sort order."""
        chunks = chunks_of(search.graph) if search.params.rules else None
        if chunks is None:
            return
        turns = turns_of(search.groups)
        for name in cls.turns:
            for rule in search.params.rules:
                yield priorities_of(search.graph, search.packed, chunks, rule, turns[name])


class LayoutRulesSorted(LayoutRules):
    """The same with microbatches in the sort orders that suit rules best."""

    name = "rules of the layout, sorted microbatches"
    turns = ("small first", "large between")


class LayoutRulesOther(LayoutRules):
    """The same with microbatches in all other sort orders."""

    name = "rules of the layout, other microbatch orders"
    turns = ("large first", "small between", "few small, then large", "evenly mixed")
