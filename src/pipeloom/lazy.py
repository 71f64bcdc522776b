"""Packages whose public names are imported when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that imports its public names when they are first used.

    No name may also be the name of one of the package's modules: Python would put the module in its place.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    home : mapping
        The module of every name, below the package where it begins with a dot.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*home, *getattr(sys.modules[package], "__all__", ())})

    return get, names
