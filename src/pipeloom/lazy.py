"""Names and modules that are imported on first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its public names on first use.

    The imports under ``if TYPE_CHECKING:`` in the package's own ``__file__`` say where each name is defined. Type
    checkers and editors read them too. No public name may equal the name of a module of the package, because Python
    would bind the module to it.
    """
    home: dict[str, str] = {}

    def get(name: str) -> Any:
        if not home:
            home.update(_declared(Path(file)))
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*_declared(Path(file)), *getattr(sys.modules[package], "__all__", ())})

    return get, names


def lazy_module(name: str) -> Any:
    """Return a proxy for the module of a full name that imports it when one of its names is first used.

    Use it for modules that are slow to import, such as those of compiled functions. Declare the module under ``if
    TYPE_CHECKING:``.
    """
    return _LazyModule(name)


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def _declared(file: Path) -> dict[str, str]:
    """Return the module of every name that a file imports for type checkers."""
    return {
        alias.name: str(line.module)
        for block in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
