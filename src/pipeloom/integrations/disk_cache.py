"""Results on disk that take seconds to compute, by what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from pipeloom.errors import PipeloomError
from pipeloom.io.files import make_folder, write_bytes


def cache_file(kind: str, *depends: object) -> Path:
    """Return the file of a result of some kind; ``depends`` is everything that it depends on, as JSON has it."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home: nothing is kept
        base = Path(os.devnull)
    text = json.dumps(depends, sort_keys=True, default=str)
    return base / "pipeloom" / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write(file: Path, data: bytes) -> None:
    """Write an entry at once, so that no other process reads a part of it. A folder that refuses is no error."""
    with suppress(PipeloomError):
        make_folder(file.parent)
        write_bytes(file, data)
