"""Traced models on disk, by configuration and versions, so that the second run needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.errors import InputError
from pipeloom.spec.architecture import Architecture

FORM = 4
"""Raised when the tracer counts something else than before, so that older entries are not used."""


def traced(config: Mapping[str, Any], name: str, *, fresh: bool = False) -> Architecture:
    """Return the architecture of a `config.json`, traced from the library's code or read from the cache.

    Parameters
    ----------
    fresh : bool
        Whether to trace again although the cache has it.

    Raises
    ------
    InputError
        The library is not installed or lacks the model, or its code cannot be described.
    """
    library = _library()
    file = _folder() / f"{_key(config, library)}.json"
    if not fresh:
        known = _load(file)
        if known is not None:
            return msgspec.structs.replace(known, name=name or known.name)
    try:
        from pipeloom.integrations.tracing.architecture import trace_config
    except ImportError as error:
        raise InputError("torch", f"is not installed: {error}", "install pipeloom[transformers]") from error
    found = trace_config(config, name)
    _save(file, found)
    return found


def _library() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError as error:
        remedy = "install pipeloom[transformers], or give a .toml file that `pipeloom describe --toml` wrote"
        problem = "is not installed, but this model is read from its code"
        raise InputError("transformers", problem, remedy) from error


def _key(config: Mapping[str, Any], library: str) -> str:
    text = json.dumps([FORM, version("pipeloom"), library, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pipeloom" / "traced"


def _load(file: Path) -> Architecture | None:
    """Return the architecture in a file; None if there is none or it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Architecture)
    except (OSError, msgspec.DecodeError, InputError):
        return None


def _save(file: Path, found: Architecture) -> None:
    """Write an entry at once, so that no other process reads a part of it. A folder that refuses is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            try:
                part.write(msgspec.json.encode(found))
                part.flush()
                os.replace(part.name, file)
            except OSError:
                os.unlink(part.name)
    except OSError:
        return
