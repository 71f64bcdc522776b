"""Claims of the papers: look up the recorded figures that answer them, and judge them by one set of rules.

`claims_file` reads the claims from ``PAPER/claims.toml``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, TypeVar

from pipeloom_lab.reproduce.part import Table
from pipeloom_lab.reproduce.record import Record
from pipeloom_lab.reproduce.trust import Gain, sign_probability

Rule = Literal["at least", "at most", "near", "says", "rises"]
Verdict = Literal["reached", "partly", "not reached", "not comparable", "not made"]
VERDICTS: tuple[Verdict, ...] = ("reached", "partly", "not reached", "not comparable", "not made")
Subject = Literal["Pipeloom", "written again", "setting"]
"""What our figure measures: Pipeloom; a paper's system or baselines, reimplemented from the paper; or models, data and
hardware, as sampled and emulated."""
SUBJECTS: tuple[Subject, ...] = ("Pipeloom", "written again", "setting")
Cause = Literal["", "bound", "stronger baseline", "unknown regime", "unknown"]
"""Why a claim was not reached: a lower bound excludes it; our baselines are faster than the paper's; the paper does not
say under which conditions it holds; or the cause is unknown."""
Reduction = Literal["", "min", "max", "mean"]
T = TypeVar("T")


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_SHARE = re.compile(r"(\d+) of (\d+)")
_NEAR, _HALF_NEAR = 0.10, 0.25
_GRAIN = 1e-9
"""Decimal figures have no exact form."""


_REDUCE: Mapping[Reduction, Callable[[Sequence[float]], float]] = {
    "": max,  # of one cell
    "min": min,
    "max": max,
    "mean": statistics.fmean,
}


class MissingCellError(LookupError):
    """A record lacks the table, row, column or number."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of a paper's records: from one cell of a table, or reduced from several.

    Titles, rows and columns match exactly, or else by prefix, since some end in a result ("DIP, best of its forms:
    ...").
    """

    part: str
    column: str
    row: tuple[str | tuple[str, ...], ...] = ()
    """The first cells of the row. A tuple in one place matches any of its words; empty matches every row."""
    table: str = ""
    """The title of the table; empty matches every table that has the column."""
    reduce: Reduction = ""
    """Reduces several cells; empty requires exactly one cell."""
    index: int = 0
    """Selects a number where the cell has several."""
    negated: bool = False
    """Flips the sign, which turns a change of time into the time saved."""
    minus: Cell | None = None
    """Subtracts another number."""

    def texts(self, records: Mapping[str, Record]) -> list[str]:
        """Return the texts of the cells.

        Raises
        ------
        MissingCellError
            The record has no such cells.
        """
        tables = _matching(records[self.part].tables, self.table, lambda table: table.title)
        cells = [cell for table in tables for cell in self._cells(table)]
        if not cells or (not self.reduce and len(cells) > 1):
            raise MissingCellError(f"{self.part}: {len(cells)} cells are {self.table!r}, {self.row}, {self.column!r}")
        return cells

    def _cells(self, table: Table) -> list[str]:
        rows = list(table.rows)
        for place, wanted in enumerate(self.row):
            words = (wanted,) if isinstance(wanted, str) else wanted
            names = [row[place] for row in rows]
            rows = [row for word in words for row in rows if row[place] in _matching(names, word, str)]
        columns = _matching(table.columns, self.column, str)
        return [row[table.columns.index(column)] for column in columns for row in rows]

    def number(self, records: Mapping[str, Record]) -> Figure:
        """Return the number.

        Raises
        ------
        MissingCellError
            No cell matches, or the only matching cell has no number ("out of memory").
        """
        texts = [text for text in self.texts(records) if _NUMBER.search(text)]
        read = [_numbers(text) for text in texts]
        if not read or any(len(each) <= self.index for each in read):
            raise MissingCellError(f"{self.part}: no number {self.index} in {self.texts(records)}")
        values = [each[self.index] for each in read]
        value = _REDUCE[self.reduce]([-each.value if self.negated else each.value for each in values])
        decimals = max(each.decimals for each in values)
        if self.minus is not None:
            other = self.minus.number(records)
            value, decimals = value - other.value, max(decimals, other.decimals)
        return Figure(value, decimals)


def _matching(items: Sequence[T], word: str, name: Callable[[T], str]) -> list[T]:
    """Return the items with this name, or else those whose names start with it."""
    return [item for item in items if name(item) == word] or [item for item in items if name(item).startswith(word)]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its number of decimals."""

    value: float
    decimals: int

    def __str__(self) -> str:
        """Return the number with its decimals."""
        return f"{round(self.value, self.decimals) + 0.0:.{self.decimals}f}"


def _numbers(text: str) -> list[Figure]:
    """Return the numbers in a text. "22 of 24" counts as one number, in per cent."""
    if share := _SHARE.search(text):
        return [Figure(100 * int(share[1]) / int(share[2]), 0)]
    return [Figure(float(word), len(word.partition("e")[0].partition(".")[2])) for word in _NUMBER.findall(text)]


class Quantity(Protocol):
    """A number that is looked up in records or computed from several cells."""

    @property
    def part(self) -> str:
        """The part that records it."""
        ...

    def number(self, records: Mapping[str, Record]) -> Figure:
        """Return the number."""
        ...


@dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest number of several parts."""

    cells: tuple[Cell, ...]

    @property
    def part(self) -> str:
        """The part of the first cell."""
        return self.cells[0].part

    def number(self, records: Mapping[str, Record]) -> Figure:
        """Return the number."""
        return min((cell.number(records) for cell in self.cells), key=lambda figure: figure.value)


@dataclass(frozen=True, slots=True)
class CompoundGain:
    """The product of gains, divided by other gains, in per cent.

    If the lower bound is 25 % below the best baseline, which is 20 % faster than another one, then a plan as long as
    the lower bound is 50 % faster than that one.
    """

    cells: tuple[Cell, ...]
    over: tuple[Cell, ...] = ()

    @property
    def part(self) -> str:
        """The part of the first cell."""
        return self.cells[0].part

    def number(self, records: Mapping[str, Record]) -> Figure:
        """Return the number."""
        gain, over = (
            math.prod(1 + cell.number(records).value / 100 for cell in cells) for cells in (self.cells, self.over)
        )
        return Figure(100 * (gain / over - 1), 1)


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much higher one throughput is than another, in per cent."""

    cell: Cell
    over: Cell | None = None
    """None if ``cell`` is already a ratio."""

    @property
    def part(self) -> str:
        """The part of the first cell."""
        return self.cell.part

    def number(self, records: Mapping[str, Record]) -> Figure:
        """Return the number."""
        over = 1.0 if self.over is None else self.over.number(records).value
        return Figure(100 * (self.cell.number(records).value / over - 1), 1)


@dataclass(frozen=True, slots=True)
class RelativeError:
    """The distance of one number from another, relative to the other, in per cent."""

    cell: Cell
    of: Cell

    @property
    def part(self) -> str:
        """The part of the first cell."""
        return self.cell.part

    def number(self, records: Mapping[str, Record]) -> Figure:
        """Return the number."""
        return Figure(100 * abs(self.cell.number(records).value / self.of.number(records).value - 1), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper, and which of our figures answer it."""

    name: str
    """Its anchor in the index is ``PAPER-NAME``; texts that quote it link there."""
    text: str
    where: str = ""
    """Paper, figure and section."""
    paper: str
    """The paper's figures, as many as ``ours``, or its words where it has no figure."""
    ours: tuple[Quantity, ...] = ()
    """Empty if we have not measured it. Cells if the rule is ``says``."""
    rule: Rule
    reason: str
    """One line; ``{name}`` stands for a number of ``values``, so that no figure of ours is typed."""
    values: Mapping[str, Quantity] = field(default_factory=dict)
    cause: Cause = ""
    unit: str = ""
    speedup: bool = False
    """Figures are ratios, and the part above one is compared."""
    lost: bool = False
    """Figures are shares of a whole in per cent, and the part that is lost is compared."""
    gain: Gain = ""
    """How the figures compare emulated times; empty if they do not."""
    subject: Subject = "Pipeloom"
    comparable: bool = True
    """If false, ``reason`` says why."""
    command: str = ""
    """The command that makes ours; by default the one that makes the part of ``ours``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFigure:
    """A figure of ours that our texts quote and no paper claims."""

    name: str
    text: str
    ours: tuple[Quantity, ...]
    unit: str = ""
    gain: Gain = ""


@dataclass(frozen=True, slots=True)
class Judgment:
    """A claim with our figures and the verdict."""

    claim: Claim
    ours: str
    verdict: Verdict
    reason: str
    command: str
    sign: float | None = None
    """The probability that our gains have the right sign; None if the claim compares no emulated times."""


def paper_numbers(claim: Claim) -> list[float]:
    """Return the paper's figures."""
    return [figure.value for figure in _numbers(claim.paper)]


def command_of(claim: Claim, paper: str) -> str:
    """Return the command that makes our figures."""
    return claim.command or f"pipeloom reproduce {paper} {claim.ours[0].part}"


def judge(claim: Claim, paper: str, records: Mapping[str, Record]) -> Judgment:
    """Look our figures up and compare them with the paper's.

    Raises
    ------
    MissingCellError
        A record lacks a cell that the claim names.
    """
    command, sign = command_of(claim, paper), None
    if not claim.ours or any(cell.part not in records for cell in claim.ours):
        return Judgment(claim, "not made", "not made", _reason(claim, records), command)
    if claim.rule == "says":
        texts = [text for cell in claim.ours if isinstance(cell, Cell) for text in cell.texts(records)]
        grades = [2 if claim.paper in text else 0 for text in texts]
        ours = "; ".join(dict.fromkeys(texts))
    else:
        values = [cell.number(records).value for cell in claim.ours]
        grades = _rising(values) if claim.rule == "rises" else _compared(claim, values)
        ours = quantities_text(claim.ours, claim.unit, records)
        sign = sign_probability(claim.gain, values, rises=claim.rule == "rises")
    verdict: Verdict = _verdict(grades) if claim.comparable else "not comparable"
    return Judgment(claim, ours, verdict, _reason(claim, records), command, sign)


def quantities_text(ours: Sequence[Quantity], unit: str, records: Mapping[str, Record]) -> str:
    """Return the numbers and their unit as one text.

    Raises
    ------
    LookupError
        A part is not recorded, or its record lacks a cell.
    """
    return ", ".join(str(quantity.number(records)) for quantity in ours) + f" {unit}".rstrip()


def _reason(claim: Claim, records: Mapping[str, Record]) -> str:
    found = {name: str(each.number(records)) for name, each in claim.values.items() if each.part in records}
    return claim.reason.format_map(dict.fromkeys(claim.values, "not made") | found)


def _compared(claim: Claim, values: list[float]) -> list[int]:
    """Return the grade of each figure: 2 reached, 1 partly, 0 not reached."""
    pairs = zip(values, paper_numbers(claim), strict=True)
    if claim.lost:
        return [_grade(claim.rule, 100 - value, 100 - paper) for value, paper in pairs]
    off = 1.0 if claim.speedup else 0.0
    return [_grade(claim.rule, value - off, paper - off) for value, paper in pairs]


def _grade(rule: Rule, ours: float, paper: float) -> int:
    if rule == "near":
        away = abs(ours - paper)
        return 2 if away <= _NEAR * abs(paper) + _GRAIN else 1 if away <= _HALF_NEAR * abs(paper) + _GRAIN else 0
    if rule == "at most":
        return 2 if ours <= paper + _GRAIN else 1 if ours <= 2 * paper + _GRAIN else 0
    if paper == 0:  # nothing to halve: any gain at all
        return 2 if ours > 0 else 0
    return 2 if ours >= paper - _GRAIN else 1 if ours >= paper / 2 - _GRAIN else 0


def _rising(values: list[float]) -> list[int]:
    return [2 if all(before < after for before, after in pairwise(values)) else 0]


def _verdict(grades: list[int]) -> Verdict:
    if all(grade == 2 for grade in grades):
        return "reached"
    return "partly" if any(grades) else "not reached"
