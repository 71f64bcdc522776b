"""How ranks wait for one another: what a failed wait means, and how long the first plan may take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from pipeloom.errors import ExecutionError

_LOG = logging.getLogger(__name__)
_START_TIMEOUT = timedelta(hours=1)
_TELL_AFTER_S = 30.0


@contextmanager
def together(what: str) -> Iterator[None]:
    """Something that all ranks do: where it fails, another rank is gone or late.

    Raises
    ------
    ExecutionError
        Instead of what gloo and NCCL raise.
    """
    try:
        yield
    except RuntimeError as error:
        raise ExecutionError(f"{what} failed, another rank is gone or hangs: {error}") from error


class FirstPlan:
    """Lets rank 0 take as long as it needs until it has the first plan: it may have to compile kernels.

    In training a rank that is waited for longer than the process group's timeout is taken for dead. On a slow machine
    compiling alone can take longer, so the first plan is waited for in a group of its own, for an hour. All ranks make
    one of these, and call `wait` once.
    """

    def __init__(self) -> None:
        with together("the start of training"):
            self._group = dist.new_group(backend="gloo", timeout=_START_TIMEOUT)
        self._told = threading.Timer(_TELL_AFTER_S, self._tell)
        self._told.daemon = True
        if dist.get_rank() == 0:
            self._told.start()

    def wait(self) -> None:
        """On rank 0: it has the first plan. On the others: wait until it has."""
        self.cancel()
        with together("the start of training"):
            dist.barrier(group=self._group)
            dist.destroy_process_group(self._group)

    def cancel(self) -> None:
        """Say nothing any more: the plan is there, or will never be."""
        self._told.cancel()

    def _tell(self) -> None:
        _LOG.warning(
            "no first plan after %.0f s: rank 0 compiles the planner's kernels (they are kept for later runs), and the "
            "other ranks wait",
            _TELL_AFTER_S,
        )
