"""The public names are what users build on: adding one is a decision, losing one breaks them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pipeloom

PUBLIC = {
    "Checkpoints", "Chunk", "ClusterSpec", "Deadline", "InfeasibleError", "InputError", "Layout", "LowerBound", "Model",
    "Module", "ModulePlacement", "PackingSpec", "Part", "PipeloomError", "Planner", "Prefetched", "Schedule",
    "Setup", "Size", "Solution", "TaskGraph", "TcpPlanStore", "Timeline", "Trainer", "__version__", "check", "launch",
    "load", "lower_bound", "make_graph", "profile_model", "read_instance", "read_layout", "read_samples",
    "read_schedule", "separate", "simulate", "solve", "write_instance", "write_layout", "write_schedule",
}  # fmt: skip


def test_public_names() -> None:
    assert set(pipeloom.__all__) == PUBLIC
    assert dir(pipeloom) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_leads_somewhere(name: str) -> None:
    if pipeloom._HOME.get(name) == "pipeloom.runtime":
        pytest.importorskip("torch")
    assert getattr(pipeloom, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pipeloom.nothing


def test_import_is_light() -> None:
    code = "import sys, pipeloom; print(*sorted({'numpy', 'numba', 'torch', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
