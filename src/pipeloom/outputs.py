"""The files that the running command will write: none of them may be a file that it reads, nor be named twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations

from pipeloom.errors import InputError, visible_line

PathLike = str | os.PathLike[str]

_OUTPUTS: list[PathLike] = []


def declare_outputs(paths: Sequence[PathLike]) -> None:
    """Name all files that this command will write, before it reads any; what was declared before is forgotten.

    Raises
    ------
    InputError
        Two of them are the same file.
    """
    for one, other in combinations(paths, 2):
        if _same(one, other):
            problem = f"is named for two outputs, also as {visible_line(os.fspath(other))}"
            raise InputError(visible_line(os.fspath(one)), problem, "give each output a file of its own")
    _OUTPUTS[:] = paths


def check_input(path: PathLike) -> None:
    """Raise `InputError` where a file that is about to be read is one that this command will write."""
    if any(_same(path, output) for output in _OUTPUTS):
        problem = "is read by this command, and named as its output, which would destroy it"
        raise InputError(visible_line(os.fspath(path)), problem, "give the output another name")


def _same(one: PathLike, other: PathLike) -> bool:
    """Whether two paths lead to one file: by links of any kind, or because a file made there would be the same."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)
