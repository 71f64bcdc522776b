"""Values of a running script, of which parts may be unknown.

A value is a string. A part that the script does not say is one character of a private plane, which stands for an
entry of a table, so that unknown parts survive whatever is done with the strings around them.
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
    """What is unknown of a value.

    Attributes
    ----------
    source : str
        How the script writes it, such as ``$SIZE`` or ``$(nproc)``.
    line : int
    kind : str
        ``unset``: a variable that is not set in the script. ``gone``: the same where it leaves no word.
        ``required``: the same where bash would stop.
        ``text``: one word. ``part``: the same, which may be empty. ``output``: what may be several words.
        ``list``: any number of words.
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


def negated(unknown: Unknown) -> Unknown:
    """Return the opposite of an unknown status."""
    source = unknown.source
    return replace(unknown, source=source[2:] if source.startswith("! ") else f"! {source}")


class LoopLimit(WorkLimit):
    """A loop does not end in time; what it has started by then, it starts again and again."""


@dataclass(slots=True)
class Unknowns:
    """The table of unknown parts, and the work that was done so far."""

    entries: list[Unknown] = field(default_factory=list)
    numbers: dict[Unknown, str] = field(default_factory=dict)
    steps: int = 0
    line: int = 0
    pinned: int = 0
    """Line of the command whose text is run, such as ``eval``."""
    inspected: dict[str, int] = field(default_factory=dict)
    """Variables that are not set and were read as empty, with the line."""

    def go_to(self, line: int) -> None:
        """Say which line runs now."""
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

    def make(self, source: str, kind: Kind) -> str:
        """Return the character that stands for an unknown part."""
        unknown = Unknown(" ".join(source.split())[:2000], self.line, kind)
        if unknown not in self.numbers:
            if len(self.entries) > _LAST - _FIRST:
                raise WorkLimit(self.line, "too many values are unknown")
            self.numbers[unknown] = chr(_FIRST + len(self.entries))
            self.entries.append(unknown)
        return self.numbers[unknown]

    def again(self, unknown: Unknown, kind: Kind = "output") -> str:
        """Return the character for a value that depends on an unknown part."""
        kind = "required" if unknown.kind == "required" else kind
        line, self.line = self.line, unknown.line
        found = self.make(unknown.source, kind)
        self.line = line
        return found

    def within(self, value: str) -> list[Unknown]:
        """Unknown parts of a value."""
        return [] if value.isascii() else [self.entries[ord(c) - _FIRST] for c in _UNKNOWN.findall(value)]

    def is_unset(self, value: str) -> bool:
        """Whether a value has nothing but variables that are not set."""
        found = self.within(value)
        return len(found) == len(value) and all(one.kind in ("unset", "gone") for one in found)

    def known(self, value: str) -> str:
        """Return a value whose content decides something, with variables that are not set left out.

        Raises
        ------
        Undetermined
            A part is unknown otherwise.
        """
        if value.isascii():
            return value
        for one in self.within(value):
            if one.kind not in ("unset", "gone"):
                raise Undetermined(one)
            if one.kind == "unset":
                self.inspected.setdefault(one.source, one.line)
        return _UNKNOWN.sub("", value)

    def without_unset(self, value: str) -> str:
        """Return a value with variables that are not set left out."""
        return self._rewritten(value, lambda c, one: "" if one.kind in ("unset", "gone") else c)

    def without_gone(self, value: str) -> str:
        """Return a value without the memory of variables that left no word."""
        return self._rewritten(value, lambda c, one: "" if one.kind == "gone" else c)

    def shown(self, value: str) -> str:
        """Return a value with its unknown parts as the script writes them."""
        return self._rewritten(value, lambda _, one: "" if one.kind == "gone" else one.source)

    def recast(self, value: str, old: Kind, new: Kind) -> str:
        """Return a value in which unknown parts of one kind are of another."""
        return self._rewritten(value, lambda c, one: self.again(one, new) if one.kind == old else c)

    def _rewritten(self, value: str, change: Callable[[str, Unknown], str]) -> str:
        if value.isascii():
            return value
        return _UNKNOWN.sub(lambda found: change(found[0], self.entries[ord(found[0]) - _FIRST]), value)


def has_unknown(value: str) -> bool:
    """Whether a part of a value is unknown."""
    return not value.isascii() and _UNKNOWN.search(value) is not None


# ------------------------------------------------------------------ patterns

Pattern = list[tuple[str, bool]]
"""Characters, each with whether it is literal."""


