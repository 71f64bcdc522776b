"""What the papers claim, beside what is recorded of ours: looked up, and judged by one rule."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, TypeVar

from pipeloom_lab.reproduce.part import Table
from pipeloom_lab.reproduce.record import Record

Rule = Literal["at least", "at most", "near", "says", "rises"]
Verdict = Literal["reached", "partly", "not reached", "not comparable", "not made"]
VERDICTS: tuple[Verdict, ...] = ("reached", "partly", "not reached", "not comparable", "not made")
Subject = Literal["Pipeloom", "written again", "setting"]
"""What a figure of ours is of: Pipeloom; a paper's system or baselines, written again from the paper; or models, data
and hardware, as sampled and emulated."""
SUBJECTS: tuple[Subject, ...] = ("Pipeloom", "written again", "setting")
How = Literal["one", "least", "most", "mean"]
T = TypeVar("T")

RULES = """\
- A gain is *reached* where ours is at least the paper's, *partly* where it is at least half of it. Of speedups (1.34 ×)
  the part above one counts, of reductions of time how much is saved.
- A time, an error or a loss is *reached* where ours is at most the paper's, *partly* up to twice as much.
- A quantity of the workload is *reached* within 10 % of the paper's, *partly* within 25 %.
- What is said in words is *reached* where ours says the same; what is said to rise or fall, where each of ours does.
- A claim of several figures is *reached* where all are, *not reached* where none is even partly, else *partly*.
- *Not comparable* has its reason beside it. *Not made* is a miss: nothing of ours is recorded.
"""
"""How verdicts are given, as the index tells it."""

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_SHARE = re.compile(r"(\d+) of (\d+)")
_NEAR, _HALF_NEAR = 0.10, 0.25
_GRAIN = 1e-9
"""Decimal figures have no exact form."""


_COMES_TO: Mapping[How, Callable[[Sequence[float]], float]] = {
    "one": max,
    "least": min,
    "most": max,
    "mean": statistics.fmean,
}


class NotThereError(LookupError):
    """A record has no such table, row, column or number."""


@dataclass(frozen=True, slots=True)
class Found:
    """One figure of ours: where it stands in the records of a paper, or what several cells come to.

    Names match whole, or else by how they begin, since some end in what was found ("DIP, best of its forms: ...").
    """

    part: str
    column: str
    row: tuple[str | tuple[str, ...], ...] = ()
    """The first cells of the row; several words in one place: any of them; nothing: every row."""
    table: str = ""
    """The title; nothing: every table that has the column."""
    how: How = "one"
    nth: int = 0
    """Which number of the cell."""
    negated: bool = False
    """A change of time is told as what is saved."""
    minus: Found | None = None
    """What is taken off."""

    def texts(self, records: Mapping[str, Record]) -> list[str]:
        """The cells as they are written.

        Raises
        ------
        NotThereError
            The part is recorded without them.
        """
        tables = _matching(records[self.part].tables, self.table, lambda table: table.title)
        cells = [cell for table in tables for cell in self._cells(table)]
        if not cells or (self.how == "one" and len(cells) > 1):
            raise NotThereError(f"{self.part}: {len(cells)} cells are {self.table!r}, {self.row}, {self.column!r}")
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
        """The figure.

        Raises
        ------
        NotThereError
            There are no such cells, or no number in one that stands by itself ("out of memory").
        """
        texts = [text for text in self.texts(records) if _NUMBER.search(text)]
        read = [_numbers(text) for text in texts]
        if not read or any(len(each) <= self.nth for each in read):
            raise NotThereError(f"{self.part}: no number {self.nth} in {self.texts(records)}")
        values = [each[self.nth] for each in read]
        value = _COMES_TO[self.how]([-each.value if self.negated else each.value for each in values])
        decimals = max(each.decimals for each in values)
        if self.minus is not None:
            other = self.minus.number(records)
            value, decimals = value - other.value, max(decimals, other.decimals)
        return Figure(value, decimals)


def _matching(items: Sequence[T], word: str, name: Callable[[T], str]) -> list[T]:
    """Items of that very name, or else those whose names begin so."""
    return [item for item in items if name(item) == word] or [item for item in items if name(item).startswith(word)]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and with how many decimals it is told."""

    value: float
    decimals: int

    def __str__(self) -> str:
        """As it is told."""
        return f"{round(self.value, self.decimals) + 0.0:.{self.decimals}f}"


