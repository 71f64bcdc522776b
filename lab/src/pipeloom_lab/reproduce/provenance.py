"""The source, commit and machine of a run."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from pathlib import Path

import pipeloom


@functools.cache
def source_commit() -> str:
    """Return the commit of the package's source, with ``-dirty`` if its files differ; empty if unknown.

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


@functools.cache
def source_digest() -> str:
    """Return ten hexadecimal digits of a hash of the package's source files; equal digests give equal results.

    Unlike a commit it also tells changed files apart, and stays when only pages are committed.
    """
    package = Path(pipeloom.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".toml", ".json") and "__pycache__" not in path.parts:
            found.update(str(path.relative_to(package)).encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:10]


def machine() -> str:
    """Return the processor, cores and Python version of this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    name = named or platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} hardware threads, Python {platform.python_version()}"
