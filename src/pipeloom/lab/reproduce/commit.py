"""Which commit of the source is running."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pipeloom


@functools.cache
def source_commit() -> str:
    """The commit of the package's source, ``-dirty`` behind it where files of the package differ; empty: unknown.

    Unknown where the package does not lie in a git checkout of its own source, or there is no git. Asked once in a
    process: what changes on disk later is not what runs.
    """
    package = Path(pipeloom.__file__).parent
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        name = _git(package, "describe", "--always", "--abbrev=10", "--exclude=*")
        changed = _git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{name}-dirty" if changed else name


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
