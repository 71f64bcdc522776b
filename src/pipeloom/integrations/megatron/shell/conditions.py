"""Evaluate ``test``, ``[ ]`` and ``[[ ]]``."""

from __future__ import annotations

import re
from collections.abc import Callable

from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.syntax import Condition
from pipeloom.integrations.megatron.shell.values import Status, Undetermined, Unknown, matches, negated

_FILES = tuple(f"-{letter}" for letter in "abcdefghkprstuwxGLNOS")
_UNARY = frozenset((*_FILES, "-z", "-n", "-v", "-o"))
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
_BINARY = frozenset((*_NUMBERS, *_TEXTS, "-nt", "-ot", "-ef"))
_MOST_MATCHED = 1000


class Wrong(Exception):
    """The test is malformed; bash prints a message, and the status is 2."""


def test(arguments: list[str], shell: Expansion) -> Status:
    """Return the status of ``test``; unknown where it depends on something unknown."""
    try:
        found = _Test(arguments, shell).result()
    except Wrong:
        return 2
    return found if isinstance(found, Unknown) else int(not found)


class _Test:
    def __init__(self, arguments: list[str], shell: Expansion) -> None:
        self.words, self.shell, self.at = arguments, shell, 0

    def operator(self, at: int) -> str:
        """A word that may be an operator; unknown words are none."""
        word = self.words[at] if at < len(self.words) else ""
        return word if word.isascii() else self.shell.unknowns.shown(word)

    def result(self) -> bool | Unknown:
        """By the number of arguments, as POSIX has it."""
        words = self.words
        if len(words) == 3 and self.operator(1) in _BINARY:
            return self.binary(words[0], self.operator(1), words[2])
        if len(words) == 1:
            return self.unary("-n", words[0])
        if len(words) == 2 and self.operator(0) == "!":
            return _negated(self.unary("-n", words[1]))
        if len(words) == 4 and self.operator(0) == "!" and self.operator(2) in _BINARY:
            return _negated(self.binary(words[1], self.operator(2), words[3]))
        if not words:
            return False
        found = self.either()
        if self.at < len(words):
            raise Wrong
        return found

    def either(self) -> bool | Unknown:
        found = self.both()
        while self.operator(self.at) == "-o":
            self.at += 1
            found = _joined("||", [found, self.both()])
        return found

    def both(self) -> bool | Unknown:
        found = self.primary()
        while self.operator(self.at) == "-a":
            self.at += 1
            found = _joined("&&", [found, self.primary()])
        return found

    def primary(self) -> bool | Unknown:
        operator = self.operator(self.at)
        left = len(self.words) - self.at
        if left == 0:
            raise Wrong
        if left > 2 and self.operator(self.at + 1) in _BINARY:
            self.at += 3
            return self.binary(self.words[self.at - 3], self.operator(self.at - 2), self.words[self.at - 1])
        if operator == "!" and left > 1:
            self.at += 1
            return _negated(self.primary())
        if operator == "(" and left > 1:
            self.at += 1
            found = self.either()
            if self.operator(self.at) != ")":
                raise Wrong
            self.at += 1
            return found
        if operator in _UNARY and left > 1:
            self.at += 2
            return self.unary(operator, self.words[self.at - 1])
        self.at += 1
        return self.unary("-n", self.words[self.at - 1])

    def unary(self, operator: str, word: str) -> bool | Unknown:
        return unary(operator, word, self.shell)

    def binary(self, left: str, operator: str, right: str) -> bool | Unknown:
        known = self.shell.unknowns.known
        try:
            if operator in _NUMBERS:
                return _NUMBERS[operator](_integer(known(left)), _integer(known(right)))
            if operator in ("=", "=="):
                return known(left) == known(right)
            if operator == "!=":
                return known(left) != known(right)
            if operator in "<>":
                return known(left) < known(right) if operator == "<" else known(left) > known(right)
        except Undetermined:
            pass
        return unknown_test(self.shell, left, operator, right)


def unary(operator: str, word: str, shell: Expansion) -> bool | Unknown:
    """A test of one word."""
    try:
        if operator in ("-z", "-n"):
            return _is_filled(word, shell) == (operator == "-n")
        if operator == "-v":
            return shell.get(shell.unknowns.known(word)) is not None
        if operator == "-o":
            return shell.unknowns.known(word)[:1] in shell.options
    except Undetermined:
        pass
    return unknown_test(shell, operator, word)


