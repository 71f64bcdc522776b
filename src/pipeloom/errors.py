"""The exception tree.

::

    PipeloomError
    ├── InputError        an input is wrong: entity, value, bound, remedy
    ├── InfeasibleError   no schedule or packing satisfies the configured limits
    │   └── NothingFoundError   none was found, but infeasibility is not proven
    ├── PlanError         an execution plan is incomplete or would deadlock
    ├── PlannerError      the planner service is late, has ended or sent an invalid answer
    └── ExecutionError    a rank could not run its plan

Command-line programs report each of them as one line and exit with code 2.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

from pipeloom.limits import MAX_COUNT

_PLAIN = re.compile(r"[^ -~]+")
_LONG_WORD = re.compile(r"\S{300,}")
_LONGEST_LINE = 2000


class PipeloomError(Exception):
    """Base class of every error that Pipeloom raises on purpose."""


class InputError(PipeloomError, ValueError):
    """A value provided by the user is outside its bound.

    Parameters
    ----------
    entity : str
        Path of the value, e.g. ``tasks.duration_s[17]``.
    problem : str
        The value and the bound it breaks, e.g. ``-0.2 is negative``.
    remedy : str
        How to fix it. Empty if the problem makes it obvious.
    """

    def __init__(self, entity: str, problem: str, remedy: str = "") -> None:
        self.entity = entity
        self.problem = problem
        self.remedy = remedy
        super().__init__(one_line(f"{entity}: {problem}" + (f"; {remedy}" if remedy else "")))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """Pickle the three parts, because ranks send errors to one another."""
        return type(self), (self.entity, self.problem, self.remedy)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix the entity of input errors with the place that has it, such as the name of a file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error.entity}", error.problem, error.remedy) from error


def one_line(text: str) -> str:
    """Join the lines of a text, and shorten words that would hide the rest of the message."""
    line = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    return _LONG_WORD.sub(lambda found: f"{found[0][:200]}...{found[0][-60:]}", line)


def printable_line(text: str) -> str:
    """Return one printable line of limited length that cannot change a terminal's colors."""
    line = one_line(" ".join(text.split()))
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE - 404]} ... {line[-399:]}"
    return visible_line(line)


def visible(text: str, *, keep: str = "\n") -> str:
    r"""Replace every character that a terminal does not show by its escape, such as ``\x1b``.

    Names and messages may come from files of other people. A control character in one of them could move the cursor or
    change colors, and a bidirectional override could reorder the text. Control and format characters, line and
    paragraph separators and lone surrogates are escaped. Spaces of every width and the characters in ``keep`` are not.
    """
    return _PLAIN.sub(lambda found: "".join(_shown(c, keep) for c in found[0]), text)


def visible_line(text: str) -> str:
    """Return the text as one line: like `visible`, but line breaks are escaped too."""
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
    """Raise `InputError` unless the value is at least 0. Infinity means no limit."""
    if not value >= 0:
        raise InputError(entity, f"{value} is not at least 0")


def check_count(entity: str, value: int) -> None:
    """Raise `InputError` unless a count is from 1 to `MAX_COUNT`."""
    if not 1 <= value <= MAX_COUNT:
        raise InputError(entity, f"{value} is below 1" if value < 1 else f"{value} is above {MAX_COUNT}")


def check_seed(entity: str, value: object, most: int | None = None) -> None:
    """Raise `InputError` unless a seed is an integer from 0 to ``most``, or of at least 0 without ``most``."""
    if not isinstance(value, Integral) or value < 0:
        raise InputError(entity, f"{value!r} is not an integer of at least 0")
    if most is not None and int(value) > most:
        raise InputError(entity, f"{value} is above {most}")


def check_share(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is from 0 to 1."""
    if not 0 <= value <= 1:
        raise InputError(entity, f"{value} is not from 0 to 1", "give a number from 0 to 1")


def check_ratio(entity: str, value: float) -> None:
    """Raise `InputError` unless the value is at least 1."""
    if not 1 <= value < float("inf"):
        raise InputError(entity, f"{value} is not finite and at least 1", "give a ratio of at least 1")


class InfeasibleError(PipeloomError):
    """No answer exists within the configured limits. The message names what does not fit, in bytes or seconds."""

    verdict = "infeasible"
    """Short form of the error for messages that begin with a file name."""


class NothingFoundError(InfeasibleError):
    """No answer was found within the configured limits, but infeasibility is not proven. The message says what was
    tried.
    """

    verdict = "nothing found"


class PlanError(PipeloomError):
    """An execution plan is incomplete, inconsistent, or would deadlock."""


class PlannerError(PipeloomError):
    """The planner service did not deliver a valid plan."""


class ExecutionError(PipeloomError):
    """A rank could not run its plan."""

    is_permanent = False
    """Whether running again would fail the same way because a rank rejected its input. A lost rank may not fail again.
    """
