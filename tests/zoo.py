"""The models of the zoo, as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.spec.catalog import load_architecture, names

_EVERY = 8
"""Of the models that are read from their own code, one in so many is tried in each run of the tests."""


def zoo_models() -> list[Any]:
    """Return the names of all models; of most that are read from their own code, as parameters of full tests."""
    found: list[Any] = []
    read = 0
    for name in names("models"):
        own = "read from its own code" in load_architecture(name).source
        read += own
        found.append(pytest.param(name, marks=pytest.mark.full) if own and read % _EVERY else name)
    return found
