"""Megatron's arguments by name, from any source, and typed access to their values."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from pipeloom.errors import InputError
from pipeloom.limits import MAX_IN_MICROBATCH
from pipeloom.spec.architecture import MOST_SIZE
from pipeloom.spec.model import MOST_LAYERS

JOINED = (
    *("pipeline-model-parallel-layout", "moe-layer-freq", "window-attn-skip-freq", "window-size"),
    *("hybrid-layer-pattern", "hybrid-override-pattern"),
)
"""Arguments whose value may have brackets and bars, at which a shell splits."""
_LAYERS = ("num-layers", "mtp-num-layers", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
_MOST: Mapping[str, int] = {
    **dict.fromkeys(_LAYERS, MOST_LAYERS),
    **dict.fromkeys(("seq-length", "max-position-embeddings"), 2**26),
    **dict.fromkeys(("vocab-size", "padded-vocab-size", "global-batch-size", "eval-global-batch-size"), MOST_SIZE),
    **dict.fromkeys(("micro-batch-size", "eval-micro-batch-size"), MAX_IN_MICROBATCH),
}
"""Largest values of arguments; 2^20 for those not listed."""
_OFF = ("none", "null", "false")
"""Values that switch an argument off."""


class UnknownText(str):
    """A value that is unknown from a script, as the script writes it."""

    reason: str
    words: Literal["none", "one", "any"]
    """Number of words; ``none`` for a variable that is not set. ``any`` may include other arguments."""

    def __new__(cls, text: str, reason: str, words: Literal["none", "one", "any"]) -> UnknownText:
        """Make a value, with the reason why it is unknown."""
        made = super().__new__(cls, text)
        made.reason, made.words = reason, words
        return made


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument as it was written, with its values; a flag has none."""

    label: str
    values: tuple[str, ...] = ()
    clash: tuple[str, ...] | None = None
    """Other values, if it was given twice."""
    undecided: str = ""
    """What decides about it and its values, if that is unknown from a script; otherwise empty."""


