"""Traced models on disk, by configuration and versions, so that the second run needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.errors import InputError
from pipeloom.integrations.disk_cache import cache_file, write
from pipeloom.spec.architecture import Architecture
from pipeloom.version import __version__

FORM = 6
"""Raised when the tracer counts something else than before, so that older entries are not used."""


def traced(config: Mapping[str, Any], name: str) -> Architecture:
    """Return the architecture of a `config.json`, read from the cache or traced from the library's code."""
    file = entry_of(config, _library())
    known = _load(file)
    if known is not None:
        return msgspec.structs.replace(known, name=name or known.name)
    try:
        from pipeloom.integrations.tracing.architecture import trace_config
    except ImportError as error:
        raise InputError("torch", f"is not installed: {error}", "install pipeloom[transformers]") from error
    found = trace_config(config, name)
    write(file, msgspec.json.encode(found))
    return found


def entry_of(config: Mapping[str, Any], library: str) -> Path:
    """Return the file of a configuration, traced with a version of the library."""
    return cache_file("traced", FORM, __version__, library, config)


def _library() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError as error:
        remedy = "install pipeloom[transformers], or give a .toml file that `pipeloom describe --toml` wrote"
        problem = "is not installed, but this model is read from its code"
        raise InputError("transformers", problem, remedy) from error


def _load(file: Path) -> Architecture | None:
    """Return the architecture in a file; None if there is none or it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Architecture)
    except (OSError, msgspec.DecodeError, InputError):
        return None
