"""Read the words of a bash script: quotes, expansions, line continuations and comments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from pipeloom.integrations.megatron.shell import syntax
from pipeloom.integrations.megatron.shell.syntax import Parameter, Part, Sequence, Text, Word

ENDS = " \t\n;&|<>()"
"""Characters that end a word outside of quotes."""
_SPACE = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`\]/}]+")
_SINGLE = re.compile(r"'([^']*)'")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_IN_QUOTES = re.compile(r'(?:[^$`"\\]|\\.?)+', re.DOTALL), re.compile(r'\\([$`"\\])|\\\n')
_IN_DOCUMENT = re.compile(r"(?:[^$`\\]|\\.?)+", re.DOTALL), re.compile(r"\\([$`\\])|\\\n")
_NAME = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!-]|\d)", re.ASCII)
_PREFIX = re.compile(r"[#!](?=[A-Za-z_0-9@*])")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII)
_OPERATOR = re.compile(r":[-=?+]|##|%%|//|/[#%]|\^\^|,,|[-=?+#%/^,@:]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", re.DOTALL)


class SyntaxProblem(Exception):
    """The script cannot be parsed at some line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


def unescape(text: str) -> str:
    """Return text with the escapes of ``$'...'`` and ``printf`` resolved."""

    def resolve(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xu" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)
        return _ESCAPES.get(code, code if code in "\\'\"?" else f"\\{code}")

    return _ESCAPE.sub(resolve, text)


def _add(parts: list[Part], text: str, quoted: bool) -> None:
    """Append characters, to the last part where that has others of their kind."""
    last = parts[-1] if parts else None
    if isinstance(last, Text) and last.quoted == quoted:
        parts[-1] = Text(last.text + text, quoted)
    else:
        parts.append(Text(text, quoted))


class WordReader(ABC):
    """Reads words at a position of a text; ``ends`` are the characters that end a word."""

    def __init__(self, text: str) -> None:
        self.text, self.ends, self.at = text, ENDS, 0

    @abstractmethod
    def commands(self, closing: str) -> Sequence:
        """Read commands up to a closing character."""

    def line(self, position: int | None = None) -> int:
        """Return the line of a position, or of the current one."""
        return 1 + self.text.count("\n", 0, self.at if position is None else position)

    def fail(self, problem: str, position: int | None = None) -> SyntaxProblem:
        """Make an error at a position, or at the current one."""
        return SyntaxProblem(self.line(position), problem)

    @property
    def char(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def starts(self, *texts: str) -> bool:
        """Return whether one of some texts is next."""
        return self.text.startswith(texts, self.at)

    def skip(self, text: str) -> bool:
        """Skip a text if it is next."""
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Read what matches a pattern, if it is next."""
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def skip_space(self) -> None:
        """Skip blanks, continued lines and a comment."""
        self.take(_SPACE)

    def word(self) -> Word:
        """Read one word, which may be empty."""
        parts: list[Part] = []
        start = self.at
        if self.skip("~"):
            parts.append(syntax.Opaque("~", quoted=False))
        elif self.starts("<(", ">(") and "(" in self.ends:
            self.at += 2
            self.commands(")")
            parts.append(syntax.Opaque(self.text[start : self.at]))
        while self.char and self.char not in self.ends:
            if self.char == "\r" and self.text[self.at + 1 : self.at + 2] in ("\n", ""):
                self.at += 1  # a file of Windows
            else:
                self._part(parts)
        return tuple(parts)

    def document(self) -> Word:
        """Read the whole text as the body of a here-document."""
        parts: list[Part] = []
        while self.char:
            self._inside(parts, *_IN_DOCUMENT)
        return tuple(parts)

    def _part(self, parts: list[Part]) -> None:
        """Read quotes, an escape, an expansion, or plain characters."""
        start = self.at
        if self.skip("\\\n"):
            return
        if self.skip("\\"):
            _add(parts, self.char, quoted=True)
            self.at += 1
        elif (found := self.take(_SINGLE)) is not None:
            _add(parts, found[1], quoted=True)
        elif (found := self.take(_ANSI)) is not None:
            _add(parts, unescape(found[1]), quoted=True)
        elif self.starts("'", "$'"):
            raise self.fail(f"a quote {self.char.strip(chr(39))}' is not closed")
        elif self.skip('"') or self.skip('$"'):
            before = len(parts)
            while not self.skip('"'):
                if not self.char:
                    raise self.fail('a quote " is not closed', start)
                self._inside(parts, *_IN_QUOTES)
            if len(parts) == before:
                _add(parts, "", quoted=True)
        elif self.char in "$`":
            parts.append(self._dollar(quoted=False))
        else:
            if self.take(_PLAIN) is None:
                self.at += 1
            _add(parts, self.text[start : self.at], quoted=False)

    def _inside(self, parts: list[Part], run: re.Pattern[str], escape: re.Pattern[str]) -> None:
        """Read one part within double quotes or a here-document."""
        found = self.take(run)
        if found is None:
            parts.append(self._dollar(quoted=True))
        else:
            _add(parts, escape.sub(lambda each: each[1] or "", found[0]), quoted=True)

    def _dollar(self, quoted: bool) -> Part:
        """Read an expansion that starts with ``$`` or a backquote."""
        start = self.at
        if self.char == "`":
            return self._backquoted(quoted)
        if self.skip("$(("):
            expression = self.arithmetic("))")
            if expression is not None:
                return syntax.Arithmetic(expression, self.text[start : self.at], quoted)
            self.at = start
        if self.skip("$("):
            body = self.commands(")")
            return syntax.Substitution(body, self.text[start : self.at], quoted)
        if self.starts("$["):
            raise self.fail("$[ ] is not supported; write $(( ))")
        if self.skip("${"):
            return self._braced(start, quoted)
        found = self.take(_NAME)
        if found is None:
            self.at += 1
            return Text("$", quoted)
        return Parameter(found[1], found[0], quoted)

    def _backquoted(self, quoted: bool) -> Part:
        found = self.take(_BACKQUOTED)
        if found is None:
            raise self.fail("a quote ` is not closed")
        inner = type(self)(re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", found[1]))
        try:
            return syntax.Substitution(inner.commands(""), found[0], quoted)
        except SyntaxProblem as error:
            raise self.fail(error.problem, found.start()) from None

    def arithmetic(self, closing: str) -> Word | None:
        """Read an expression up to ``))``, ``;``, ``:`` or ``}``; return None where another bracket ends it."""
        parts: list[Part] = []
        depth = 0
        while depth or not self.skip(closing):
            char = self.char
            if not char:
                raise self.fail(f"{closing} is missing")
            if depth == 0 and char in ")}":
                return None
            depth += (char in "([{") - (char in ")]}")
            # A ternary within a substring has its own colon.
            depth += (closing == ":" and char == "?") - (closing == ":" and char == ":")
            if char in "$`":
                parts.append(self._dollar(quoted=True))
            elif not (self.skip('"') or self.skip("\\\n")):
                parts.append(Text(char, quoted=True))
                self.at += 1
        return tuple(parts)

    def _braced(self, start: int, quoted: bool) -> Parameter:
        """Read the rest of ``${...}``."""
        prefix = self.take(_PREFIX)
        name = self.take(_PARAMETER)
        if name is None:
            raise self.fail(f"{self.text[start : start + 20]} is not supported", start)
        index: Word | None = None
        if self.skip("["):
            index = self.operand("]", quoted=False)
            self.at += 1
        found = self.take(_OPERATOR)
        operator, operands = "", []
        if found is not None:
            operator = found[0]
            if operator == ":":
                operands = self._offsets()
            else:
                operands = [self.operand("/}" if operator.startswith("/") else "}", quoted)]
                if operator.startswith("/") and self.skip("/"):
                    operands.append(self.operand("}", quoted))
        if not self.skip("}"):
            raise self.fail("${ is not closed", start)
        source = self.text[start : self.at]
        return Parameter(name[0], source, quoted, index, prefix[0] if prefix else "", operator, tuple(operands))

    def _offsets(self) -> list[Word]:
        """Read ``offset`` or ``offset:length``."""
        start = self.at
        found = [self.arithmetic(":")]
        if found[0] is None:
            self.at, found = start, []
        found.append(self.arithmetic("}"))
        self.at -= 1
        return [each or () for each in found]

    def operand(self, stops: str, quoted: bool) -> Word:
        """Read a word within braces, up to one of some characters."""
        parts: list[Part] = []
        start = self.at
        while not self.char or self.char not in stops:
            if not self.char:
                raise self.fail(f"{stops[-1]} is missing", start)
            escaped = self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n}/')
            if quoted and (self.char == "'" or (self.char == "\\" and not escaped)):
                # Within double quotes, single quotes are characters, but for patterns, which have them rarely.
                _add(parts, self.char, quoted=True)
                self.at += 1
            elif quoted and self.char == "$":
                parts.append(self._dollar(quoted=True))
            else:
                self._part(parts)
        return tuple(parts)