@dataclass(slots=True)
class Arguments:
    """Arguments of one source, by Megatron's name with dashes. Notes which were read.

    ``section`` is the section of a recipe of Megatron Bridge that has the fields of the pipeline; empty: the source is
    no recipe.
    """

    source: str
    given: Mapping[str, Argument]
    section: str = ""
    notes: tuple[str, ...] = ()
    """Assumptions made while reading."""
    asked: set[str] = field(default_factory=set)

    @property
    def is_recipe(self) -> bool:
        """Whether the source is a recipe of Megatron Bridge."""
        return bool(self.section)

    @property
    def read(self) -> tuple[str, ...]:
        """Labels of the arguments that were read."""
        return tuple(self.given[name].label for name in self.given if name in self.asked)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Labels of the arguments that were not read."""
        return tuple(self.given[name].label for name in self.given if name not in self.asked)

    def label(self, name: str) -> str:
        """Return the name of an argument in the source, for messages."""
        return self.given[name].label if name in self.given else f"--{name}"

    def refuse(self, name: str, problem: str, remedy: str = "") -> InputError:
        """Make an error about one argument."""
        return InputError(f"{self.source}: {self.label(name)}", problem, remedy)

    def values(self, name: str) -> tuple[str, ...] | None:
        """Return the values of an argument; None if it is not given.

        Raises `InputError` if it is given twice with different values, or depends on something unknown from the source.
        """
        self.asked.add(name)
        if name not in self.given:
            return None
        one = self.given[name]
        if one.undecided:
            raise self.refuse(
                name, f"depends on {one.undecided}", "write the arguments that you train with in its place"
            )
        if one.clash is not None:
            both = f"{' '.join(one.values) or 'nothing'} and {' '.join(one.clash) or 'nothing'}"
            raise self.refuse(name, f"is given twice, with {both}", "leave one")
        return one.values

    def words(self, name: str) -> tuple[str, ...]:
        """Return the words of an argument's values, which may be a list in brackets."""
        return tuple(w for value in self.values(name) or () for w in re.split(r"[\s,\[\]]+", value) if w)

    def text(self, name: str) -> str | None:
        """Return the first value of an argument; parts that an unquoted bracket or bar has split are joined."""
        values = self.values(name)
        if values is None:
            return None
        if not values:
            raise self.refuse(name, "has no value")
        self._check_known(name, values if name in JOINED else values[:1])
        value = "".join(values) if name in JOINED else values[0]
        if "$" in value:
            raise self.refuse(name, f"{value} is not set in this file", "write its value in its place")
        return value

    def _check_known(self, name: str, values: Sequence[str]) -> None:
        for each in values:
            if isinstance(each, UnknownText):
                raise self.refuse(name, each.reason, "write its value in its place")

    def flag(self, name: str) -> bool:
        """Return whether a flag is given, and not as false."""
        values = self.values(name)
        self._check_known(
            name, [one for one in values or () if not isinstance(one, UnknownText) or one.words != "none"]
        )
        return values is not None and (not values or values[0].lower() != "false")

    def on(self, name: str) -> bool:
        """Return whether an argument is given with a value that switches it on."""
        values = self.values(name)
        if values is None or not values:
            return values is not None
        try:
            return float(values[0]) != 0
        except ValueError:
            return values[0].lower() not in _OFF

    def count(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """Return the value of an argument as an integer."""
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            raise self.refuse(name, f"{value!r} is not a whole number") from None
        if number < least:
            raise self.refuse(name, f"{number} is below {least}")
        most = _MOST.get(name, 2**20)
        if number > most:
            raise self.refuse(name, f"{number} is above {most}", "give a smaller number")
        return number

    def size(self, name: str, default: int | None = None) -> int:
        """Return the value of an argument as an integer; raise `InputError` if there is none."""
        found = self.count(name, default)
        if found is None:
            self.missing(name)
        return found

    def missing(self, name: str, remedy: str = "") -> NoReturn:
        """Raise `InputError` for a missing argument."""
        remedy = remedy or "add it" + (
            "; a Megatron Bridge recipe has all of them once it is saved with ConfigContainer.to_yaml"
            if self.is_recipe
            else ""
        )
        raise self.refuse(name, "is missing", remedy)

    def pattern(self, name: str, num_layers: int) -> tuple[bool, ...] | None:
        """Return a frequency of layers as one boolean per layer.

        Megatron writes it as ``N``, every N-th from the first, or as a list such as ``([0]*3+[1]*5)``.
        """
        value = self.text(name)
        if value is None:
            return None
        try:
            found = _number_or_list(ast.parse(value.strip(), mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise self.refuse(name, f"{value!r} is neither a number nor a list of 0 and 1") from None
        if isinstance(found, int):
            if found < 1:
                raise self.refuse(name, f"{found} is below 1")
            return tuple(i % found == 0 for i in range(num_layers))
        if len(found) != num_layers:
            raise self.refuse(name, f"has {len(found)} entries, the model {num_layers} layers")
        return tuple(map(bool, found))


def _number_or_list(node: ast.expr) -> int | list[int]:
    """Evaluate integers and lists of integers, with addition and repetition."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.List):
        entries = [_number_or_list(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _number_or_list(node.left), _number_or_list(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, int) != isinstance(right, int):
            times, row = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(row, list) and times * len(row) <= MOST_LAYERS:
                return row * times
    raise ValueError(ast.dump(node))


def check_known(labels: Iterable[tuple[str, str]], known: frozenset[str], source: str) -> None:
    """Raise `InputError` for an argument that Megatron does not know, with the nearest known name.

    ``labels`` are pairs of name and label.
    """
    for name, label in labels:
        if name not in known:
            near = "".join(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75))
            # In the style of the label: with two dashes, or as a field.
            shown = f"--{near}" if label.startswith("--") else near.replace("-", "_")
            advice = f"did you mean {shown}? " if near else ""
            raise InputError(
                f"{source}: {label}",
                "is not an argument of Megatron",
                f"{advice}leave out arguments of your own script",
            )
