"""The exception tree.

::

    PipeloomError
    ├── InputError        what the user gave is wrong: entity, value, bound, remedy
    ├── InfeasibleError   no schedule or packing can satisfy the stated limits
    │   └── NothingFoundError   none was found, which does not prove that there is none
    ├── PlanError         an execution plan is incomplete or would deadlock
    ├── PlannerError      the planner service is late, dead or answered nonsense
    └── ExecutionError    a rank could not run its plan

A command-line program turns each of them into one line and exit code 2.
"""

from __future__ import annotations

import re
import unicodedata

from pipeloom.limits import MAX_COUNT

_PLAIN = re.compile(r"[^ -~]+")
_LONG_WORD = re.compile(r"\S{300,}")
_LONGEST_LINE = 2000


class PipeloomError(Exception):
    """Root of every error that Pipeloom raises on purpose."""


class InputError(PipeloomError, ValueError):
    """A value given by the user is outside its bound.

    Parameters
    ----------
    entity : str
        Path of the value, e.g. ``tasks.duration_s[17]``.
    problem : str
        The value and the bound it breaks, e.g. ``-0.2 is negative``.
    remedy : str
        What to do about it; may be empty where the problem says it all.
    """

    def __init__(self, entity: str, problem: str, remedy: str = "") -> None:
        self.entity = entity
        self.problem = problem
        self.remedy = remedy
        super().__init__(one_line(f"{entity}: {problem}" + (f"; {remedy}" if remedy else "")))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """Pickle the three parts: ranks send errors to one another."""
        return type(self), (self.entity, self.problem, self.remedy)


def one_line(text: str) -> str:
    """One line, whatever a value or another library's message brings, and no word so long that it hides the rest."""
    line = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    return _LONG_WORD.sub(lambda found: f"{found[0][:200]}...{found[0][-60:]}", line)


def printable_line(text: str) -> str:
    """One line of characters that a terminal shows, neither too long to be read nor able to change its colors."""
    line = one_line(" ".join(text.split()))
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE - 404]} ... {line[-399:]}"
    return visible_line(line)


def visible(text: str, *, keep: str = "\n") -> str:
    r"""Return the text with every character that a terminal does not show replaced by its escape, as ``\x1b``.

    Names and messages come from files that others wrote. A control character in one of them would move the cursor or
    change colors, and a bidirectional override would show the text in another order. Control and format characters,
    line and paragraph separators and lone surrogates are escaped. Spaces of every width stay, and so do the characters
    of ``keep``.
    """
    return _PLAIN.sub(lambda found: "".join(_shown(c, keep) for c in found[0]), text)


def visible_line(text: str) -> str:
    """Return the text as one line: like `visible`, with line breaks escaped too."""
    return visible(text, keep="")


def _shown(character: str, keep: str) -> str:
    if character in keep or character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def check_positive(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is positive and finite."""
    if not 0 < value < float("inf"):
        raise InputError(entity, f"{value} is not positive and finite")


def check_not_negative(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is finite and at least 0."""
    if not 0 <= value < float("inf"):
        raise InputError(entity, f"{value} is not finite and at least 0")


def check_limit(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is at least 0; infinite is no limit."""
    if not value >= 0:
        raise InputError(entity, f"{value} is not at least 0")


def check_count(entity: str, value: int) -> None:
    """Raise `InputError` unless a count is from 1 to `MAX_COUNT`."""
    if not 1 <= value <= MAX_COUNT:
        raise InputError(entity, f"{value} is below 1" if value < 1 else f"{value} is above {MAX_COUNT}")


def check_share(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is a part of a whole."""
    if not 0 <= value <= 1:
        raise InputError(entity, f"{value} is no part of a whole", "give a number from 0 to 1")


def check_ratio(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is at least 1."""
    if not 1 <= value < float("inf"):
        raise InputError(entity, f"{value} is not finite and at least 1", "give how many times as much, 1 or more")


class InfeasibleError(PipeloomError):
    """No answer exists within the stated limits; the message names what cannot fit, in bytes or seconds."""

    verdict = "infeasible"
    """In a word, for whoever puts a file's name before the message."""


class NothingFoundError(InfeasibleError):
    """No answer was found within the stated limits, and it is not proved that there is none; says what was tried."""

    verdict = "nothing found"


class PlanError(PipeloomError):
    """An execution plan is incomplete, inconsistent, or would deadlock."""


class PlannerError(PipeloomError):
    """The planner service did not deliver a usable plan."""


class ExecutionError(PipeloomError):
    """A rank could not run its plan."""

    comes_again = False
    """A rank has refused what it was given, and would refuse it again; a rank that is lost need not be lost again."""
