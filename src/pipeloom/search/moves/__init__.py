"""Moves of local search. A move is one class and one line here.

A class has a ``name``, a ``weight`` (its share of the drawn moves of its list), and a compiled ``propose``. Evaluation
and acceptance are the same for all moves of a list. ``docs/search.md`` has an example.
"""

from __future__ import annotations

from pipeloom.compiled import one_of
from pipeloom.search.moves.block import MoveBeforeBlock, MoveBehindBlock
from pipeloom.search.moves.group_order import ChangePolicy, ExchangeMicrobatches, MoveGroups, MoveMicrobatch, SwapGroups
from pipeloom.search.moves.start_times import ExchangeComponents, JoltWindow, ShiftComponent, ShiftDirection, ShiftTask

ORDER_MOVES = (ExchangeMicrobatches, MoveMicrobatch, SwapGroups, MoveGroups, ChangePolicy)
"""Changes to an order of groups (`GroupOrder`), which list scheduling then evaluates."""
START_MOVES = (ExchangeComponents, ShiftComponent, ShiftDirection, ShiftTask, JoltWindow)
"""Changes to the starts of tasks (`StartTimes`), which list scheduling then repairs."""
BLOCK_MOVES = (MoveBehindBlock, MoveBeforeBlock)
"""Moves of one task to an end of its critical block, for tabu search. Each has its own estimate, ``evaluate``."""

propose_order = one_of([move.propose for move in ORDER_MOVES])
propose_starts = one_of([move.propose for move in START_MOVES])
propose_block = one_of([move.propose for move in BLOCK_MOVES])
estimate_block = one_of([move.evaluate for move in BLOCK_MOVES])
