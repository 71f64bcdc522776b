"""A checkpoint that is written beside training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pipeloom.errors import InputError
from pipeloom.runtime.checkpoint.resume import PendingCheckpoint


@pytest.mark.parametrize("fails", [False, True])
def test_threads_take_short_turns_only_while_it_is_written(fails: bool) -> None:
    before, during = sys.getswitchinterval(), []

    def write() -> Path:
        during.append(sys.getswitchinterval())
        if fails:
            raise InputError("disk", "is full")
        return Path("there")

    pending = PendingCheckpoint(3, write, asynchronous=True, device=torch.device("cpu"))
    if fails:
        with pytest.raises(InputError, match="is full"):
            pending.wait()
    else:
        assert pending.wait() == Path("there")
    assert during[0] < before == sys.getswitchinterval()