def _is_filled(word: str, shell: Expansion) -> bool:
    """Whether a word is not empty, which it is too where only a part of it is unknown."""
    unknown = shell.unknowns.within(word)
    if len(unknown) < len(word) or any(one.kind == "text" for one in unknown):
        return True
    return bool(shell.unknowns.known(word))


def unknown_test(shell: Expansion, *words: str) -> Unknown:
    """What stands for the result of a test that depends on something unknown."""
    shown = " ".join(shell.unknowns.shown(word) for word in words)
    return Unknown(f"[ {shown[:2000]} ]", shell.unknowns.line, "text")


def _integer(text: str) -> int:
    try:
        if len(text) > 20 or not text.strip().lstrip("+-").isdecimal():
            raise ValueError
        return int(text)
    except ValueError:
        raise Wrong from None


def _negated(found: bool | Unknown) -> bool | Unknown:
    return negated(found) if isinstance(found, Unknown) else not found


def _joined(operator: str, results: list[bool | Unknown]) -> bool | Unknown:
    """``&&`` or ``||`` over results of which some may be unknown."""
    decided = operator == "||"
    if any(one is decided for one in results):
        return decided
    return next((one for one in results if isinstance(one, Unknown)), not decided)


def conditional(node: Condition, shell: Expansion) -> Status:
    """Return the status of ``[[ ]]``."""
    try:
        found = _evaluate(node, shell)
    except Wrong:
        return 1
    return found if isinstance(found, Unknown) else int(not found)


def _evaluate(node: Condition, shell: Expansion) -> bool | Unknown:
    shell.unknowns.charge()
    if node.operator == "!":
        return _negated(_evaluate(node.nodes[0], shell))
    if node.operator in ("&&", "||"):
        results: list[bool | Unknown] = []
        for each in node.nodes:
            results.append(_evaluate(each, shell))
            if results[-1] is (node.operator == "||"):
                break
        return _joined(node.operator, results)
    if len(node.words) == 1:
        return unary(node.operator, shell.string(node.words[0]), shell)
    return _binary(node, shell)


def _binary(node: Condition, shell: Expansion) -> bool | Unknown:
    left, operator = shell.string(node.words[0]), node.operator
    known = shell.unknowns.known
    try:
        if operator in ("=", "==", "!="):
            pattern = shell.pattern(node.words[1])
            return matches(pattern, known(left), shell.unknowns) == (operator != "!=")
        right = shell.string(node.words[1])
        if operator in _NUMBERS:
            line = shell.unknowns.line
            numbers = [arithmetic.evaluate(known(text), shell, line) for text in (left, right)]
            return _NUMBERS[operator](*numbers)
        if operator in ("<", ">"):
            return known(left) < known(right) if operator == "<" else known(left) > known(right)
        if operator == "=~":
            return _regex(known(left), node, shell)
    except arithmetic.Failure:
        raise Wrong from None
    except Undetermined:
        pass
    return unknown_test(shell, left, operator, shell.string(node.words[1]))


def _regex(text: str, node: Condition, shell: Expansion) -> bool | Unknown:
    """Match a regular expression, if it is so simple that Python reads it as bash does, in little time."""
    expression = "".join(
        char if not literal or char.isalnum() else re.escape(char) for char, literal in shell.pattern(node.words[1])
    )
    plain = re.sub(
        r"\[:(\w+):\]",
        lambda found: {"digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "space": r"\s"}.get(found[1], found[0]),
        expression,
    )
    if (
        len(text) > _MOST_MATCHED
        or len(plain) > _MOST_MATCHED
        or "[:" in plain
        or re.search(r"\)[*+{]|\(\?|\\[A-Za-z0-9]|[*+?}][*+?{]", plain.replace(r"\s", " "))
        or len(re.findall(r"[*+{]", plain)) > 3
    ):
        return unknown_test(shell, text, "=~", expression)
    try:
        found = re.search(plain, text, re.ASCII)
    except re.error:
        raise Wrong from None
    if found is not None:
        groups = (found[0], *(group or "" for group in found.groups()))
        shell.set("BASH_REMATCH", {str(i): group for i, group in enumerate(groups)})
    return found is not None
