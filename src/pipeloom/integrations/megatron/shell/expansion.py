"""Expand words as bash does: braces, parameters, commands, arithmetic, and splitting. File names are not expanded."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from typing import TypeAlias

from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.parser import Parser
from pipeloom.integrations.megatron.shell.state import State, is_name
from pipeloom.integrations.megatron.shell.syntax import (
    Arithmetic,
    Document,
    Opaque,
    Parameter,
    Part,
    Substitution,
    Text,
    Word,
)
from pipeloom.integrations.megatron.shell.values import Pattern, Refusal, Undetermined, replaced, trimmed
from pipeloom.integrations.megatron.shell.words import SyntaxProblem

Piece: TypeAlias = tuple[str, bool] | None
"""Text with whether it is quoted; None separates fields."""
_SEQUENCE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?", re.ASCII)
_INDIRECT = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(?:\[([@*]|\w+)\])?", re.ASCII)


class Expansion(State):
    """Expands words over the variables of a script."""

    @abstractmethod
    def substitute(self, part: Substitution) -> str:
        """Run commands and return what they print."""

    # ------------------------------------------------------------------ words

    def fields(self, words: tuple[Word, ...] | list[Word]) -> list[str]:
        """Expand words to arguments of a command or elements of an array."""
        found: list[str] = []
        total = 0
        first = ""
        for word in words:
            for one in self._braces(word):
                for text, quoted in self._split(self._pieces(one)):
                    total += len(text)
                    self.unknowns.charge()
                    self.unknowns.check_length(total)
                    if not quoted:
                        # What was one word within quotes is perhaps several without.
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
        parts: list[str] = []
        length = 0
        for piece in self._pieces(word):
            text = " " if piece is None else piece[0]
            length += len(text)
            self.unknowns.check_length(length)
            parts.append(text)
        return "".join(parts)

    def pattern(self, word: Word) -> Pattern:
        """Expand a word to a pattern."""
        found: Pattern = []
        for piece in self._pieces(word):
            text, quoted = (" ", True) if piece is None else piece
            found += [(char, quoted) for char in self.unknowns.known(text)]
            self.unknowns.check_length(len(found))
        if any(
            char == "(" and not literal and found[i - 1] in [(c, False) for c in "@?*+!"]
            for i, (char, literal) in enumerate(found)
            if i
        ):
            raise Refusal(self.unknowns.line, "extended patterns such as @(a|b) are not read")
        return found

    def number(self, word: Word) -> int:
        """Expand and evaluate an expression.

        Raises
        ------
        arithmetic.Failure, Undetermined
        """
        expanded = self.string(word)
        text = self.unknowns.known(expanded)
        self.unknowns.charge(len(text) // 20)
        try:
            return arithmetic.evaluate(text, self, self.unknowns.line)
        except arithmetic.Failure as error:
            unset = ", ".join(dict.fromkeys(one.source for one in self.unknowns.within(expanded)))
            raise arithmetic.Failure(f"{error}; not set in the script: {unset}" if unset else str(error)) from None

    def index(self, name: str, word: Word) -> str:
        """Return the index of an element."""
        if name in self.associative:
            return self.unknowns.known(self.string(word))
        try:
            return str(self.number(word))
        except arithmetic.Failure as error:
            raise Refusal(self.unknowns.line, f"the index of {name} is no number: {error}") from None

    def _pieces(self, word: Word) -> list[Piece]:
        found: list[Piece] = []
        for part in word:
            match part:
                case Text(text, quoted):
                    found.append((text, quoted))
                case Opaque(source, quoted):
                    found.append((self.unknowns.make(source, "text"), True))
                case Document(literal, text):
                    found.append((text if literal else self.string(self._document(text)), True))
                case Arithmetic():
                    found.append((self._number_text(part), part.quoted))
                case Substitution():
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

    def _number_text(self, part: Arithmetic) -> str:
        try:
            return str(self.number(part.expression))
        except Undetermined as error:
            return self.unknowns.again(error.unknown, "text")
        except arithmetic.Failure as error:
            raise Refusal(self.unknowns.line, f"{part.source} fails: {error}") from None

    def _split(self, pieces: list[Piece]) -> list[tuple[str, bool]]:
        """Split at characters of IFS what is not quoted; each field says whether a quote made it."""
        ifs = self.get("IFS")
        ifs = " \t\n" if ifs is None else self.unknowns.known(ifs)
        blanks = "".join(c for c in ifs if c in " \t\n")
        found: list[tuple[str, bool]] = []
        current: str | None = None
        made = False

        def close() -> None:
            nonlocal current, made
            if current is not None:
                found.append((current, made))
            current, made = None, False

        for piece in pieces:
            if piece is None:
                close()
                continue
            text, quoted = piece
            if quoted:
                current, made = (current or "") + text, True
                continue
            if not ifs or not any(c in ifs for c in text):
                current = (current or "") + text if text else current
                continue
            at = 0
            while at < len(text):
                end = at
                while end < len(text) and text[end] not in ifs:
                    end += 1
                if end > at:
                    current = (current or "") + text[at:end]
                at = end
                if at == len(text):
                    break
                while at < len(text) and text[at] in blanks:
                    at += 1
                if at < len(text) and text[at] in ifs:
                    # A separator that is no blank ends a field even where it is empty.
                    current = current or ""
                    at += 1
                    while at < len(text) and text[at] in blanks:
                        at += 1
                close()
        close()
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

    def _alternatives(self, atoms: list[str | Part], depth: int = 0) -> list[list[str | Part]]:
        if depth > 20:
            raise Refusal(self.unknowns.line, "braces are nested more than 20 deep")
        for start, atom in enumerate(atoms):
            if atom != "{":
                continue
            self.unknowns.charge((len(atoms) - start) // 50)
            commas, end = _closing(atoms, start)
            if end is None:
                continue
            inner = atoms[start + 1 : end]
            if commas:
                edges = [start, *commas, end]
                middles = [
                    one
                    for low, high in itertools.pairwise(edges)
                    for one in self._alternatives(atoms[low + 1 : high], depth + 1)
                ]
            else:
                middles = self._range(inner)
                if not middles:
                    continue
            self.unknowns.charge(len(middles))
            rest = self._alternatives(atoms[end + 1 :], depth)
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
            values, mode = self._values(part)
        except Undetermined as error:
            if self._mark(part) and part.prefix != "#":
                # How many elements there are is unknown too.
                return [(self.unknowns.make(error.unknown.source, "list"), part.quoted)]
            return [(self.unknowns.again(error.unknown), part.quoted)]
        if mode == "pieces":
            return [piece for piece in values if piece is None or isinstance(piece, tuple)]
        if mode == "one":
            return [(self._one_word(str(values[0]), part.quoted and part.index is None), part.quoted)]
        texts = [str(value) for value in values]
        self.unknowns.charge(len(texts))
        if mode == "*" and part.quoted:
            ifs = self.get("IFS")
            return [((" " if ifs is None else ifs[:1]).join(texts), True)]
        found: list[Piece] = []
        for text in texts:
            found += [(text, part.quoted), None]
        return found[:-1]

    def _values(self, part: Parameter) -> tuple[list[str] | list[Piece], str]:
        """Values of a parameter, and how they become fields: ``one``, ``@``, ``*``, or ready ``pieces``."""
        mark = self._mark(part)
        if part.prefix == "!" and not part.operator and mark:
            return list(self.keys(part.name)), mark
        if part.prefix == "!":
            part = self._target(part)
            mark = self._mark(part)
        index = None
        if part.index is not None and not mark:
            index = self.index(part.name, part.index)
        if mark:
            found = self.elements(part.name)
            if not found and self.unread and part.name not in "@*" and part.name not in self.variables:
                found = [self.unknowns.make(f"{part.source}, which {self.unread} may set,", "list")]
            value = " ".join(found) if found else None
        else:
            value = self.get(part.name, index)
            found = [] if value is None else [value]
        if part.prefix == "#":
            if mark:
                for each in found:
                    self._check_count(each)
                return [str(len(found))], "one"
            return [str(len(self.unknowns.known(self.missing(f"${part.name}") if value is None else value)))], "one"
        if part.operator.strip(":") in ("-", "=", "?", "+") and part.operator != ":":
            decided = self._default(part, value, index)
            if decided is not None:
                return decided, "pieces"
        if mark and part.operator == ":":
            return self._slice(part, found), mark
        if not part.operator:
            return (found, mark) if mark else ([self.missing(f"${part.name}") if value is None else value], "one")
        if part.operator.strip(":") in ("-", "=", "?", "+"):
            return (found, mark) if mark else ([value or ""], "one")
        return [self._changed_or_unknown(part, each) for each in found or ([] if mark else [""])], mark or "one"

    def _check_count(self, element: str) -> None:
        for unknown in self.unknowns.within(element):
            if unknown.kind == "list" or (unknown.kind == "output" and len(element) == 1):
                raise Undetermined(unknown)

    def _mark(self, part: Parameter) -> str:
        """``@`` or ``*`` where all elements are meant."""
        if part.index is not None:
            marks = [mark for mark in "@*" if part.index == (Text(mark, quoted=False),)]
            return marks[0] if marks else ""
        return part.name if part.name in "@*" else ""

    def _target(self, part: Parameter) -> Parameter:
        name = self.get(part.name, None if part.index is None else self.index(part.name, part.index))
        text = self.unknowns.known(name or "")
        found = _INDIRECT.fullmatch(text)
        if found is None:
            raise Refusal(self.unknowns.line, f"{part.source} names {text!r}, which is no variable")
        inner = None if found[2] is None else (Text(found[2], False),)
        return Parameter(found[1], part.source, part.quoted, inner, "", part.operator, part.operands)

    def _default(self, part: Parameter, value: str | None, index: str | None) -> list[Piece] | None:
        """What ``-``, ``=``, ``?`` or ``+`` puts in the place of a value; None: the value stays."""
        kind = part.operator.strip(":")
        empty = value is None or (part.operator[0] == ":" and self.unknowns.is_unset(value))
        if kind == "+":
            if value is None:
                self.unknowns.inspected.setdefault(f"${part.name}", self.unknowns.line)
            return [("", part.quoted)] if empty else self._operand(part)
        if not empty:
            return None
        if kind == "?":
            return [(self.unknowns.make(f"${part.name}", "required"), part.quoted)]
        if kind == "-":
            return self._operand(part)
        if not is_name(part.name):
            raise Refusal(self.unknowns.line, f"{part.source} cannot assign")
        self.set(part.name, self.string(part.operands[0]), index)
        return [(self.get(part.name, index) or "", part.quoted)]

    def _operand(self, part: Parameter) -> list[Piece]:
        pieces = self._pieces(part.operands[0])
        if part.quoted:
            return [piece if piece is None else (piece[0], True) for piece in pieces] or [("", True)]
        return pieces

    def _slice(self, part: Parameter, values: list[str]) -> list[str]:
        offset, length = self._offsets(part)
        for each in values:
            self._check_count(each)
        if part.name in "@*":
            numbered = list(enumerate([self.script, *values]))
            last = len(values) + 1
        else:
            numbered = list(zip(map(int, self.keys(part.name)), values, strict=True))
            last = max((number for number, _ in numbered), default=-1) + 1
        if offset < 0:
            offset += last
            if offset < 0:
                return []
        found = [value for number, value in numbered if number >= offset]
        if length is not None and length < 0:
            raise Refusal(self.unknowns.line, f"{part.source} fails: the length is negative")
        return found if length is None else found[:length]

    def _offsets(self, part: Parameter) -> tuple[int, int | None]:
        try:
            numbers = [self.number(word) for word in part.operands]
        except arithmetic.Failure as error:
            raise Refusal(self.unknowns.line, f"{part.source} fails: {error}") from None
        return numbers[0], numbers[1] if len(numbers) > 1 else None

    def _changed_or_unknown(self, part: Parameter, value: str) -> str:
        try:
            return self._changed(part, value)
        except Undetermined as error:
            return self.unknowns.again(error.unknown, "list" if error.unknown.kind == "list" else "output")

    def _changed(self, part: Parameter, value: str) -> str:
        """A value cut, replaced or in other letters."""
        operator = part.operator
        if operator in ("#", "##", "%", "%%"):
            return trimmed(self.pattern(part.operands[0]), self.unknowns.known(value), operator, self.unknowns)
        if operator.startswith("/"):
            new = self.string(part.operands[1]) if len(part.operands) > 1 else ""
            pattern = self.pattern(part.operands[0])
            return replaced(pattern, self.unknowns.known(value), new, operator, self.unknowns)
        if operator in ("^", "^^", ",", ",,") and not part.operands[0]:
            text = self.unknowns.known(value)
            change = str.upper if operator[0] == "^" else str.lower
            return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
        if operator == ":":
            text = self.unknowns.known(value)
            offset, length = self._offsets(part)
            if offset < 0:
                offset += len(text)
                if offset < 0:
                    return ""
            end = len(text) if length is None else offset + length if length >= 0 else len(text) + length
            if end < offset and (length or 0) < 0 and offset <= len(text):
                raise Refusal(self.unknowns.line, f"{part.source} fails: the length is negative")
            return text[offset:end]
        raise Refusal(self.unknowns.line, f"{part.source} is not read")


def _closing(atoms: list[str | Part], start: int) -> tuple[list[int], int | None]:
    """Where the commas of a brace are, and where it closes."""
    depth = 0
    commas: list[int] = []
    for at in range(start, len(atoms)):
        atom = atoms[at]
        if atom == "{":
            depth += 1
        elif atom == "}":
            depth -= 1
            if depth == 0:
                return commas, at
        elif atom == "," and depth == 1:
            commas.append(at)
    return commas, None
