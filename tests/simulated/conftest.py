"""Each test has a simulated accelerator of its own, whose pinned memory the runtime uses.

A process that has registered the accelerator keeps it, so these tests run in one of their own: `tests.test_simulated`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if "PIPELOOM_SIMULATED" in os.environ:
    from . import device as sim
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the clocks, and let the runtime have memory that is watched."""
    sim.install(monkeypatch.setattr)
    sim.reset()
    yield
    sim.reset()
