"""Each test has a simulated accelerator of its own, whose pinned memory the runtime uses.

A process that has registered the accelerator keeps it, so these tests run in one of their own: `tests.test_simulated`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pipeloom.runtime.launch import accelerator

if "PIPELOOM_SIMULATED" in os.environ:
    from . import device as sim
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the clocks, and let the runtime have memory that is watched."""
    usual = accelerator.empty_on_host

    def empty_on_host(like: Tensor) -> Tensor:
        return sim.pin(torch.empty(like.shape, dtype=like.dtype)) if like.device.type == sim.KIND else usual(like)

    monkeypatch.setattr(accelerator, "empty_on_host", empty_on_host)
    monkeypatch.setattr(accelerator, "pinned", lambda tensor: tensor if sim.is_pinned(tensor) else sim.pin(tensor))
    monkeypatch.setattr(accelerator, "tensor_on", sim.tensor_on)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", sim.one_at_a_time(torch.autograd._engine_run_backward))
    sim.reset()
    yield
    sim.reset()
