"""The public names are what users build on: adding one is a decision, losing one breaks them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pipeloom


def test_public_names() -> None:
    expected = {
        "InfeasibleError", "InputError", "LowerBound", "PipeloomError", "Schedule", "TaskGraph", "Timeline", "load",
        "make_graph", "read_instance", "read_layout", "read_samples", "read_schedule", "write_instance",
        "write_layout", "write_schedule", "__version__",
    }  # fmt: skip
    assert set(pipeloom.__all__) == expected
    for name in pipeloom.__all__:
        assert getattr(pipeloom, name) is not None
    assert dir(pipeloom) == sorted(expected)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pipeloom.nothing


def test_import_is_light() -> None:
    code = "import sys, pipeloom; print(*sorted({'numpy', 'numba', 'torch', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
