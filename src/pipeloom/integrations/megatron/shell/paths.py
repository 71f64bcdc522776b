"""Follow a script along every way that it may take, and list the programs that it starts on each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.shell.interpreter import Choices, Interpreter, Jump
from pipeloom.integrations.megatron.shell.parser import Parser, SyntaxProblem
from pipeloom.integrations.megatron.shell.syntax import AndOr
from pipeloom.integrations.megatron.shell.values import LoopLimit, Refusal, Undetermined, Unknown, Unknowns, has_unknown

MOST_PATHS = 128
MOST_RESTARTS = 50
"""A loop that has started so many programs restarts a training for ever."""
REMEDY = "give the final argument list in a text file"
_CRLF = re.compile(r"^[^#\n]*\\\r$", re.MULTILINE)
"""A line outside of comments that is to be continued, in a file with the line ends of Windows."""


@dataclass(frozen=True, slots=True)
class ProgramWord:
    """An argument of a program, in which unknown parts stand as the script writes them.

    ``unknown`` is what is unknown of it. ``gone`` is a variable behind it that is not set, and leaves no word.
    """

    text: str
    unknown: Unknown | None = None
    gone: Unknown | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A program that the script starts."""

    line: int
    words: tuple[ProgramWord, ...]


@dataclass(frozen=True, slots=True)
class Path:
    """One way through a script.

    ``decisions`` says what was decided without being known, and whether it was taken as true. ``unset`` has the
    variables that were read as empty since the script does not set them, with the line.
    """

    decisions: dict[Unknown, bool]
    started: list[Program]
    unset: dict[str, int]
    ended: int = 0
    """Line of the ``exit`` that ended the script; 0 where none did."""


def follow(source: str, text: str, succeeds: Callable[[Program], bool]) -> list[Path]:
    """Return every way through a script; ``succeeds`` says of a program whether it is assumed to succeed.

    Raises `InputError` if the script cannot be parsed, does what is not evaluated, or does too much.
    """
    _check_text(source, text)
    script = Parser(text).script()
    found: list[Path] = []
    prefix: tuple[bool, ...] | None = ()
    steps = 0
    while prefix is not None:
        if len(found) == MOST_PATHS:
            names = ", ".join(f"{one.source} (line {one.line})" for one in list(found[0].decisions)[:3])
            raise InputError(source, f"depends on too much that is unknown: {names}", REMEDY)
        unknowns, choices = Unknowns(steps=steps), Choices(prefix)
        script, items = itertools.tee(script)
        with _input_errors(source, unknowns):
            found.append(_follow(source, items, unknowns, choices, succeeds))
        steps = unknowns.steps
        prefix = choices.following()
    return found


def list_words(source: str, text: str) -> tuple[ProgramWord, ...]:
    """Return the words of an argument list, in which brackets and bars are characters."""
    _check_text(source, text)
    unknowns = Unknowns()
    shell = Interpreter(source, unknowns, Choices(), lambda _line, _words: False)
    parser = Parser(text)
    parser.ends = " \t\n"
    found: list[ProgramWord] = []
    with _input_errors(source, unknowns):
        parser.skip_lines()
        while parser.char:
            unknowns.go_to(parser.line())
            word = parser.word()
            found += [_word(one, unknowns) for one in shell.fields([word])]
            parser.skip_lines()
    return tuple(found)


def _check_text(source: str, text: str) -> None:
    if "\0" in text or has_unknown(text):
        raise InputError(source, "is not text", REMEDY)
    broken = _CRLF.search(text)
    if broken is not None:
        raise InputError(
            f"{source}: line {text.count(chr(10), 0, broken.end()) + 1}",
            "has a carriage return after its backslash (CRLF line ends), so that bash ends the command here",
            "convert the file with dos2unix",
        )


@contextmanager
def _input_errors(source: str, unknowns: Unknowns) -> Iterator[None]:
    """Turn what cannot be evaluated into an error that names the line."""
    line = 0
    try:
        yield
        return
    except SyntaxProblem as error:
        line, problem = error.line, f"cannot be read: {error.problem}"
    except Refusal as error:
        line, problem = error.line, error.problem
    except Undetermined as error:
        problem = f"cannot be read, since {error.unknown.reason}"
    except RecursionError:
        problem = "cannot be read: it is nested too deeply"
    raise InputError(f"{source}: line {line or unknowns.line}", problem, REMEDY)


def _follow(
    source: str, items: Iterable[AndOr], unknowns: Unknowns, choices: Choices, succeeds: Callable[[Program], bool]
) -> Path:
    started: list[Program] = []
    trainings = 0

    def record(line: int, arguments: list[str]) -> bool:
        nonlocal trainings
        started.append(Program(line, tuple(_word(word, unknowns) for word in arguments)))
        if not succeeds(started[-1]):
            return False
        trainings += 1
        if trainings > MOST_RESTARTS:
            raise LoopLimit(line, f"more than {MOST_RESTARTS} trainings are started")
        return True

    ended = 0
    try:
        Interpreter(source, unknowns, choices, record).run(items)
    except Jump:
        ended = unknowns.line
    except LoopLimit:
        if not started:
            raise
    return Path(choices.made, started, dict(unknowns.inspected), ended)


def _word(word: str, unknowns: Unknowns) -> ProgramWord:
    gone: Unknown | None = None
    unknown: Unknown | None = None
    for one in unknowns.within(word):
        if one.kind == "gone":
            gone = one
        elif unknown is None or one.kind == "list":
            unknown = one
    return ProgramWord(unknowns.shown(word), unknown, gone)
