"""Ranks and planner of a training run begin warm."""

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
    "torch._dynamo",  # optimisers import it when they are made
)
"""What ranks and planner import."""
_KERNELS = ("pipeloom.packing:warm_up", "pipeloom.search:warm_up")
"""What loads their kernels; those that are not compiled yet are."""


def begin_warm(kernels: Sequence[str] = _KERNELS) -> bool:
    """Begin to import what ranks and planner will want, in a process from which they are then forked.

    Not where torchrun has started this process: then it is a rank itself.

    Parameters
    ----------
    kernels : sequence of str
        Functions, as ``module:function``, that load the planner's kernels there.

    Returns
    -------
    bool
        Whether this call has begun it.
    """
    return "TORCHELASTIC_RUN_ID" not in os.environ and begin_forks((*_NAMES, *kernels))
