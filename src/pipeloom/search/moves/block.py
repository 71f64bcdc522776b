"""What moves to the ends of critical blocks see."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A critical block: consecutive tasks of one rank, without a gap, on a longest path.

    Attributes
    ----------
    first, last : int
        Places of its first and last task in the order of the ranks.
    may_begin, may_end : bool
        Whether the schedule can become shorter if another task runs first, or last, in the block.
    """

    first: int
    last: int
    may_begin: bool
    may_end: bool
