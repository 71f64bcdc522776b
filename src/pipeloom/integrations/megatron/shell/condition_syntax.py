"""Parse conditions: the operators and words inside of ``[ ]`` and ``[[ ]]``."""

from __future__ import annotations

from typing import TypeAlias

from pipeloom.integrations.megatron.shell.syntax import Condition, Word

Token: TypeAlias = tuple[str, tuple[Word, ...]]
"""A token of a condition: its text where it may be an operator, and its word where it may be an operand."""
_FILE_TESTS = tuple(f"-{letter}" for letter in "abcdefghkprstuwxGLNOS")
_UNARY = frozenset((*_FILE_TESTS, "-z", "-n", "-v", "-o"))
_BINARY = frozenset(("=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"))


class Wrong(Exception):
    """A condition is malformed."""


def parse_condition(tokens: list[Token], *joiners: str) -> Condition:
    """Parse the inside of ``[ ]`` or ``[[ ]]``; ``joiners`` are its operators for "or" and "and".

    Raises `Wrong` for a malformed condition.
    """
    parser = _ConditionParser(tokens, joiners)
    found = parser.chain()
    if parser.at < len(tokens):
        raise Wrong(f"{parser.text()!r} is unexpected")
    return found


class _ConditionParser:
    def __init__(self, tokens: list[Token], joiners: tuple[str, ...]) -> None:
        self.tokens, self.joiners, self.at = tokens, joiners, 0

    def text(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at][0] if at < len(self.tokens) else ""

    def chain(self, level: int = 0) -> Condition:
        if level == len(self.joiners):
            return self.primary()
        nodes = [self.chain(level + 1)]
        while self.text() == self.joiners[level]:
            self.at += 1
            nodes.append(self.chain(level + 1))
        return nodes[0] if len(nodes) == 1 else Condition(self.joiners[level], tuple(nodes))

    def primary(self) -> Condition:
        operator = self.text()
        words = [word for _, word in self.tokens[self.at : self.at + 3]]
        if not words:
            raise Wrong("an operand is missing")
        negates = operator == "!" and len(words) > 1
        negates_binary = negates and self.at + 4 == len(self.tokens) and self.text(2) in _BINARY
        if self.text(1) in _BINARY and len(words) == 3 and words[0] and words[2] and not negates_binary:
            return self.test(self.text(1), 3, words[0] + words[2])
        if negates:
            self.at += 1
            return Condition("!", (self.primary(),))
        if operator == "(" and len(words) > 1:
            self.at += 1
            found = self.chain()
            if self.text() != ")":
                raise Wrong("a bracket is not closed")
            self.at += 1
            return found
        if operator in _UNARY and len(words) > 1:
            if not words[1]:
                raise Wrong(f"{self.text(1)!r} is unexpected")
            return self.test(operator, 2, words[1])
        if not words[0]:
            raise Wrong(f"{operator!r} is unexpected")
        return self.test("-n", 1, words[0])

    def test(self, operator: str, length: int, words: tuple[Word, ...]) -> Condition:
        self.at += length
        return Condition(operator, words=words)
