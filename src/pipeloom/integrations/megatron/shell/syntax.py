"""Syntax tree of a bash script."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Literal characters; quoted ones are neither split nor matched as a pattern."""

    text: str
    quoted: bool


class Parameter(msgspec.Struct, frozen=True):
    """``$name`` or ``${name[index]operator operands}``; the prefix is ``#`` (length), ``!`` (indirection) or empty."""

    name: str
    source: str
    quoted: bool
    index: Word | None = None
    prefix: str = ""
    operator: str = ""
    operands: tuple[Word, ...] = ()


class Substitution(msgspec.Struct, frozen=True):
    """``$(commands)``."""

    body: Sequence
    source: str
    quoted: bool


class Arithmetic(msgspec.Struct, frozen=True):
    """``$((expression))``."""

    expression: Word
    source: str
    quoted: bool


class Opaque(msgspec.Struct, frozen=True):
    """A part whose value only a running shell knows, such as ``~`` or ``<(command)``."""

    source: str
    quoted: bool = True


class Document(msgspec.Struct, eq=False):
    """The body of a here-document, which the parser reads after the command; a literal one has no expansions."""

    literal: bool
    text: str = ""


Part: TypeAlias = Text | Parameter | Substitution | Arithmetic | Opaque | Document
Word: TypeAlias = tuple[Part, ...]


class Assignment(msgspec.Struct, frozen=True):
    """``name=value``, ``name[index]=value``, ``name+=value`` or ``name=(items)``."""

    name: str
    append: bool
    index: Word | None = None
    value: Word = ()
    items: tuple[tuple[Word | None, Word], ...] | None = None


class Simple(msgspec.Struct, frozen=True):
    """A command with its arguments; the arguments of a declaration such as ``export`` may be assignments.

    ``stdin`` is the text of a here-document or here-string.
    """

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    stdin: Word | None = None


class Pipeline(msgspec.Struct, frozen=True):
    commands: tuple[Command, ...]
    negated: bool


class AndOr(msgspec.Struct, frozen=True):
    """Pipelines joined by ``&&`` and ``||``; each has the operator in front of it."""

    line: int
    pipelines: tuple[tuple[str, Pipeline], ...]


Sequence: TypeAlias = tuple[AndOr, ...]


class If(msgspec.Struct, frozen=True):
    """Each condition with its body; the condition of ``else`` is empty."""

    branches: tuple[tuple[Sequence, Sequence], ...]


class While(msgspec.Struct, frozen=True):
    condition: Sequence
    body: Sequence
    until: bool


class For(msgspec.Struct, frozen=True):
    """``for name in words``; without ``in`` it runs over the positional parameters."""

    name: str
    words: tuple[Word, ...] | None
    body: Sequence


class Count(msgspec.Struct, frozen=True):
    """``for ((start; condition; step))``."""

    line: int
    header: tuple[Word, Word, Word]
    body: Sequence


class Case(msgspec.Struct, frozen=True):
    """Each clause has its patterns, its body, and what ends it: ``;;``, ``;&`` or ``;;&``."""

    line: int
    subject: Word
    clauses: tuple[tuple[tuple[Word, ...], Sequence, str], ...]


class Group(msgspec.Struct, frozen=True):
    body: Sequence
    subshell: bool


class Redirection(msgspec.Struct, frozen=True):
    """A command whose standard output goes elsewhere."""

    command: Command


class Function(msgspec.Struct, frozen=True):
    name: str
    body: Command


class Condition(msgspec.Struct, frozen=True):
    """A node of a condition: an operator over other nodes, or a test of words."""

    operator: str
    nodes: tuple[Condition, ...] = ()
    words: tuple[Word, ...] = ()


class Test(msgspec.Struct, frozen=True):
    """``((expression))`` or ``[[ condition ]]``."""

    line: int
    tested: Word | Condition


Command: TypeAlias = Simple | If | While | For | Count | Case | Group | Redirection | Function | Test
