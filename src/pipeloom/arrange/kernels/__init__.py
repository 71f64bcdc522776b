"""Compiled loops of the joint search: run an arrangement under a rule, change it, anneal it."""

from pipeloom.arrange.kernels.anneal import anneal
from pipeloom.arrange.kernels.balance import exchange_layers, repartition
from pipeloom.arrange.kernels.evaluate import evaluate
from pipeloom.arrange.kernels.fold import fold
from pipeloom.arrange.kernels.moves import NUM_MOVES
from pipeloom.arrange.kernels.plan import (
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
)
from pipeloom.arrange.kernels.run import NEVER, run

__all__ = [
    "FIRST", "KEY", "LIMIT", "NEVER", "NUM_CHUNKS", "NUM_MOVES", "NUM_ROWS", "PERIOD", "RANK", "SCALARS", "SPREAD",
    "UNLIMITED", "WAIT", "anneal", "evaluate", "exchange_layers", "fold", "repartition", "run",
]  # fmt: skip