def matcher(pattern: Pattern) -> list[Callable[[str], bool] | None]:
    """Return a test for each character of a pattern; None stands for ``*``."""
    found: list[Callable[[str], bool] | None] = []
    i = 0
    while i < len(pattern):
        char, literal = pattern[i]
        i += 1
        if literal or char not in "*?[":
            found.append(char.__eq__)
        elif char == "*":
            if not found or found[-1] is not None:
                found.append(None)
        elif char == "?":
            found.append(lambda _: True)
        else:
            end = i + (i < len(pattern) and pattern[i] in (("!", False), ("^", False)))
            end += 1
            while end < len(pattern) and pattern[end] != ("]", False):
                if pattern[end] == ("[", False) and pattern[end + 1 : end + 2] in ([(":", False)], [(":", True)]):
                    close = "".join(c for c, _ in pattern).find(":]", end + 2)
                    end = close + 1 if close > 0 else end
                end += 1
            if end >= len(pattern):
                found.append("[".__eq__)
            else:
                found.append(_char_class(pattern[i:end]))
                i = end + 1
    return found


_CLASSES: dict[str, Callable[[str], bool]] = {
    "digit": lambda c: c in "0123456789",
    "alpha": str.isalpha,
    "alnum": str.isalnum,
    "upper": str.isupper,
    "lower": str.islower,
    "space": str.isspace,
    "blank": lambda c: c in " \t",
    "punct": lambda c: c.isprintable() and not c.isalnum() and not c.isspace(),
    "xdigit": lambda c: c in "0123456789abcdefABCDEF",
}


def _char_class(pattern: Pattern) -> Callable[[str], bool]:
    negated = pattern[0] in (("!", False), ("^", False))
    text = "".join(c for c, _ in pattern[negated:])
    tests: list[Callable[[str], bool]] = []
    i = 0
    while i < len(text):
        close = text.find(":]", i)
        if text.startswith("[:", i) and close > 0 and text[i + 2 : close] in _CLASSES:
            tests.append(_CLASSES[text[i + 2 : close]])
            i = close + 2
        elif text[i + 1 : i + 2] == "-" and i + 2 < len(text):
            tests.append(lambda c, low=text[i], high=text[i + 2]: low <= c <= high)  # type: ignore[misc]
            i += 3
        else:
            tests.append(text[i].__eq__)
            i += 1
    return lambda c: any(test(c) for test in tests) != negated


def matches(pattern: Pattern, text: str, unknowns: Unknowns) -> bool:
    """Whether a whole text matches, in time of at most the product of both lengths."""
    tests = matcher(pattern)
    unknowns.charge(len(text) * len(tests) // 50)
    star, mark = -1, 0
    i = j = 0
    while i < len(text):
        test = tests[j] if j < len(tests) else 0
        if test is None:
            star, mark = j, i
            j += 1
        elif test != 0 and test(text[i]):  # type: ignore[operator]
            i += 1
            j += 1
        elif star >= 0:
            mark += 1
            i, j = mark, star + 1
        else:
            return False
    return all(test is None for test in tests[j:])


def find(pattern: Pattern, text: str, start: int, unknowns: Unknowns) -> int | None:
    """Return where the longest match that starts at a position ends."""
    tests = matcher(pattern)
    unknowns.charge((len(text) - start) * len(tests) // 50)
    reached = {start}
    for test in tests:
        if test is None:
            reached = set(range(min(reached), len(text) + 1))
        else:
            reached = {i + 1 for i in reached if i < len(text) and test(text[i])}
        if not reached:
            return None
    return max(reached)


def trimmed(pattern: Pattern, text: str, operator: str, unknowns: Unknowns) -> str:
    """Return text without the part at its start (``#``) or end (``%``) that matches; doubled: the longest."""
    ends = range(len(text) + 1)
    longest = len(operator) == 2
    if operator[0] == "#":
        for end in reversed(ends) if longest else ends:
            if matches(pattern, text[:end], unknowns):
                return text[end:]
    else:
        for start in ends if longest else reversed(ends):
            if matches(pattern, text[start:], unknowns):
                return text[:start]
    return text


def replaced(pattern: Pattern, text: str, new: str, operator: str, unknowns: Unknowns) -> str:
    """Return text with the first match replaced; ``//``: all, ``/#`` and ``/%``: at the start or end only."""
    if operator == "/%":
        for start in range(len(text) + 1):
            if matches(pattern, text[start:], unknowns):
                return text[:start] + new
        return text
    parts: list[str] = []
    at, length = 0, 0
    while at <= len(text) and (pattern or operator == "/#"):
        end = find(pattern, text, at, unknowns)
        if end is not None and (end > at or (at == 0 and not text)):
            parts.append(new)
            length += len(new)
            unknowns.check_length(length)
            at = end
            if operator == "//" and at < len(text):
                continue
            break
        if operator == "/#" or at >= len(text):
            break
        parts.append(text[at])
        at += 1
    return "".join(parts) + text[at:]
