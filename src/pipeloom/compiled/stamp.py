"""Which source files a compiled function is made from, and a digest of them.

A compiled function contains the compiled functions that it calls, and the constants that it reads, from whatever file
they are. So its files are its own, those that its file imports from this project, and further those that these import,
as far as they hold compiled code themselves. Imports are read by a pattern, which takes a tenth of the time of parsing;
every name must be imported from the place that has it, or from an ``__init__.py`` that does so, be it only for type
checkers.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
"""Folder of the project's package."""
_ALWAYS = sorted(Path(__file__).parent.glob("*.py"))
_HERE = f"{ROOT.name}.{Path(__file__).parent.name}"
_IMPORT = re.compile(
    rf"^[ \t]*(?:from ({ROOT.name}(?:\.\w+)*) import (?:\(([^)]*)\)|(.*))|import ({ROOT.name}(?:\.\w+)*))", re.MULTILINE
)
_COMMENT = re.compile(r"#.*")


class Source(NamedTuple):
    """What is known of a file: a digest of its contents, the (module, name) that it imports, and its compiled code."""

    digest: bytes
    imports: tuple[tuple[str, str], ...]
    compiled: bool


@cache
def stamp(file: Path) -> str:
    """Digest of all files that the compiled functions in ``file`` are made from; see `files_of`."""
    hasher = hashlib.sha256()
    for used in files_of(file):
        hasher.update(read(used).digest)
    return hasher.hexdigest()


def files_of(file: Path) -> list[Path]:
    """Files that the compiled functions in ``file`` are made from: always this package, too; sorted."""
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
    """Look into a file once: a change after its import must not count."""
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
    """File that a name of a module comes from; None where it is no file of the project."""
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
