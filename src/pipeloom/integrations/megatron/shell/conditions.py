"""Evaluate ``test``, ``[ ]`` and ``[[ ]]``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.condition_syntax import Token, Wrong, parse_condition
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.patterns import matches
from pipeloom.integrations.megatron.shell.syntax import Condition, Text
from pipeloom.integrations.megatron.shell.values import Status, Undetermined, Unknown, negated

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_CLASSES = {"digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "space": r"\s"}
_MOST_MATCHED = 1000
"""Most characters of a text, and of the regular expression that it is matched with."""


def test(arguments: list[str], shell: Expansion) -> Status:
    """Return the status of ``test``; it is unknown where it depends on something unknown."""
    if not arguments:
        return 1
    tokens: list[Token] = [(shell.unknowns.shown(text), ((Text(text, quoted=True),),)) for text in arguments]
    try:
        return _status(_Evaluator(shell, integers=True).evaluate(parse_condition(tokens, "-o", "-a")))
    except Wrong:
        return 2


def conditional(node: Condition, shell: Expansion) -> Status:
    """Return the status of ``[[ ]]``."""
    try:
        return _status(_Evaluator(shell, integers=False).evaluate(node))
    except Wrong:
        return 1


def unknown_test(shell: Expansion, *words: str) -> Unknown:
    """Return what stands for the result of a test that depends on something unknown."""
    shown = " ".join(shell.unknowns.shown(word) for word in words)
    return Unknown(f"[ {shown[:2000]} ]", shell.unknowns.line, "text")


def any_true(results: list[bool | Unknown], decided: bool = True) -> bool | Unknown:
    """Return "or" over results, some of which may be unknown; "and" if a false one decides."""
    if any(one is decided for one in results):
        return decided
    return next((one for one in results if isinstance(one, Unknown)), not decided)


def _status(found: bool | Unknown) -> Status:
    return found if isinstance(found, Unknown) else int(not found)


class _Evaluator:
    """Evaluates conditions; with ``integers``, operands of ``-eq`` are integers and not expressions."""

    def __init__(self, shell: Expansion, integers: bool) -> None:
        self.shell, self.integers, self.known = shell, integers, shell.unknowns.known

    def evaluate(self, node: Condition) -> bool | Unknown:
        self.shell.unknowns.charge()
        if node.operator == "!":
            opposite = self.evaluate(node.nodes[0])
            return negated(opposite) if isinstance(opposite, Unknown) else not opposite
        if node.nodes:
            decided = node.operator in ("||", "-o")
            results: list[bool | Unknown] = []
            for each in node.nodes:
                results.append(self.evaluate(each))
                if results[-1] is decided and not self.integers:
                    break
            return any_true(results, decided)
        first, *others = words = [self.shell.string(word) for word in node.words]
        try:
            found = self.binary(node, first, others[0]) if others else self.unary(node.operator, first)
        except arithmetic.Failure as error:
            raise Wrong(str(error)) from None
        except Undetermined:
            found = None
        words.insert(len(others), node.operator)
        return unknown_test(self.shell, *words) if found is None else found

    def unary(self, operator: str, word: str) -> bool | None:
        """Test one word; return None where only a running shell knows."""
        if operator in ("-z", "-n"):
            unknown = self.shell.unknowns.within(word)
            # A word is not empty where only a part of it is unknown.
            filled = len(unknown) < len(word) or any(one.kind == "text" for one in unknown)
            return (filled or bool(self.known(word))) == (operator == "-n")
        if operator == "-v":
            return self.shell.get(self.known(word)) is not None
        if operator == "-o":
            return self.known(word)[:1] in self.shell.options
        return None

    def binary(self, node: Condition, left: str, right: str) -> bool | None:
        known = self.known
        match node.operator:
            case "=" | "==" | "!=":
                pattern = self.shell.pattern(node.words[1])
                return matches(pattern, known(left), self.shell.unknowns) == (node.operator != "!=")
            case "<":
                return known(left) < known(right)
            case ">":
                return known(left) > known(right)
            case "=~":
                if self.integers:
                    raise Wrong("[ ] has no operator =~")
                return self.regex(known(left), self.shell.pattern(node.words[1], is_regex=True))
        if node.operator in _NUMBERS:
            return _NUMBERS[node.operator](self.number(known(left)), self.number(known(right)))
        return None

    def number(self, text: str) -> int:
        if not self.integers:
            return arithmetic.evaluate(text, self.shell)
        if re.fullmatch(r"\s*[-+]?\d{1,19}\s*", text) is None:
            raise Wrong(f"{text[:40]!r} is not an integer")
        return int(text)

    def regex(self, text: str, expression: str) -> bool | None:
        """Match a regular expression, if it is so simple that Python reads it as bash does, in little time."""
        plain = re.sub(r"\[:(\w+):\]", lambda found: _CLASSES.get(found[1], found[0]), expression)
        if (
            len(text) > _MOST_MATCHED
            or len(plain) > _MOST_MATCHED
            or "[:" in plain
            or re.search(r"\)[*+{]|\(\?|\\[A-Za-z0-9]|[*+?}][*+?{]", plain.replace(r"\s", " "))
            or len(re.findall(r"[*+{]", plain)) > 3
        ):
            return None
        try:
            found = re.search(plain, text, re.ASCII)
        except re.error:
            raise Wrong("the regular expression is malformed") from None
        if found is not None:
            groups = (found[0], *(group or "" for group in found.groups()))
            self.shell.variables["BASH_REMATCH"] = {str(i): group for i, group in enumerate(groups)}
        return found is not None
