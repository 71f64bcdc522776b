"""OrderRule: a priority rule that chooses the next task of each rank, for all batches of a layout.

Co-optimization finds such a rule together with a layout (AdaPtis section 4.3, with extensions). Its times are
relative, so that it applies to batches of any size.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Count, Magnitude, Number, Value
from pipeloom.errors import InputError, check_count
from pipeloom.spec import Layout

_MOST = 1e9


class ChunkRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a rule for one chunk of the layout. A unit is the work of the mean microbatch on the mean rank."""

    layers: tuple[Number, Number]
    """First and last layer of the chunk, as in the layout."""
    rank: Number
    forward: Value
    """Key of its forwards, in units. A rank runs the ready task with the lowest key."""
    backward: Value
    """Key of its backwards, or of their input gradients."""
    weight: Value = 0.0
    """Key of its weight gradients, if backwards are split."""
    forward_wait: Magnitude = 0.0
    """How long a rank waits for an expected forward instead of running a task with a larger key, in units."""
    backward_wait: Magnitude = 0.0
    limit: Count | None = None
    """Maximum number of microbatches between forward and backward. None: limited by memory only."""
    strategies: tuple[str, ...] = ()
    """Strategy of each layer. Empty: not specified."""

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values."""
        for name in ("forward", "backward", "weight"):
            if not abs(getattr(self, name)) <= _MOST:
                raise InputError(name, f"{getattr(self, name):g} is not between {-_MOST:g} and {_MOST:g}")
        for name in ("forward_wait", "backward_wait"):
            if not 0 <= getattr(self, name) <= _MOST:
                raise InputError(name, f"{getattr(self, name):g} is not between 0 and {_MOST:g}")
        if self.limit is not None:
            check_count("limit", self.limit)
        count = self.layers[1] - self.layers[0] + 1
        if self.strategies and len(self.strategies) != count:
            raise InputError("strategies", f"are {len(self.strategies)}, the chunk has {count} layers")


class OrderRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule that chooses the next task of a rank under one layout.

    The keys of a microbatch increase by the work of the earlier microbatches, in units.
    """

    chunks: tuple[ChunkRule, ...]
    """Rule of every chunk, in the order of the layout."""
    period: Count = 1
    """Number of consecutive microbatches that share a key."""
    format: Literal["pipeloom.rule/1"] = "pipeloom.rule/1"

    def __post_init__(self) -> None:
        """Raise `InputError` for an empty rule."""
        check_count("period", self.period)
        if not self.chunks:
            raise InputError("chunks", "are none", "give one for every chunk of the layout")

    def moved_to(self, layout: Layout) -> OrderRule:
        """Return the rule for a layout with the same number of chunks on other ranks or with other layers.

        Chunks with other layers lose their strategies.
        """
        chunks = []
        for mine, theirs in zip(self.chunks, layout.chunks, strict=True):
            strategies = mine.strategies if mine.layers == theirs.layers else ()
            chunks.append(msgspec.structs.replace(mine, rank=theirs.rank, layers=theirs.layers, strategies=strategies))
        return msgspec.structs.replace(self, chunks=tuple(chunks))

    def check_layout(self, layout: Layout) -> None:
        """Check that the rule is for this layout. Names of modules may differ.

        Raises
        ------
        InputError
            A chunk differs. The message names it.
        """
        if len(self.chunks) != len(layout.chunks):
            raise InputError(
                "chunks", f"are {len(self.chunks)}, the layout has {len(layout.chunks)}", "arrange the layers again"
            )
        for i, (mine, theirs) in enumerate(zip(self.chunks, layout.chunks, strict=True)):
            if (mine.layers, mine.rank) != (theirs.layers, theirs.rank):
                raise InputError(
                    f"chunks[{i}]",
                    f"has layers {list(mine.layers)} on rank {mine.rank}, in the layout it has "
                    f"{list(theirs.layers)} on rank {theirs.rank}",
                    "arrange the layers again",
                )
