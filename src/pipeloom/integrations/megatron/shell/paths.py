"""Follow a script along every way that it may take, and list the programs that it starts on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.shell.interpreter import Choices, Interpreter
from pipeloom.integrations.megatron.shell.parser import Parser
from pipeloom.integrations.megatron.shell.syntax import AndOr, Broken
from pipeloom.integrations.megatron.shell.values import (
    LoopLimit,
    Refusal,
    Undetermined,
    Unknown,
    Unknowns,
    WorkLimit,
    has_unknown,
)
from pipeloom.integrations.megatron.shell.words import SyntaxProblem

MOST_PATHS = 128
MOST_RESTARTS = 50
"""A loop that has started so many programs restarts a training for ever."""
REMEDY = "give the final argument list in a text file"


@dataclass(frozen=True, slots=True)
class StartedWord:
    """An argument of a program.

    Attributes
    ----------
    text : str
        The argument; unknown parts stand as the script writes them.
    unknown : Unknown or None
        What is unknown of it.
    gone : Unknown or None
        A variable that stands behind it, is not set, and leaves no word.
    """

    text: str
    unknown: Unknown | None = None
    gone: Unknown | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A program that the script starts."""

    line: int
    words: tuple[StartedWord, ...]


@dataclass(frozen=True, slots=True)
class Path:
    """One way through a script.

    Attributes
    ----------
    decisions : mapping
        What was decided without being known, and which way was taken.
    started : list of Started
    unset : mapping
        Variables that were read as empty since the script does not set them, with the line.
    ended : int
        Line of the ``exit`` that ended the script; 0 where none did.
    """

    decisions: dict[Unknown, int]
    started: list[Started]
    unset: dict[str, int]
    ended: int = 0


@dataclass(slots=True)
class _Replay:
    """An iterator's items, which can be read again."""

    rest: Iterator[AndOr | Broken]
    read: list[AndOr | Broken] = field(default_factory=list)

    def __iter__(self) -> Iterator[AndOr | Broken]:
        yield from self.read
        for item in self.rest:
            self.read.append(item)
            yield item


def follow(source: str, text: str, succeeds: Callable[[Started], bool]) -> list[Path]:
    """Return every way through a script.

    Parameters
    ----------
    source : str
        Name of the file.
    text : str
    succeeds : callable
        Which programs are assumed to succeed; of others it is unknown.

    Raises
    ------
    InputError
        The script cannot be parsed, does what is not evaluated, or does too much.
    """
    _check_text(source, text)
    script = _Replay(Parser(text).script())
    found: list[Path] = []
    prefix: tuple[int, ...] | None = ()
    steps = 0
    while prefix is not None:
        if len(found) == MOST_PATHS:
            names = ", ".join(f"{one.source} (line {one.line})" for one in list(found[0].decisions)[:3])
            raise InputError(source, f"depends on too much that is unknown: {names}", REMEDY)
        unknowns, choices = Unknowns(steps=steps), Choices(prefix)
        found.append(_follow(source, script, unknowns, choices, succeeds))
        steps = unknowns.steps
        prefix = _following(choices)
    return found


def _check_text(source: str, text: str) -> None:
    if "\0" in text or has_unknown(text):
        raise InputError(source, "is not text", REMEDY)


def list_words(source: str, text: str) -> tuple[StartedWord, ...]:
    """Return the words of an argument list, in which brackets and bars are characters."""
    unknowns = Unknowns()
    shell = Interpreter(source, unknowns, Choices(), lambda _line, _words: False)
    parser = Parser(text)
    parser.ends = " \t\n"
    found: list[StartedWord] = []
    try:
        _check_text(source, text)
        parser.skip_lines()
        while parser.char:
            unknowns.go_to(parser.line())
            word = parser.word()
            found += [_word(one, unknowns) for one in shell.fields([word])]
            parser.skip_lines()
    except SyntaxProblem as error:
        raise InputError(
            f"{source}: line {parser.line(error.position)}", f"cannot be read: {error.problem}", REMEDY
        ) from None
    except Refusal as error:
        raise InputError(f"{source}: line {unknowns.line}", error.problem, REMEDY) from None
    return tuple(found)


def _following(choices: Choices) -> tuple[int, ...] | None:
    """The next combination of decisions, depth first; None after the last."""
    made = choices.made
    for at in range(len(made) - 1, -1, -1):
        _, alternatives, taken = made[at]
        if taken + 1 < alternatives:
            return (*(each[2] for each in made[:at]), taken + 1)
    return None


def _follow(
    source: str,
    script: Iterable[AndOr | Broken],
    unknowns: Unknowns,
    choices: Choices,
    succeeds: Callable[[Started], bool],
) -> Path:
    started: list[Started] = []
    trainings: list[int] = []

    def record(line: int, arguments: list[str]) -> bool:
        started.append(Started(line, tuple(_word(word, unknowns) for word in arguments)))
        if not succeeds(started[-1]):
            return False
        trainings.append(line)
        if len(trainings) > MOST_RESTARTS:
            raise LoopLimit(line, f"more than {MOST_RESTARTS} trainings are started")
        return True

    ended = 0
    try:
        ended = Interpreter(source, unknowns, choices, record).run(script)
    except WorkLimit as error:
        if not isinstance(error, LoopLimit) or not started:
            raise InputError(f"{source}: line {error.line}", error.problem, REMEDY) from None
    except Refusal as error:
        raise InputError(f"{source}: line {error.line}", error.problem, REMEDY) from None
    except Undetermined as error:
        raise InputError(
            f"{source}: line {unknowns.line}", f"cannot be read, since {error.unknown.reason}", REMEDY
        ) from None
    except RecursionError:
        raise InputError(f"{source}: line {unknowns.line}", "cannot be read: it is nested too deeply", REMEDY) from None
    return Path({unknown: taken for unknown, _, taken in choices.made}, started, dict(unknowns.inspected), ended)


def _word(word: str, unknowns: Unknowns) -> StartedWord:
    if word.isascii():
        return StartedWord(word)
    gone: Unknown | None = None
    unknown: Unknown | None = None
    for one in unknowns.within(word):
        if one.kind == "gone":
            gone = one
        elif unknown is None or one.kind == "list":
            unknown = one
    return StartedWord(unknowns.shown(word), unknown, gone)
