"""Moves of local search. A move is one class in one file and one line here.

A class has a ``name``, a ``weight`` (its share of the drawn moves of its list), and a compiled ``propose``. Evaluation
and acceptance are the same for all moves of a list. ``docs/search.md`` has an example.
"""

from __future__ import annotations

from pipeloom.compiled import one_of
from pipeloom.search.moves.change_policy import ChangePolicy
from pipeloom.search.moves.exchange_components import ExchangeComponents
from pipeloom.search.moves.exchange_microbatches import ExchangeMicrobatches
from pipeloom.search.moves.jolt_window import JoltWindow
from pipeloom.search.moves.move import require_valid
from pipeloom.search.moves.move_before_block import MoveBeforeBlock
from pipeloom.search.moves.move_behind_block import MoveBehindBlock
from pipeloom.search.moves.move_groups import MoveGroups
from pipeloom.search.moves.move_microbatch import MoveMicrobatch
from pipeloom.search.moves.shift_component import ShiftComponent
from pipeloom.search.moves.shift_direction import ShiftDirection
from pipeloom.search.moves.shift_task import ShiftTask
from pipeloom.search.moves.swap_groups import SwapGroups

ORDER_MOVES = (ExchangeMicrobatches, MoveMicrobatch, SwapGroups, MoveGroups, ChangePolicy)
"""Changes to an order of groups (`GroupOrder`), which list scheduling then evaluates."""
START_MOVES = (ExchangeComponents, ShiftComponent, ShiftDirection, ShiftTask, JoltWindow)
"""Changes to the starts of tasks (`StartTimes`), which list scheduling then repairs."""
BLOCK_MOVES = (MoveBehindBlock, MoveBeforeBlock)
"""Moves of one task to an end of its critical block, for tabu search. Each has its own estimate, ``evaluate``."""

require_valid((*ORDER_MOVES, *START_MOVES, *BLOCK_MOVES))
propose_order = one_of([move.propose for move in ORDER_MOVES])
propose_starts = one_of([move.propose for move in START_MOVES])
propose_block = one_of([move.propose for move in BLOCK_MOVES])
estimate_block = one_of([move.evaluate for move in BLOCK_MOVES])
