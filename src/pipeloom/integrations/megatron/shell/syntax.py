"""Syntax tree of a bash script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters; quoted ones are neither split nor matched as a pattern."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """``$name`` or ``${name[index]operator operands}``; the prefix is ``#`` (length), ``!`` (indirection) or empty."""

    name: str
    source: str
    quoted: bool
    index: Word | None = None
    prefix: str = ""
    operator: str = ""
    operands: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Substitution:
    """``$(commands)``."""

    body: Sequence
    source: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``$((expression))``."""

    expression: Word
    source: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Opaque:
    """A part whose value only a running shell knows, such as ``~`` or ``<(command)``."""

    source: str
    quoted: bool = True


@dataclass(slots=True, eq=False)
class Document:
    """The body of a here-document, which the parser reads after the command; a literal one has no expansions."""

    literal: bool
    text: str = ""


Part: TypeAlias = Text | Parameter | Substitution | Arithmetic | Opaque | Document
Word: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """``name=value``, ``name[index]=value``, ``name+=value`` or ``name=(items)``."""

    name: str
    append: bool
    index: Word | None = None
    value: Word = ()
    items: tuple[tuple[Word | None, Word], ...] | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its arguments; the arguments of a declaration such as ``export`` may be assignments.

    ``stdin`` is the text of a here-document or here-string.
    """

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    stdin: Word | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Command, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines joined by ``&&`` and ``||``; each has the operator in front of it."""

    line: int
    pipelines: tuple[tuple[str, Pipeline], ...]


Sequence: TypeAlias = tuple[AndOr, ...]


@dataclass(frozen=True, slots=True)
class If:
    """Each condition with its body; the condition of ``else`` is empty."""

    branches: tuple[tuple[Sequence, Sequence], ...]


@dataclass(frozen=True, slots=True)
class While:
    condition: Sequence
    body: Sequence
    until: bool


@dataclass(frozen=True, slots=True)
class For:
    """``for name in words``; without ``in`` it runs over the positional parameters."""

    name: str
    words: tuple[Word, ...] | None
    body: Sequence


@dataclass(frozen=True, slots=True)
class Count:
    """``for ((start; condition; step))``."""

    line: int
    header: tuple[Word, Word, Word]
    body: Sequence


@dataclass(frozen=True, slots=True)
class Case:
    """Each clause has its patterns, its body, and what ends it: ``;;``, ``;&`` or ``;;&``."""

    line: int
    subject: Word
    clauses: tuple[tuple[tuple[Word, ...], Sequence, str], ...]


@dataclass(frozen=True, slots=True)
class Group:
    body: Sequence
    subshell: bool


@dataclass(frozen=True, slots=True)
class Redirection:
    """A command whose standard output goes elsewhere."""

    command: Command


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Command


@dataclass(frozen=True, slots=True)
class Condition:
    """A node of a condition: an operator over other nodes, or a test of words."""

    operator: str
    nodes: tuple[Condition, ...] = ()
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Test:
    """``((expression))`` or ``[[ condition ]]``."""

    line: int
    tested: Word | Condition


Command: TypeAlias = Simple | If | While | For | Count | Case | Group | Redirection | Function | Test
