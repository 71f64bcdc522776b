"""Integer arithmetic of bash: ``$(( ))``, ``(( ))``, and indices of arrays."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from pipeloom.integrations.megatron.shell.state import State

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#[0-9a-zA-Z@_]+|\d+|[A-Za-z_]\w*"
    r"|\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:,()\[\]])",
    re.ASCII,
)
_LEVELS = ("||", "&&", "|", "^", "&", "== !=", "<= >= < >", "<< >>", "+ -", "* / %", "**")
_PRECEDENCE = {symbol: level for level, symbols in enumerate(_LEVELS) for symbol in symbols.split()}
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")


class Failure(Exception):
    """The expression is wrong; bash prints a message and the command fails."""


def wrapped(number: int) -> int:
    """Return a number as 64 bits hold it."""
    return (number + 2**63) % 2**64 - 2**63


def evaluate(text: str, variables: State) -> int:
    """Return the value of an expression; raises `Failure` for one that is wrong for bash too."""
    found = _Evaluator(text, variables)
    value = found.comma(True) if found.tokens else 0
    if found.at < len(found.tokens):
        raise Failure(f"syntax error in expression {text!r}")
    return value


class _Evaluator:
    """Evaluates by recursive descent; parts that bash skips are read with ``live`` false."""

    def __init__(self, text: str, variables: State) -> None:
        self.variables = variables
        self.tokens: list[str] = []
        self.at = self.start = 0
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise Failure(f"syntax error in expression {text!r}")
            self.tokens.append(found[1])
            position = found.end()

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *operators: str) -> str:
        """Take one of some operators; return an empty text if none is next."""
        found = self.peek()
        if found not in operators:
            return ""
        self.at += 1
        return found

    def comma(self, live: bool) -> int:
        value = self.assignment(live)
        while self.take(","):
            value = self.assignment(live)
        return value

    def assignment(self, live: bool) -> int:
        self.start = self.at
        return self.ternary(live)

    def ternary(self, live: bool) -> int:
        condition = self.binary(live)
        if not self.take("?"):
            return condition
        left = self.comma(live and condition != 0)
        if not self.take(":"):
            raise Failure("`:' is expected for a conditional expression")
        right = self.ternary(live and condition == 0)
        return left if condition else right

    def binary(self, live: bool, least: int = 0) -> int:
        value = self.unary(live)
        while (level := _PRECEDENCE.get(self.peek(), -1)) >= least:
            symbol = self.peek()
            self.at += 1
            skips = (symbol == "&&" and not value) or (symbol == "||" and value != 0)
            other = self.binary(live and not skips, level + (symbol != "**"))
            value = _apply(symbol, value, other) if live else 0
        return value

    def unary(self, live: bool) -> int:
        step = self.take("++", "--")
        if step:
            target = self.target(live)
            # ++ in front of a number is two signs.
            return self.unary(live) if target is None else self.step(target, step, live)[1]
        sign = self.take("!", "~", "-", "+")
        if sign:
            value = self.unary(live)
            return {"!": int(value == 0), "~": ~value, "-": wrapped(-value), "+": value}[sign]
        return self.operand(live)

    def operand(self, live: bool) -> int:
        is_first = self.at == self.start
        if self.take("("):
            value = self.comma(live)
            if not self.take(")"):
                raise Failure("missing `)'")
            return value
        target = self.target(live)
        if target is None:
            if not self.peek()[:1].isdigit():
                raise Failure("operand expected")
            self.at += 1
            return _constant(self.tokens[self.at - 1])
        if is_first and (assigns := self.take(*_ASSIGNS)):
            value = self.assignment(live)
            if live:
                value = value if assigns == "=" else _apply(assigns[:-1], self.number(*target), value)
                self.assign(target, value)
            return value
        step = self.take("++", "--")
        return self.step(target, step, live)[0] if step else self.number(*target) if live else 0

    def target(self, live: bool) -> tuple[str, str | None] | None:
        """Read a name with its index."""
        name = self.peek()
        if not (name[:1].isalpha() or name.startswith("_")):
            return None
        self.at += 1
        if not self.take("["):
            return name, None
        index = self.comma(live)
        if not self.take("]"):
            raise Failure("bad array subscript")
        return name, str(index)

    def step(self, target: tuple[str, str | None], symbol: str, live: bool) -> tuple[int, int]:
        """Count a variable up or down; return its old and new value."""
        if not live:
            return 0, 0
        old = self.number(*target)
        new = wrapped(old + (1 if symbol == "++" else -1))
        self.assign(target, new)
        return old, new

    def assign(self, target: tuple[str, str | None], value: int) -> None:
        self.variables.set(target[0], str(value), target[1])

    def number(self, name: str, index: str | None) -> int:
        variables = self.variables
        variables.unknowns.charge()
        value = variables.get(name, index)
        text = variables.unknowns.known(variables.missing(f"${name}") if value is None else value).strip()
        if text == name and index is None:
            raise Failure("expression recursion level exceeded")
        return evaluate(text, self.variables) if text else 0


def _constant(text: str) -> int:
    if len(text) > 40:
        raise Failure("value too great")
    base, digits = text.split("#") if "#" in text else ("8" if text[0] == "0" else "10", text)
    if text[:2] in ("0x", "0X"):
        base = "16"
    if not 2 <= int(base) <= 36:
        raise Failure("invalid arithmetic base")
    try:
        return wrapped(int(digits, int(base)))
    except ValueError:
        raise Failure("value too great for base") from None


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise Failure("division by 0")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise Failure("exponent less than 0")
    return pow(base, exponent, 2**64)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda left, right: left - _divide(left, right) * right,
    "**": _power,
    "<<": lambda left, right: left << (right & 63),
    ">>": lambda left, right: left >> (right & 63),
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
}


def _apply(symbol: str, left: int, right: int) -> int:
    return wrapped(_OPERATIONS[symbol](left, right))
