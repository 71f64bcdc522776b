"""Compiled loops of the joint search: run a placement under a rule, change it, anneal it."""

from pipeloom.layout.cooptimize.kernels.anneal import Cooling, WalkArrays, anneal
from pipeloom.layout.cooptimize.kernels.balance import Balance, exchange_layers, repartition
from pipeloom.layout.cooptimize.kernels.draft import (
    FIRST,
    KEY,
    LIMIT,
    NUM_CHUNKS,
    NUM_ROWS,
    PERIOD,
    RANK,
    SCALARS,
    SPREAD,
    UNLIMITED,
    WAIT,
    ChainArrays,
    Draft,
)
from pipeloom.layout.cooptimize.kernels.evaluate import Scratch, evaluate
from pipeloom.layout.cooptimize.kernels.fold import fold
from pipeloom.layout.cooptimize.kernels.move_table import MOVES, TUNABLE, Move
from pipeloom.layout.cooptimize.kernels.moves import BEST, PRESENT, MoveContext
from pipeloom.layout.cooptimize.kernels.run import NEVER, ChunkSums, RunState, run

__all__ = [
    "BEST",
    "FIRST",
    "KEY",
    "LIMIT",
    "MOVES",
    "NEVER",
    "NUM_CHUNKS",
    "NUM_ROWS",
    "PERIOD",
    "PRESENT",
    "RANK",
    "SCALARS",
    "SPREAD",
    "TUNABLE",
    "UNLIMITED",
    "WAIT",
    "Balance",
    "ChainArrays",
    "ChunkSums",
    "Cooling",
    "Draft",
    "Move",
    "MoveContext",
    "RunState",
    "Scratch",
    "WalkArrays",
    "anneal",
    "evaluate",
    "exchange_layers",
    "fold",
    "repartition",
    "run",
]
