"""Integer arithmetic of bash: ``$(( ))``, ``(( ))``, and indices of arrays."""

from __future__ import annotations

import re
from typing import Protocol

from pipeloom.integrations.megatron.shell.values import Refusal

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|\d+#[0-9a-zA-Z@_]+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:,()\[\]]))",
    re.ASCII,
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<=", ">=", "<", ">"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_MOST_DEPTH = 40


class Failure(Exception):
    """The expression is wrong; bash prints a message and the command fails."""


class Variables(Protocol):
    """Where names get their values."""

    def get_number(self, name: str, index: str | None) -> str:
        """Return the text of a variable or element; empty where it is not set."""

    def set_number(self, name: str, index: str | None, value: int) -> None:
        """Assign to a variable or element."""


def wrapped(number: int) -> int:
    """Return a number as 64 bits hold it."""
    return (number + 2**63) % 2**64 - 2**63


def evaluate(text: str, variables: Variables, line: int, depth: int = 0) -> int:
    """Return the value of an expression.

    Raises
    ------
    Failure
        The expression is wrong for bash too.
    """
    if depth > _MOST_DEPTH:
        raise Failure("expression recursion level exceeded")
    found = _Evaluator(text, variables, line, depth)
    if not found.tokens:
        return 0
    value = found.comma(True)
    if found.at < len(found.tokens):
        raise Failure(f"syntax error in expression {text!r}")
    return value


class _Evaluator:
    """Recursive descent; parts that are not evaluated are read with ``live`` false."""

    def __init__(self, text: str, variables: Variables, line: int, depth: int) -> None:
        self.variables, self.line, self.depth = variables, line, depth
        self.tokens: list[tuple[str, str]] = []
        self.at = self.nested = 0
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None or found.lastgroup is None:
                raise Failure(f"syntax error in expression {text!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, *operators: str) -> str:
        """Take one of some operators; empty where none is next."""
        if self.at < len(self.tokens) and self.tokens[self.at][0] == "operator" and self.peek() in operators:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return ""

    def comma(self, live: bool) -> int:
        value = self.assignment(live)
        while self.take(","):
            value = self.assignment(live)
        return value

    def assignment(self, live: bool) -> int:
        start = self.at
        target = self.target(live)
        operator = self.take(*_ASSIGNS) if target else ""
        if not target or not operator:
            self.at = start
            return self.ternary(live)
        value = self.assignment(live)
        if operator != "=" and live:
            value = _apply(operator[:-1], self.number(*target), value)
        if live:
            self.variables.set_number(*target, value)
        return value

    def target(self, live: bool) -> tuple[str, str | None] | None:
        """Read a name with its index."""
        if self.at >= len(self.tokens) or self.tokens[self.at][0] != "name":
            return None
        name = self.peek()
        self.at += 1
        if not self.take("["):
            return name, None
        index = self.comma(live)
        if not self.take("]"):
            raise Failure("bad array subscript")
        return name, str(index)

    def ternary(self, live: bool) -> int:
        condition = self.binary(0, live)
        if not self.take("?"):
            return condition
        left = self.comma(live and condition != 0)
        if not self.take(":"):
            raise Failure("`:' is expected for a conditional expression")
        right = self.ternary(live and condition == 0)
        return left if condition else right

    def binary(self, level: int, live: bool) -> int:
        if level == len(_LEVELS):
            return self.power(live)
        value = self.binary(level + 1, live)
        while operator := self.take(*_LEVELS[level]):
            if operator in ("&&", "||"):
                other = self.binary(level + 1, live and bool(value) == (operator == "&&"))
                value = int(bool(value and other) if operator == "&&" else bool(value or other))
            else:
                other = self.binary(level + 1, live)
                value = _apply(operator, value, other) if live else 0
        return value

    def power(self, live: bool) -> int:
        value = self.unary(live)
        if not self.take("**"):
            return value
        exponent = self.power(live)
        if exponent < 0:
            raise Failure("exponent less than 0")
        return wrapped(pow(value, exponent, 2**64))

    def unary(self, live: bool) -> int:
        self.nested += 1
        if self.nested > _MOST_DEPTH:
            raise Refusal(self.line, f"an expression is nested more than {_MOST_DEPTH} deep")
        try:
            return self._unary(live)
        finally:
            self.nested -= 1

    def _unary(self, live: bool) -> int:
        step = self.take("++", "--")
        if step:
            target = self.target(live)
            if target is None:
                # ++ in front of a number is two signs.
                return self.unary(live)
            return self.step(target, step, live)[1]
        sign = self.take("!", "~", "-", "+")
        if sign:
            value = self.unary(live)
            return {"!": int(value == 0), "~": ~value, "-": wrapped(-value), "+": value}[sign]
        if self.take("("):
            value = self.comma(live)
            if not self.take(")"):
                raise Failure("missing `)'")
            return value
        target = self.target(live)
        if target is not None:
            step = self.take("++", "--")
            return self.step(target, step, live)[0] if step else self.number(*target) if live else 0
        if self.at < len(self.tokens) and self.tokens[self.at][0] == "number":
            self.at += 1
            return _constant(self.tokens[self.at - 1][1])
        raise Failure("operand expected")

    def step(self, target: tuple[str, str | None], operator: str, live: bool) -> tuple[int, int]:
        if not live:
            return 0, 0
        old = self.number(*target)
        new = wrapped(old + (1 if operator == "++" else -1))
        self.variables.set_number(*target, new)
        return old, new

    def number(self, name: str, index: str | None) -> int:
        text = self.variables.get_number(name, index)
        return evaluate(text, self.variables, self.line, self.depth + 1) if text else 0


def _constant(text: str) -> int:
    if len(text) > 40:
        raise Failure("value too great")
    if "#" in text:
        base, digits = text.split("#")
        if not 2 <= int(base) <= 36:
            raise Failure("invalid arithmetic base")
        try:
            return wrapped(int(digits, int(base)))
        except ValueError:
            raise Failure("value too great for base") from None
    if text[:2] in ("0x", "0X"):
        return wrapped(int(text, 16))
    try:
        return wrapped(int(text, 8) if text[0] == "0" else int(text))
    except ValueError:
        raise Failure("value too great for base") from None


def _apply(operator: str, left: int, right: int) -> int:
    if operator in "/%":
        if right == 0:
            raise Failure("division by 0")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return wrapped(quotient if operator == "/" else left - quotient * right)
    if operator in ("<<", ">>"):
        shift = right & 63
        return wrapped(left << shift if operator == "<<" else left >> shift)
    return wrapped(
        {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "&": left & right,
            "|": left | right,
            "^": left ^ right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
            "<=": left <= right,
            ">=": left >= right,
        }[operator]
    )
