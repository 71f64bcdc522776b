"""Find the source files of a compiled function, and a digest of them.

A compiled function contains the compiled functions that it calls and the constants that it reads, from any file. So its
files are its own file, the files of this project that this file imports, and recursively the imports of those that
contain compiled code. A regular expression finds the imports, ten times faster than a parser. Every name must be
imported from the file that defines it, or from an ``__init__.py`` that imports it from there, if only for type
checkers.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
"""Folder of the package ``pipeloom``."""
_ALWAYS = sorted(Path(__file__).parent.glob("*.py"))
_HERE = f"{ROOT.name}.{Path(__file__).parent.name}"
_IMPORT = re.compile(
    rf"^[ \t]*(?:from ({ROOT.name}(?:\.\w+)*) import (?:\(([^)]*)\)|(.*))|import ({ROOT.name}(?:\.\w+)*))", re.MULTILINE
)
_COMMENT = re.compile(r"#.*")


class Source(NamedTuple):
    """Digest of a file's contents, the (module, name) pairs that it imports, and whether it has compiled code."""

    digest: bytes
    imports: tuple[tuple[str, str], ...]
    compiled: bool


@cache
def stamp(file: Path) -> str:
    """Return a digest of all files that the compiled functions in ``file`` are made from, see `files_of`."""
    hasher = hashlib.sha256()
    for used in files_of(file):
        hasher.update(read(used).digest)
    return hasher.hexdigest()


def files_of(file: Path) -> list[Path]:
    """Return the files that the compiled functions in ``file`` are made from, sorted. They include this package."""
    found = {file, *_ALWAYS}
    left = [file]
    while left:
        for module, name in read(left.pop()).imports:
            source = _home(module, name)
            if source is not None and source not in found:
                found.add(source)
                if read(source).compiled:
                    left.append(source)
    return sorted(found)


@cache
def read(file: Path) -> Source:
    """Read a file once. Later changes do not count, because the code was imported before."""
    content = file.read_bytes()
    imports = []
    for module, block, line, whole in _IMPORT.findall(content.decode()):
        names = _COMMENT.sub("", block or line).split(",")
        imports += [(module or whole, name.split()[0]) for name in names if name.strip()] or [(whole, "")]
    place = str(file).removeprefix(str(ROOT))
    digest = hashlib.sha256(f"{place} {len(content)}\n".encode() + content).digest()
    return Source(digest, tuple(imports), any(f"{module}.".startswith(f"{_HERE}.") for module, _ in imports))


@cache
def _home(module: str, name: str) -> Path | None:
    """Return the file that defines a name of a module; None if it is not in this project."""
    place = ROOT.joinpath(*module.split(".")[1:])
    file = place.with_suffix(".py")
    if file.is_file():
        return file
    package = place / "__init__.py"
    if not package.is_file():
        return None
    for other, known in read(package).imports:
        if known == name and (other, known) != (module, name):
            return _home(other, known)
    inside = _home(f"{module}.{name}", "") if name else None
    return inside or package
