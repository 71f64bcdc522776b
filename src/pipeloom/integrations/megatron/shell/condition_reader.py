"""Read ``[[ ]]``, whose words, operators and patterns have rules of their own."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable

from pipeloom.integrations.megatron.shell.syntax import Command, Condition, Conditional, Word
from pipeloom.integrations.megatron.shell.words import MOST_DEPTH, WordReader

_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|function|select|coproc|time|in|[{}!]|\[\[)(?=[\s;&|()<>]|$)"
)
_UNARY = re.compile(r"-[a-zA-Z](?=\s)")
_BINARY = re.compile(r"==|=~|!=|=|<|>|-(?:eq|ne|lt|le|gt|ge|nt|ot|ef)(?=\s)")


class ConditionReader(WordReader):
    """Reads conditions at a position of a text."""

    @abstractmethod
    def skip_lines(self) -> None:
        """Skip blanks, comments and line ends."""

    def _peek(self) -> str:
        found = _RESERVED.match(self.text, self.at)
        return found[0] if found is not None else ""

    def _token(self) -> str:
        found = re.compile(r"[;&|()<>]+|\S+").match(self.text, self.at)
        return found[0][:40] if found is not None else "end of file"

    def _test(self, line: int) -> Command:
        condition = self._either()
        self.skip_lines()
        if not self.starts("]]"):
            raise self.fail(f"']]' is missing before {self._token()!r}")
        self.at += 2
        return Conditional(line, condition)

    def _either(self) -> Condition:
        return self._chain("||", lambda: self._chain("&&", self._primary))

    def _chain(self, operator: str, reader: Callable[[], Condition]) -> Condition:
        nodes = [reader()]
        while True:
            self.skip_lines()
            if not self.starts(operator):
                return nodes[0] if len(nodes) == 1 else Condition(operator, tuple(nodes))
            self.at += 2
            nodes.append(reader())

    def _primary(self) -> Condition:
        self.skip_lines()
        if self._peek() == "!":
            self.at += 1
            return Condition("!", (self._primary(),))
        if self.char == "(":
            self.at += 1
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise self.fail(f"conditions are nested more than {MOST_DEPTH} deep")
            found = self._either()
            self.depth -= 1
            self.skip_lines()
            if self.char != ")":
                raise self.fail("a bracket in [[ ]] is not closed")
            self.at += 1
            return found
        unary = _UNARY.match(self.text, self.at)
        if unary is not None:
            start = self.at
            self.at = unary.end()
            self.skip_space()
            if not self.starts("]]") and _BINARY.match(self.text, self.at) is None:
                return Condition(unary[0], words=(self._operand(),))
            self.at = start
        left = self._operand()
        self.skip_lines()
        binary = _BINARY.match(self.text, self.at)
        if binary is None:
            return Condition("-n", words=(left,))
        self.at = binary.end()
        self.skip_space()
        right = self._regex() if binary[0] == "=~" else self._operand()
        return Condition(binary[0], words=(left, right))

    def _operand(self) -> Word:
        found = self.word()
        if not found:
            raise self.fail(f"{self._token()!r} is unexpected in [[ ]]")
        if self.char == "(":
            raise self.fail("extended patterns such as @(a|b) are not read")
        return found

    def _regex(self) -> Word:
        """Read a regular expression, in which brackets and bars are characters."""
        self.ends, ends = " \t\n", self.ends
        try:
            return self.word()
        finally:
            self.ends = ends
