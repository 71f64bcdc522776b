"""Packages that import their names when first used give all that they promise, and import no more at first."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

LAZY = (
    "pipeloom",
    "pipeloom.io",
    "pipeloom.packing",
    "pipeloom.report",
    "pipeloom.runtime",
    "pipeloom.taskgraph",
    "pipeloom.training",
)


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_is_there(name):
    package = import_module(name)
    for public in package.__all__:
        found = getattr(package, public)
        # A module of the same name would hide it.
        assert type(found).__name__ != "module"
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_solving_imports_neither_the_emulator_nor_packing():
    code = "import sys, pipeloom.cli.solve, pipeloom.search; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pipeloom.io.instance" in loaded
    for heavy in ("pipeloom.emulator", "pipeloom.packing", "pipeloom.plan", "torch", "highspy", "ortools"):
        assert heavy not in loaded
