"""Families that were found by running small models, on disk, so that each process of a training need not find them."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.integrations.disk_cache import cache_file, write
from pipeloom.integrations.transformers.description import Family
from pipeloom.version import __version__

AGAIN = "PIPELOOM_FIND_AGAIN"
"""Environment variable. ``1`` finds families anew in each process, and neither reads nor writes files."""
_LIBRARY = "transformers."


def read_family(kind: type, config: Any) -> Family | None:
    """Return the family of a class and a configuration; None if no process has found it, or the class is your own."""
    file = _file(kind, config)
    try:
        return None if file is None else msgspec.json.decode(file.read_bytes(), type=Family)
    except (OSError, RecursionError, msgspec.DecodeError):
        return None


def write_family(kind: type, config: Any, family: Family) -> None:
    """Keep a family that was found."""
    file = _file(kind, config)
    if file is not None:
        write(file, msgspec.json.encode(family))


def _file(kind: type, config: Any) -> Path | None:
    if os.environ.get(AGAIN) == "1" or not kind.__module__.startswith(_LIBRARY):
        return None
    versions = {name: version(name) for name in ("torch", "transformers")} | {"pipeloom": __version__}
    return cache_file("found", versions, _code(), kind.__qualname__, config.to_json_string(use_diff=False))


def _code() -> str:
    """Return a digest of the code that finds families."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
