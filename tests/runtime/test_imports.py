"""What importing the runtime brings along: ranks are processes of their own, and each of them pays for it."""

from __future__ import annotations

import subprocess
import sys

SLOW = {
    "numba",
    "scipy",
    "sympy",
    "bokeh",
    "highspy",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
}
"""Each takes from a third of a second to seconds, and most runs need none of them before they train."""


def imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_runtime_imports_nothing_slow() -> None:
    loop = "Checkpoints, Executor, Model, Module, Prefetched, TcpPlanStore, TorchTransport, Trainer, launch, make_mesh"
    found = imported_by(f"import pipeloom.runtime\nfrom pipeloom.runtime import {loop}")
    assert "pipeloom.runtime.train.trainer" in found
    assert not SLOW & found
