"""Names and modules that are imported when first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that imports its public names when they are first used.

    Where each lives is said by the imports under ``if TYPE_CHECKING:`` in the package's own file, which type checkers
    and editors read too. No name may also be the name of one of the package's modules:
    Python would put the module in its place.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    file : str
        Its ``__file__``.
    """
    home: dict[str, str] = {}

    def get(name: str) -> Any:
        if not home:
            home.update(_stated(Path(file)))
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*_stated(Path(file)), *getattr(sys.modules[package], "__all__", ())})

    return get, names


def lazy_module(name: str) -> Any:
    """Return what stands for a module and imports it when the first of its names is asked for.

    For modules whose import costs more than most of what imports them, such as those of compiled functions. Say under
    ``if TYPE_CHECKING:`` which module it is.

    Parameters
    ----------
    name : str
        Of the module, in full.
    """
    return _LazyModule(name)


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def _stated(file: Path) -> dict[str, str]:
    """Module of every name that a file imports for type checkers."""
    return {
        alias.name: str(line.module)
        for block in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
