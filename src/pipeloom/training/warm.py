"""Ranks and planner of a training run begin warm."""

from __future__ import annotations

import os

from pipeloom.forks import begin_forks

_NAMES = (
    "torch",
    "torch.distributed",
    "pipeloom.training.rank",
    "pipeloom.training.run",
    "pipeloom.cli.planner",
    "pipeloom.cli.progress",
    "pipeloom.lab",
    "torch._dynamo",  # optimisers import it when they are made
    "pipeloom.packing:warm_up",
    "pipeloom.search:warm_up",
)
"""What ranks and planner import, and the kernels that they load; where these are not compiled yet, they are."""


def begin_warm() -> None:
    """Begin to import what ranks and planner will want, in a process from which they are then forked.

    Not where torchrun has started this process: then it is a rank itself.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        begin_forks(_NAMES)