def _numbers(text: str) -> list[Figure]:
    """Numbers in a text; "22 of 24" is a share in per cent, and one number."""
    if share := _SHARE.search(text):
        return [Figure(100 * int(share[1]) / int(share[2]), 0)]
    return [Figure(float(word), len(word.partition("e")[0].partition(".")[2])) for word in _NUMBER.findall(text)]


class Looked(Protocol):
    """A figure that is looked up in records, or reckoned from several."""

    @property
    def part(self) -> str:
        """Where it stands."""
        ...

    def number(self, records: Mapping[str, Record]) -> Figure:
        """The figure."""
        ...


@dataclass(frozen=True, slots=True)
class Least:
    """The least of figures of several parts; the first part is told to make it."""

    of: tuple[Found, ...]

    @property
    def part(self) -> str:
        """Of the first."""
        return self.of[0].part

    def number(self, records: Mapping[str, Record]) -> Figure:
        """The figure."""
        return min((found.number(records) for found in self.of), key=lambda figure: figure.value)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper, and what of ours stands against it."""

    name: str
    """Of its place in the index, ``PAPER-NAME``, to which texts link that quote it."""
    text: str
    where: str
    paper: str
    """The figures as the paper has them, as many as ``ours``; what there is none for, in words."""
    ours: tuple[Found, ...]
    """Empty: not made."""
    rule: Rule
    why: str
    """One line; ``{name}`` is replaced by the figure of ``also``, so that no figure of ours is typed."""
    unit: str = ""
    also: Mapping[str, Looked] = field(default_factory=dict)
    speedup: bool = False
    """Figures are ratios, of which the part above one counts."""
    of: Subject = "Pipeloom"
    incomparable: bool = False
    """``why`` says for which reason."""
    command: str = ""
    """What makes it; nothing: the part that ``ours`` stands in."""


@dataclass(frozen=True, slots=True)
class OwnFigure:
    """A figure of ours that no paper claims and our texts quote."""

    name: str
    text: str
    ours: tuple[Looked, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim with ours beside it.

    Attributes
    ----------
    claim : Claim
    ours : str
    verdict : Verdict
    why, command : str
    """

    claim: Claim
    ours: str
    verdict: Verdict
    why: str
    command: str


def paper_numbers(claim: Claim) -> list[float]:
    """The paper's figures."""
    return [figure.value for figure in _numbers(claim.paper)]


def command_of(claim: Claim, paper: str) -> str:
    """What makes ours."""
    return claim.command or f"pipeloom reproduce {paper} {claim.ours[0].part}"


def judge(claim: Claim, paper: str, records: Mapping[str, Record]) -> Judged:
    """Look ours up and compare it.

    Raises
    ------
    NotThereError
        A part is recorded, but not what the claim looks for.
    """
    command = command_of(claim, paper)
    if not claim.ours or any(found.part not in records for found in claim.ours):
        return Judged(claim, "not made", "not made", _reason(claim, records), command)
    if claim.rule == "says":
        texts = [text for found in claim.ours for text in found.texts(records)]
        grades = [2 if claim.paper in text else 0 for text in texts]
        ours = "; ".join(dict.fromkeys(texts))
    else:
        values = [found.number(records).value for found in claim.ours]
        grades = _rising(values) if claim.rule == "rises" else _compared(claim, values)
        ours = told(claim.ours, claim.unit, records)
    verdict: Verdict = "not comparable" if claim.incomparable else _verdict(grades)
    return Judged(claim, ours, verdict, _reason(claim, records), command)


def told(ours: Sequence[Looked], unit: str, records: Mapping[str, Record]) -> str:
    """Figures and their unit as one text.

    Raises
    ------
    LookupError
        A part is not recorded, or not with these figures.
    """
    return ", ".join(str(found.number(records)) for found in ours) + f" {unit}".rstrip()


def _reason(claim: Claim, records: Mapping[str, Record]) -> str:
    found = {name: str(each.number(records)) for name, each in claim.also.items() if each.part in records}
    return claim.why.format_map(dict.fromkeys(claim.also, "not made") | found)


def _compared(claim: Claim, values: list[float]) -> list[int]:
    """Each figure's grade: 2 reached, 1 partly, 0 not."""
    off = 1.0 if claim.speedup else 0.0
    return [_grade(claim.rule, v - off, p - off) for v, p in zip(values, paper_numbers(claim), strict=True)]


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
