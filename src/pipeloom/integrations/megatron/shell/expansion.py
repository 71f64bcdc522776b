"""Expand words as bash does: braces, parameters, commands, arithmetic, and splitting. File names are not expanded."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from pipeloom.integrations.megatron.shell import arithmetic, syntax
from pipeloom.integrations.megatron.shell.parser import Parser, SyntaxProblem
from pipeloom.integrations.megatron.shell.patterns import replaced, trimmed
from pipeloom.integrations.megatron.shell.state import State, is_name
from pipeloom.integrations.megatron.shell.syntax import Parameter, Part, Text, Word
from pipeloom.integrations.megatron.shell.values import Refusal, Undetermined

Piece: TypeAlias = tuple[str, bool] | None
"""Text with whether it is quoted; None separates fields."""
_SEQUENCE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?", re.ASCII)
_INDIRECT = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(?:\[([@*]|\w+)\])?", re.ASCII)


class Expansion(State):
    """Expands words over the variables of a script."""

    @abstractmethod
    def substitute(self, part: syntax.Substitution) -> str:
        """Run commands and return what they print."""

    # ------------------------------------------------------------------ words

    def fields(self, words: tuple[Word, ...] | list[Word]) -> list[str]:
        """Expand words to arguments of a command or elements of an array."""
        found: list[str] = []
        total = 0
        first = ""
        plain = (one for word in words for one in self._braces(word))
        for text, quoted in (field for word in plain for field in self.split(self._pieces(word))):
            total += len(text)
            self.unknowns.charge()
            self.unknowns.check_length(total)
            if not quoted:
                # One word within quotes may be several words without them.
                text = self.unknowns.recast(text, "part", "output")
            if quoted or not text or not self.unknowns.is_unset(text):
                found.append(first + text)
                first = ""
                continue
            # A variable that is not set leaves no word; the word before it remembers which.
            gone = "".join(self.unknowns.make(each.source, "gone") for each in self.unknowns.within(text))
            if found:
                found[-1] += gone
            else:
                first += gone
        return found

    def string(self, word: Word) -> str:
        """Expand a word to one value, without splitting."""
        texts = [" " if piece is None else piece[0] for piece in self._pieces(word)]
        self.unknowns.check_length(sum(map(len, texts)))
        return "".join(texts)

    def pattern(self, word: Word, is_regex: bool = False) -> str:
        """Expand a word to a pattern or regular expression; literal characters get a backslash."""
        found: list[str] = []
        for text, quoted in ((" ", True) if piece is None else piece for piece in self._pieces(word)):
            literal = r"\W" if quoted else r"(?!)" if is_regex else r"\\"
            found.append(re.sub(literal, r"\\\g<0>", self.unknowns.known(text)))
        pattern = "".join(found)
        self.unknowns.check_length(len(pattern))
        if re.search(r"(?:^|[^\\])[@?*+!]\(", pattern) and not is_regex:
            raise Refusal(self.unknowns.line, "extended patterns such as @(a|b) are not supported")
        return pattern

    def number(self, word: Word) -> int:
        """Expand and evaluate an expression; raises `arithmetic.Failure` or `Undetermined`."""
        expanded = self.string(word)
        text = self.unknowns.known(expanded)
        self.unknowns.charge(len(text) // 20)
        try:
            return arithmetic.evaluate(text, self)
        except arithmetic.Failure as error:
            unset = ", ".join(dict.fromkeys(one.source for one in self.unknowns.within(expanded)))
            raise arithmetic.Failure(f"{error}; not set in the script: {unset}" if unset else str(error)) from None

    def needed_number(self, word: Word, subject: str) -> int:
        """Expand and evaluate an expression without which the script cannot be followed."""
        try:
            return self.number(word)
        except arithmetic.Failure as error:
            raise Refusal(self.unknowns.line, f"{subject}: {error}") from None

    def index(self, name: str, word: Word) -> str:
        if name in self.associative:
            return self.unknowns.known(self.string(word))
        return str(self.needed_number(word, f"the index of {name} is not a number"))

    def _pieces(self, word: Word) -> list[Piece]:
        found: list[Piece] = []
        for part in word:
            match part:
                case Text(text, quoted):
                    found.append((text, quoted))
                case syntax.Opaque(source, quoted):
                    found.append((self.unknowns.make(source, "text"), True))
                case syntax.Document(literal, text):
                    found.append((text if literal else self.string(self._document(text)), True))
                case syntax.Arithmetic():
                    try:
                        text = str(self.needed_number(part.expression, f"{part.source} fails"))
                    except Undetermined as error:
                        text = self.unknowns.derive(error.unknown, "text")
                    found.append((text, part.quoted))
                case syntax.Substitution():
                    found.append((self._one_word(self.substitute(part), part.quoted), part.quoted))
                case Parameter():
                    found += self._parameter(part)
        return found

    def _one_word(self, text: str, quoted: bool) -> str:
        return self.unknowns.recast(text, "output", "part") if quoted else text

    def _document(self, text: str) -> Word:
        try:
            return Parser(text).document()
        except SyntaxProblem as error:
            raise Refusal(self.unknowns.line, f"a here-document cannot be parsed: {error.problem}") from None

    def split(self, pieces: list[Piece]) -> list[tuple[str, bool]]:
        """Split at characters of IFS what is not quoted; each field says whether a quote made it."""
        ifs = self.get("IFS")
        ifs = " \t\n" if ifs is None else self.unknowns.known(ifs)
        blank, other = (
            f"[{re.escape(chars)}]" if chars else "(?:(?!))"
            for chars in ("".join(c for c in ifs if (c in " \t\n") == is_blank) for is_blank in (True, False))
        )
        separator = re.compile(f"({blank}*{other}{blank}*|{blank}+)")
        found: list[tuple[str, bool]] = []
        current: str | None = None
        made = False
        for piece in [*pieces, None]:
            if piece is not None and piece[1]:
                current, made = (current or "") + piece[0], True
                continue
            for i, text in enumerate(["", "", ""] if piece is None else separator.split(piece[0])):
                if i % 2 == 0:
                    current = (current or "") + text if text else current
                    continue
                # A separator other than a blank ends a field even where it is empty.
                if current is not None or text.strip(" \t\n"):
                    found.append((current or "", made))
                current, made = None, False
        return found

    # ------------------------------------------------------------------ braces

    def _braces(self, word: Word) -> list[Word]:
        if not any(isinstance(part, Text) and not part.quoted and "{" in part.text for part in word):
            return [word]
        atoms: list[str | Part] = []
        for part in word:
            atoms += part.text if isinstance(part, Text) and not part.quoted else [part]
        return [
            tuple(Text(atom, False) if isinstance(atom, str) else atom for atom in one)
            for one in self._alternatives(atoms)
        ]

    def _alternatives(self, atoms: list[str | Part]) -> list[list[str | Part]]:
        for start, atom in enumerate(atoms):
            if atom != "{":
                continue
            self.unknowns.charge((len(atoms) - start) // 50)
            commas, end = _closing(atoms, start)
            if end is None:
                continue
            if commas:
                edges = itertools.pairwise([start, *commas, end])
                middles = [one for low, high in edges for one in self._alternatives(atoms[low + 1 : high])]
            else:
                middles = self._range(atoms[start + 1 : end])
                if not middles:
                    continue
            self.unknowns.charge(len(middles))
            rest = self._alternatives(atoms[end + 1 :])
            self.unknowns.charge(len(middles) * len(rest) * (1 + len(atoms) // 100))
            return [[*atoms[:start], *middle, *tail] for middle in middles for tail in rest]
        return [atoms]

    def _range(self, inner: list[str | Part]) -> list[list[str | Part]]:
        found = _SEQUENCE.fullmatch("".join(one if isinstance(one, str) else "\0" for one in inner))
        if found is None or any(len(one or "") > 18 for one in found.groups()):
            return []
        first, last, step = found.groups()
        letters = first.isalpha()
        if letters != last.isalpha():
            return []
        low, high = (ord(first), ord(last)) if letters else (int(first), int(last))
        stride = abs(int(step or 1)) or 1
        self.unknowns.charge(abs(high - low) // stride)
        numbers = range(low, high + 1, stride) if low <= high else range(low, high - 1, -stride)
        width = max(len(first), len(last)) if re.search(r"(?:^|\.)-?0\d", f"{first}.{last}") else 0
        return [[chr(n) if letters else f"{n:0{width}d}"] for n in numbers]

    # ------------------------------------------------------------------ parameters

    def _parameter(self, part: Parameter) -> list[Piece]:
        try:
            values, mark = self._values(part)
        except Undetermined as error:
            # How many elements there are is unknown too.
            is_list = _mark(part) and part.prefix != "#"
            text = self.unknowns.make(error.unknown.source, "list") if is_list else self.unknowns.derive(error.unknown)
            return [(text, part.quoted)]
        if mark == "pieces":
            return [value for value in values if not isinstance(value, str)]
        texts = [value if isinstance(value, str) else "" for value in values]
        if not mark:
            return [(self._one_word(texts[0], part.quoted and part.index is None), part.quoted)]
        self.unknowns.charge(len(texts))
        if mark == "*" and part.quoted:
            ifs = self.get("IFS")
            return [((" " if ifs is None else ifs[:1]).join(texts), True)]
        return [piece for text in texts for piece in ((text, part.quoted), None)][:-1]

    def _values(self, part: Parameter) -> tuple[Iterable[str | Piece], str]:
        """Return the values of a parameter and its mark; or the ``pieces`` that an operand puts in their place."""
        mark = _mark(part)
        if part.prefix == "!":
            if mark and not part.operator:
                return self.keys(part.name), mark
            part = self._target(part)
            mark = _mark(part)
        index = None if part.index is None or mark else self.index(part.name, part.index)
        if mark:
            found = self.elements(part.name)
            if not found and self.unread and part.name not in "@*" and part.name not in self.variables:
                found = [self.unknowns.make(f"{part.source}, which {self.unread} may set,", "list")]
            value = " ".join(found) if found else None
        else:
            value = self.get(part.name, index)
            found = [] if value is None else [value]
        if part.prefix == "#" and mark:
            self._check_count(found)
            return [str(len(found))], ""
        operator = part.operator
        if part.prefix == "#" or not operator:
            found = found if mark else [self.missing(f"${part.name}") if value is None else value]
            return ([str(len(self.unknowns.known(found[0])))], "") if part.prefix == "#" else (found, mark)
        if operator[-1] in "-=?+":
            decided = self._default(part, value, index)
            return (found if mark else [value or ""], mark) if decided is None else (decided, "pieces")
        if mark and operator == ":":
            return self._slice(part, found), mark
        return [self._changed_or_unknown(part, each) for each in found or ([] if mark else [""])], mark

    def _check_count(self, elements: list[str]) -> None:
        """Raise `Undetermined` where it is unknown how many elements there are."""
        for element in elements:
            for unknown in self.unknowns.within(element):
                if unknown.kind == "list" or (unknown.kind == "output" and len(element) == 1):
                    raise Undetermined(unknown)

    def _target(self, part: Parameter) -> Parameter:
        """Return the parameter that an indirection names."""
        name = self.get(part.name, None if part.index is None else self.index(part.name, part.index))
        text = self.unknowns.known(name or "")
        found = _INDIRECT.fullmatch(text)
        if found is None:
            raise Refusal(self.unknowns.line, f"{part.source} names {text!r}, which is not a variable")
        return replace(part, name=found[1], index=None if found[2] is None else (Text(found[2], False),), prefix="")

    def _default(self, part: Parameter, value: str | None, index: str | None) -> list[Piece] | None:
        """Return what ``-``, ``=``, ``?`` or ``+`` puts in the place of a value; None where the value stays."""
        kind = part.operator[-1]
        empty = value is None or (part.operator[0] == ":" and self.unknowns.is_unset(value))
        if kind == "+" and value is None:
            self.unknowns.inspected.setdefault(f"${part.name}", self.unknowns.line)
        if empty != (kind != "+"):
            return [("", part.quoted)] if kind == "+" else None
        if kind == "?":
            return [(self.unknowns.make(f"${part.name}", "required"), part.quoted)]
        if kind == "=":
            if not is_name(part.name):
                raise Refusal(self.unknowns.line, f"{part.source} cannot assign")
            self.set(part.name, self.string(part.operands[0]), index)
            return [(self.get(part.name, index) or "", part.quoted)]
        pieces = self._pieces(part.operands[0])
        if not part.quoted:
            return pieces
        return [piece if piece is None else (piece[0], True) for piece in pieces] or [("", True)]

    def _slice(self, part: Parameter, values: list[str]) -> list[str]:
        offset, length = self._offsets(part)
        self._check_count(values)
        numbers: Iterable[int] = map(int, self.keys(part.name)) if part.name not in "@*" else itertools.count()
        values = [self.script, *values] if part.name in "@*" else values
        numbered = list(zip(numbers, values, strict=False))
        if offset < 0:
            offset += max((number for number, _ in numbered), default=-1) + 1
            if offset < 0:
                return []
        found = [value for number, value in numbered if number >= offset]
        if length is not None and length < 0:
            raise Refusal(self.unknowns.line, f"{part.source} fails: the length is negative")
        return found[:length]

    def _offsets(self, part: Parameter) -> tuple[int, int | None]:
        numbers = [self.needed_number(word, f"{part.source} fails") for word in part.operands]
        return numbers[0], numbers[1] if len(numbers) > 1 else None

    def _changed_or_unknown(self, part: Parameter, value: str) -> str:
        try:
            return self._changed(part, value)
        except Undetermined as error:
            return self.unknowns.derive(error.unknown, "list" if error.unknown.kind == "list" else "output")

    def _changed(self, part: Parameter, value: str) -> str:
        """Return a value cut, replaced or in other letters."""
        operator = part.operator
        known = self.unknowns.known
        if operator[0] in "#%":
            return trimmed(self.pattern(part.operands[0]), known(value), operator, self.unknowns)
        if operator[0] == "/":
            new = self.string(part.operands[1]) if len(part.operands) > 1 else ""
            return replaced(self.pattern(part.operands[0]), known(value), new, operator, self.unknowns)
        text = known(value)
        if operator[0] in "^," and not part.operands[0]:
            change = str.upper if operator[0] == "^" else str.lower
            return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
        if operator != ":":
            raise Refusal(self.unknowns.line, f"{part.source} is not supported")
        offset, length = self._offsets(part)
        if offset < 0:
            offset += len(text)
            if offset < 0:
                return ""
        end = len(text) if length is None else offset + length if length >= 0 else len(text) + length
        if end < offset and (length or 0) < 0 and offset <= len(text):
            raise Refusal(self.unknowns.line, f"{part.source} fails: the length is negative")
        return text[offset:end]


def _mark(part: Parameter) -> str:
    """Return ``@`` or ``*`` where all elements are meant."""
    if part.index is None:
        return part.name if part.name in "@*" else ""
    return next((mark for mark in "@*" if part.index == (Text(mark, quoted=False),)), "")


def _closing(atoms: list[str | Part], start: int) -> tuple[list[int], int | None]:
    """Return where the commas of a brace are, and where it closes."""
    depth = 0
    commas: list[int] = []
    for at in range(start, len(atoms)):
        depth += (atoms[at] == "{") - (atoms[at] == "}")
        if depth == 0:
            return commas, at
        if atoms[at] == "," and depth == 1:
            commas.append(at)
    return commas, None
