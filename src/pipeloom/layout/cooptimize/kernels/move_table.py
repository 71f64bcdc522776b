"""The table of moves. All other lists of moves are derived from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipeloom.compiled import Array, callee, one_of
from pipeloom.compiled.random import below, uniform
from pipeloom.layout.cooptimize.kernels import moves
from pipeloom.layout.cooptimize.kernels.draft import NUM_CHUNKS, SCALARS, Draft
from pipeloom.layout.cooptimize.kernels.moves import MoveContext

MoveFunction = Callable[[Draft, int, MoveContext], bool]


class Move(NamedTuple):
    """One way to change a draft.

    Attributes
    ----------
    name : str
        Name in reports and in `pipeloom.layout.cooptimize.CooptimizeParams.move_weights`.
    function : callable
        Compiled function of `pipeloom.layout.cooptimize.kernels.moves`.
    tunes : str
        The part of the draft that the move changes: ``partition``, ``placement``, ``schedule`` or ``strategies``. Moves
        that cut and join chunks count as ``placement``.
    weight : float
        Frequency of the move relative to the others.
    needs : str
        ``strategies``: the move is tried only if layers have several strategies. ``exchanges``: only if layers may be
        exchanged. Empty: always.
    ordering : float
        Factor on the weight while only the order of a given partition is searched.
    """

    name: str
    function: MoveFunction
    tunes: str
    weight: float = 1.0
    needs: str = ""
    ordering: float = 1.0


MOVES = (
    Move("turns of microbatches", moves.change_turns, "schedule", 1.5),
    Move("cut a chunk", moves.cut_chunk, "placement", 1.5, ordering=0.0),
    Move("exchange two ranks", moves.exchange_ranks, "placement", ordering=0.0),
    Move("permute ranks", moves.permute_ranks, "placement", ordering=0.0),
    Move("shift a key", moves.shift_key, "schedule"),
    Move("shift many keys", moves.shift_keys, "schedule"),
    Move("wait", moves.change_wait, "schedule", 0.8),
    Move("move a boundary", moves.move_boundary, "partition", ordering=0.3),
    Move("relabel a suffix", moves.relabel_suffix, "placement", 0.7, ordering=0.0),
    Move("join chunks", moves.join_chunks, "placement", 0.7, ordering=0.0),
    Move("another rank", moves.change_rank, "placement", 0.5, ordering=0.0),
    Move("move two boundaries", moves.move_two_boundaries, "partition", ordering=0.3),
    Move("cut and join", moves.cut_and_join, "placement", 0.5, ordering=0.0),
    Move("copy a key", moves.copy_key, "schedule", 0.3),
    Move("strategy of layers", moves.change_strategies, "strategies", needs="strategies", ordering=0.3),
    Move("relieve a rank by boundaries", moves.relieve_by_boundaries, "partition", ordering=0.0),
    Move("relieve a rank", moves.relieve_rank, "placement", ordering=0.0),
    Move("limit what is in flight", moves.change_limits, "schedule", 0.5),
    Move("spread of keys", moves.change_spread, "schedule", 0.3),
    Move("exchange layers", moves.swap_layers, "placement", needs="exchanges", ordering=0.0),
)
"""All moves. The results for a seed depend on their order."""

TUNABLE = ("partition", "placement", "schedule", "strategies")
"""Values of `Move.tunes`."""


_make = one_of([move.function for move in MOVES])


@callee
def change(draft: Draft, context: MoveContext, weights: Array) -> int:
    """Make one random change of a draft in place; return its index in `MOVES`, or -1 if the draft did not change.

    ``weights`` holds the cumulative sums of the weights of the moves.
    """
    pick = uniform(context.rng) * weights[len(weights) - 1]
    number = 0
    while weights[number] <= pick:
        number += 1
    c = below(context.rng, draft.chunks[SCALARS, NUM_CHUNKS])
    if _make(number, draft, c, context):
        return number
    return -1
