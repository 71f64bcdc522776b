"""Read the words of a bash script: quotes, expansions, line continuations and comments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from pipeloom.integrations.megatron.shell.syntax import (
    Arithmetic,
    Opaque,
    Parameter,
    Part,
    Sequence,
    Substitution,
    Text,
    Word,
)

MOST_DEPTH = 40
"""Most levels of nested expansions and commands."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SPECIAL = re.compile(r"[@*#?$!-]|\d")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII)
_OPERATOR = re.compile(r":[-=?+]|##|%%|//|/[#%]|\^\^|,,|[-=?+#%/^,@:]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", re.DOTALL)
ENDS = " \t\n;&|<>()"
"""Characters that end a word outside of quotes."""


class SyntaxProblem(Exception):
    """The script cannot be parsed at some position."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position, self.problem = position, problem


def unescape(text: str) -> str:
    """Return text with the escapes of ``$'...'`` and ``printf`` resolved."""

    def one(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xu" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)
        return _ESCAPES.get(code, code if code in "\\'\"?" else f"\\{code}")

    return _ESCAPE.sub(one, text)


class WordReader(ABC):
    """Reads words at a position of a text."""

    def __init__(self, text: str, ends: str = ENDS) -> None:
        self.text, self.ends = text, ends
        self.at = 0
        self.depth = 0

    @abstractmethod
    def commands(self, closing: str) -> Sequence:
        """Read commands up to a closing character."""

    def fail(self, problem: str, position: int | None = None) -> SyntaxProblem:
        """Make an error at a position, or here."""
        return SyntaxProblem(self.at if position is None else position, problem)

    def starts(self, text: str) -> bool:
        """Whether a text stands here."""
        return self.text.startswith(text, self.at)

    @property
    def char(self) -> str:
        """The character here; empty at the end."""
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while True:
            if self.starts("\\\n"):
                self.at += 2
            elif self.char and self.char in " \t\r":
                self.at += 1
            elif self.char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def word(self) -> Word:
        """Read one word, which may be empty."""
        parts: list[Part] = []
        start = self.at
        while self.char:
            if self.at == start and self.char == "~":
                parts.append(Opaque("~", quoted=False))
                self.at += 1
            elif self.at == start and self.text[self.at : self.at + 2] in ("<(", ">(") and "(" in self.ends:
                self.at += 2
                self.commands(")")
                parts.append(Opaque(self.text[start : self.at]))
            elif self.char == "\r" and self.text[self.at + 1 : self.at + 2] in ("\n", ""):
                self.at += 1  # a file of Windows
            elif self.char in self.ends:
                break
            elif not self.part(parts):
                parts.append(Text(self.char, quoted=False))
                self.at += 1
        return _joined(parts)

    def part(self, parts: list[Part]) -> bool:
        """Read quotes, an escape or an expansion, where one stands here."""
        char = self.char
        if char == "\\":
            if self.text[self.at + 1 : self.at + 2] != "\n":
                parts.append(Text(self.text[self.at + 1 : self.at + 2], quoted=True))
            self.at += 2
        elif char == "'":
            parts.append(Text(self.single(), quoted=True))
        elif self.starts("$'"):
            self.at += 1
            parts.append(Text(self.ansi(), quoted=True))
        elif char == '"' or self.starts('$"'):
            self.at += char == "$"
            self.double(parts)
        elif char in "$`":
            parts.append(self.dollar(quoted=False))
        else:
            return False
        return True

    def single(self) -> str:
        """Read ``'...'``."""
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self.fail("a quote ' is not closed")
        text = self.text[self.at + 1 : end]
        self.at = end + 1
        return text

    def ansi(self) -> str:
        """Read ``'...'`` with escapes."""
        found = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if found is None:
            raise self.fail("a quote $' is not closed")
        self.at = found.end()
        return unescape(found[1])

    def double(self, parts: list[Part]) -> None:
        """Read ``"..."``."""
        start = self.at
        self.at += 1
        before = len(parts)
        while self.char != '"':
            if not self.char:
                raise self.fail('a quote " is not closed', start)
            self.inside(parts)
        self.at += 1
        if len(parts) == before:
            parts.append(Text("", quoted=True))

    def inside(self, parts: list[Part]) -> None:
        """Read one part within double quotes or a here-document."""
        following = self.text[self.at + 1 : self.at + 2]
        if self.char == "\\" and following and following in '$`"\\\n':
            if following != "\n":
                parts.append(Text(following, quoted=True))
            self.at += 2
        elif self.char in "$`":
            parts.append(self.dollar(quoted=True))
        else:
            parts.append(Text(self.char, quoted=True))
            self.at += 1

    def document(self) -> Word:
        """Read the whole text as the body of a here-document."""
        parts: list[Part] = []
        while self.char:
            self.inside(parts)
        return _joined(parts)

    def dollar(self, quoted: bool) -> Part:
        """Read an expansion that starts with ``$`` or a backquote."""
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise self.fail(f"expansions are nested more than {MOST_DEPTH} deep")
        start = self.at
        try:
            return self._dollar(start, quoted)
        finally:
            self.depth -= 1

    def _dollar(self, start: int, quoted: bool) -> Part:
        if self.char == "`":
            return self.backquoted(quoted)
        if self.starts("$(("):
            self.at += 3
            expression = self.arithmetic("))")
            if expression is not None:
                return Arithmetic(expression, self.text[start : self.at], quoted)
            self.at = start
        if self.starts("$("):
            self.at += 2
            body = self.commands(")")
            return Substitution(body, self.text[start : self.at], quoted)
        if self.starts("$["):
            raise self.fail("$[ ] is not read; write $(( ))")
        if self.starts("${"):
            self.at += 2
            return self.braced(start, quoted)
        found = _NAME.match(self.text, self.at + 1) or _SPECIAL.match(self.text, self.at + 1)
        if found is None:
            self.at += 1
            return Text("$", quoted)
        self.at = found.end()
        return Parameter(found[0], found.string[start : self.at], quoted)

    def backquoted(self, quoted: bool) -> Part:
        """Read commands in backquotes."""
        found = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.at)
        if found is None:
            raise self.fail("a quote ` is not closed")
        inner = type(self)(re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", found[1]))
        inner.depth = self.depth
        try:
            body = inner.commands("")
        except SyntaxProblem as error:
            raise self.fail(error.problem) from None
        self.at = found.end()
        return Substitution(body, found[0], quoted)

    def arithmetic(self, closing: str) -> Word | None:
        """Read an expression up to ``))``, ``;``, ``:`` or ``}``; None where another bracket ends it."""
        parts: list[Part] = []
        depth = 0
        while True:
            char = self.char
            if not char:
                raise self.fail(f"{closing} is missing")
            if depth == 0 and self.starts(closing):
                self.at += len(closing)
                return _joined(parts)
            if depth == 0 and char in ")}":
                return None
            if char == '"':
                self.at += 1
                continue
            depth += (char in "([{") - (char in ")]}")
            # A ternary within a substring has its own colon.
            depth += (closing == ":" and char == "?") - (closing == ":" and char == ":")
            if char in "$`":
                parts.append(self.dollar(quoted=True))
                continue
            if char == "\\" and self.starts("\\\n"):
                self.at += 2
                continue
            parts.append(Text(char, quoted=True))
            self.at += 1

    def braced(self, start: int, quoted: bool) -> Parameter:
        """Read the rest of ``${...}``."""
        prefix = ""
        if self.char and self.char in "#!" and re.compile(r"[A-Za-z_0-9@*]", re.ASCII).match(self.text, self.at + 1):
            prefix = self.char
            self.at += 1
        name = _PARAMETER.match(self.text, self.at)
        if name is None:
            raise self.fail(f"{self.text[start : start + 20]} is not read", start)
        self.at = name.end()
        index: Word | None = None
        if self.char == "[":
            self.at += 1
            index = self.operand("]", quoted=False)
            self.at += 1
        operator, operands = "", []
        found = _OPERATOR.match(self.text, self.at)
        if found is not None:
            operator = found[0]
            self.at = found.end()
            if operator == ":":
                operands = self.offsets()
            else:
                operands = [self.operand("/}" if operator.startswith("/") else "}", quoted)]
                if operator.startswith("/") and self.char == "/":
                    self.at += 1
                    operands.append(self.operand("}", quoted))
        if self.char != "}":
            raise self.fail("${ is not closed", start)
        self.at += 1
        return Parameter(name[0], self.text[start : self.at], quoted, index, prefix, operator, tuple(operands))

    def offsets(self) -> list[Word]:
        """Read ``offset`` or ``offset:length``."""
        start = self.at
        offset = self.arithmetic(":")
        if offset is None:
            self.at = start
            offset = self.arithmetic("}")
            self.at -= 1
            return [offset or ()]
        length = self.arithmetic("}")
        self.at -= 1
        return [offset, length or ()]

    def operand(self, stops: str, quoted: bool) -> Word:
        """Read a word within braces, up to one of some characters."""
        parts: list[Part] = []
        start = self.at
        while not (self.char and self.char in stops):
            if not self.char:
                raise self.fail(f"{stops[-1]} is missing", start)
            if quoted and self.char == "'":
                # Within double quotes, single quotes are characters, but for patterns, which have them rarely.
                parts.append(Text("'", quoted=True))
                self.at += 1
            elif quoted and self.char == "$":
                parts.append(self.dollar(quoted=True))
            elif quoted and self.char == "\\" and self.text[self.at + 1 : self.at + 2] not in tuple('$`"\\\n}/'):
                parts.append(Text("\\", quoted=True))
                self.at += 1
            elif not self.part(parts):
                parts.append(Text(self.char, quoted=False))
                self.at += 1
        return _joined(parts)


def _joined(parts: list[Part]) -> Word:
    """Merge neighboring literals."""
    found: list[Part] = []
    run: list[str] = []
    quoted = False

    def close() -> None:
        if run:
            found.append(Text("".join(run), quoted))
            run.clear()

    for part in parts:
        if not isinstance(part, Text):
            close()
            found.append(part)
            continue
        if run and part.quoted != quoted:
            close()
        quoted = part.quoted
        run.append(part.text)
    close()
    return tuple(found)
