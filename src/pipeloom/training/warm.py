"""Preloading for ranks and planner of a training run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipeloom.forks import begin_forks

_NAMES = (
    "torch",
    "torch.distributed",
    "pipeloom.training.rank",
    "pipeloom.training.run",
    "pipeloom.cli.planner",
    "pipeloom.cli.progress",
    "torch._dynamo",  # optimizers import it when they are made
)
"""Modules that ranks and planner import."""
_KERNELS = ("pipeloom.packing:compile_kernels", "pipeloom.search:compile_kernels")
"""Functions that load their kernels; missing ones are compiled."""


def begin_warm(kernels: Sequence[str] = _KERNELS) -> bool:
    """Begin to import the modules of ranks and planner in a process from which they are forked.

    Returns whether this call began it: not if torchrun started this process, which is then a rank itself.
    ``kernels`` are functions, as ``module:function``, that load the planner's kernels there.
    """
    return "TORCHELASTIC_RUN_ID" not in os.environ and begin_forks((*_NAMES, *kernels))
