"""The one table of moves: everything else that knows moves is derived from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from pipeloom.compiled import callee, inlined
from pipeloom.compiled.random import below, uniform
from pipeloom.layout.cooptimize.kernels import moves
from pipeloom.layout.cooptimize.kernels.draft import NUM_CHUNKS, SCALARS, Draft
from pipeloom.layout.cooptimize.kernels.moves import MoveContext

Array = npt.NDArray[Any]

MoveFunction = Callable[[Draft, int, MoveContext], bool]


class Move(NamedTuple):
    """One way to change a draft.

    Attributes
    ----------
    name : str
        As reports and `pipeloom.layout.cooptimize.CooptimizeParams.move_weights` have it.
    function : callable
        Compiled; of `pipeloom.layout.cooptimize.kernels.moves`.
    tunes : str
        What it changes: ``partition``, ``placement`` (cutting and joining makes one finer or coarser), ``schedule`` or
        ``strategies``.
    weight : float
        How often it is tried, relative to the others.
    needs : str
        Tried only where there are several ``strategies``, or where layers may make ``exchanges``; empty: always.
    ordering : float
        Times its weight while a given partition is ordered.
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
"""In the order in which random numbers choose among them."""

TUNABLE = ("partition", "placement", "schedule", "strategies")
"""What moves change."""


def _one_of(functions: Sequence[MoveFunction], first: int = 0) -> Any:
    """Compile the call of a function by its number: kernels have no tables of functions, so this halves and halves."""
    if len(functions) == 1:
        only = functions[0]

        @inlined
        def call(_number: int, draft: Draft, c: int, context: MoveContext) -> bool:
            return only(draft, c, context)

        return call
    half = len(functions) // 2
    middle = first + half
    low, high = _one_of(functions[:half], first), _one_of(functions[half:], middle)

    @inlined
    def choose(number: int, draft: Draft, c: int, context: MoveContext) -> bool:
        if number < middle:
            made: bool = low(number, draft, c, context)
        else:
            made = high(number, draft, c, context)
        return made

    return choose


_make = _one_of([move.function for move in MOVES])


@callee
def change(draft: Draft, context: MoveContext, weights: Array) -> int:
    """Make one random change of a draft in place; return its place in `MOVES`, or -1 where it changed nothing.

    ``weights`` are running sums by move.
    """
    pick = uniform(context.rng) * weights[len(weights) - 1]
    number = 0
    while weights[number] <= pick:
        number += 1
    c = below(context.rng, draft.chunks[SCALARS, NUM_CHUNKS])
    if _make(number, draft, c, context):
        return number
    return -1
