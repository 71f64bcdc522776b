"""Values of a running script, of which parts may be unknown.

A value is a string. An unknown part is one character of a private plane, which stands for an entry of a table. So
unknown parts survive whatever is done with the strings around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

MOST_CHARACTERS = 1_000_000
"""Most characters of one value, and of one command's words; the kernel passes about as many to a program."""
MOST_STEPS = 100_000
"""Most steps of one reading: commands that run, words and elements that are made."""
_FIRST, _LAST = 0xF0000, 0xFFFFD
_UNKNOWN = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")

Kind = Literal["unset", "gone", "required", "text", "part", "output", "list"]


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown part of a value, as the script writes it (``$SIZE``, ``$(nproc)``) on a line.

    The kind says what may stand in its place:

    - ``unset``: nothing; a variable that the script does not set. ``gone``: the same where it leaves no word.
      ``required``: the same where bash would stop.
    - ``text``: one word. ``part``: one word, which may be empty. ``output``: perhaps several words.
    - ``list``: any number of words.
    """

    source: str
    line: int
    kind: Kind

    @property
    def reason(self) -> str:
        """Why it is unknown."""
        source = self.source if len(self.source) <= 80 else f"{self.source[:77]}..."
        if self.kind in ("unset", "gone", "required"):
            return f"{source} is not set in this file (line {self.line})"
        return f"{source} is known only when the script runs (line {self.line})"


class Undetermined(Exception):
    """A result depends on something unknown."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.reason)
        self.unknown = unknown


Status: TypeAlias = int | Unknown
"""Exit status of a command."""


class Refusal(Exception):
    """The script does something that is not evaluated."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


class WorkLimit(Refusal):
    """The script does too much."""


class LoopLimit(WorkLimit):
    """A loop does not end in time; what it has started by then, it starts again and again."""


def negated(unknown: Unknown) -> Unknown:
    """Return the opposite of an unknown status."""
    source = unknown.source
    return replace(unknown, source=source[2:] if source.startswith("! ") else f"! {source}")


@dataclass(slots=True)
class Unknowns:
    """The table of unknown parts, the line that runs, and the work done so far.

    ``pinned`` is the line of the command whose text is run, such as ``eval``. ``inspected`` has the variables that are
    not set and were read as empty, each with its line.
    """

    entries: list[Unknown] = field(default_factory=list)
    numbers: dict[Unknown, str] = field(default_factory=dict)
    steps: int = 0
    line: int = 0
    pinned: int = 0
    inspected: dict[str, int] = field(default_factory=dict)

    def go_to(self, line: int) -> None:
        """Set the line that runs now."""
        self.line = self.pinned or line

    def charge(self, steps: int = 1) -> None:
        """Count work; raises `WorkLimit` where a script does too much."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise WorkLimit(self.line, f"the script takes more than {MOST_STEPS} steps")

    def check_length(self, length: int) -> None:
        """Raise `WorkLimit` where a value is too long."""
        if length > MOST_CHARACTERS:
            raise WorkLimit(self.line, f"a value has more than {MOST_CHARACTERS} characters")
        self.charge(length // 4000)

    def make(self, source: str, kind: Kind, line: int | None = None) -> str:
        """Return the character that stands for an unknown part."""
        unknown = Unknown(" ".join(source.split())[:2000], self.line if line is None else line, kind)
        if unknown not in self.numbers:
            if len(self.entries) > _LAST - _FIRST:
                raise WorkLimit(self.line, "too many values are unknown")
            self.numbers[unknown] = chr(_FIRST + len(self.entries))
            self.entries.append(unknown)
        return self.numbers[unknown]

    def derive(self, unknown: Unknown, kind: Kind = "output") -> str:
        """Return the character for a value that depends on an unknown part."""
        return self.make(unknown.source, "required" if unknown.kind == "required" else kind, unknown.line)

    def within(self, value: str) -> list[Unknown]:
        """Return the unknown parts of a value."""
        return [] if value.isascii() else [self.entries[ord(c) - _FIRST] for c in _UNKNOWN.findall(value)]

    def is_unset(self, value: str) -> bool:
        """Return whether a value has nothing but variables that are not set."""
        found = self.within(value)
        return len(found) == len(value) and all(one.kind in ("unset", "gone") for one in found)

    def known(self, value: str) -> str:
        """Return a value whose content decides something, without the variables that are not set.

        Raises `Undetermined` if another part is unknown.
        """
        for one in self.within(value):
            if one.kind not in ("unset", "gone"):
                raise Undetermined(one)
            if one.kind == "unset":
                self.inspected.setdefault(one.source, one.line)
        return self.without_unset(value)

    def without_unset(self, value: str) -> str:
        """Return a value without the variables that are not set."""
        return self._rewritten(value, lambda c, one: "" if one.kind in ("unset", "gone") else c)

    def without_gone(self, value: str) -> str:
        """Return a value without the memory of variables that left no word."""
        return self._rewritten(value, lambda c, one: "" if one.kind == "gone" else c)

    def shown(self, value: str) -> str:
        """Return a value with its unknown parts as the script writes them."""
        return self._rewritten(value, lambda _, one: "" if one.kind == "gone" else one.source)

    def recast(self, value: str, old: Kind, new: Kind) -> str:
        """Return a value whose unknown parts of one kind have another kind."""
        return self._rewritten(value, lambda c, one: self.derive(one, new) if one.kind == old else c)

    def _rewritten(self, value: str, change: Callable[[str, Unknown], str]) -> str:
        if value.isascii():
            return value
        return _UNKNOWN.sub(lambda found: change(found[0], self.entries[ord(found[0]) - _FIRST]), value)


def has_unknown(value: str) -> bool:
    """Return whether a part of a value is unknown."""
    return _UNKNOWN.search(value) is not None
