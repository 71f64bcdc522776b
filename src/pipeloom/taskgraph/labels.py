"""Labels of pairs under chosen candidates, made on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from pipeloom.spec import strategy_word
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.columns import IntArray, PairLabel


class ChosenLabels(Sequence[PairLabel]):
    """Labels with the strategy of every pair's chosen candidate. The original labels are in ``given``.

    A search chooses candidates a hundred times per lowered plan and does not read the strategies.
    """

    def __init__(
        self, labels: Sequence[PairLabel], candidates: Sequence[tuple[Candidate, ...]], choice: IntArray
    ) -> None:
        self.given, self._candidates, self._choice = labels, candidates, choice

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.given)

    def _at(self, pair: int) -> PairLabel:
        label, chosen = self.given[pair], self._candidates[pair][self._choice[pair]]
        word = strategy_word(chosen.strategy, chosen.layers)
        return PairLabel(label.chunk, label.microbatch, label.sub_microbatch, word)

    @overload
    def __getitem__(self, pair: int) -> PairLabel: ...

    @overload
    def __getitem__(self, pair: slice) -> tuple[PairLabel, ...]: ...

    def __getitem__(self, pair: int | slice) -> PairLabel | tuple[PairLabel, ...]:
        """Label of one pair, or of several."""
        return tuple(map(self._at, range(len(self))[pair])) if isinstance(pair, slice) else self._at(pair)

    def __iter__(self) -> Iterator[PairLabel]:
        """All labels."""
        return map(self._at, range(len(self)))
