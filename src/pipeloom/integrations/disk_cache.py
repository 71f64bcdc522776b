"""Results on disk that take seconds to compute, by what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path


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
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            try:
                part.write(data)
                part.flush()
                os.replace(part.name, file)
            except OSError:
                os.unlink(part.name)
    except OSError:
        return
