"""Read the claims of a paper, our goals for it, and the figure that opens its page from ``PAPER/claims.toml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeloom_lab.figures import Axis, Mark, bar_figure
from pipeloom_lab.reproduce.claims import (
    Cell,
    Claim,
    CompoundGain,
    Minimum,
    OwnFigure,
    Quantity,
    RelativeError,
    Speedup,
)
from pipeloom_lab.reproduce.part import Figure, read_data
from pipeloom_lab.reproduce.record import Record


@dataclass(frozen=True, slots=True)
class Opening:
    """A bar chart of recorded numbers, with the paper's numbers as diamonds or lines."""

    title: str
    axis: str
    groups: Sequence[str]
    format: str
    bars: Mapping[str, Sequence[Quantity]]
    points: Mapping[str, Sequence[float]] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)

    def draw(self, records: Mapping[str, Record]) -> Figure:
        """Draw the chart.

        Raises
        ------
        LookupError
            A number is not recorded.
        """
        bars = {name: [quantity.number(records).value for quantity in each] for name, each in self.bars.items()}
        marks = [Mark(value, label) for label, value in self.marks.items()]
        y = Axis(self.axis)
        svg = bar_figure(self.groups, bars, y=y, points=self.points or None, marks=marks, values=self.format)
        return Figure("opening", self.title, svg)


@dataclass(frozen=True, slots=True)
class Gains:
    """How much faster Pipeloom is on the models of a paper, in per cent; the paper's bars in the index's figure."""

    groups: Sequence[str]
    baseline: Sequence[Quantity]
    """Gains over the fastest baseline, one per group."""
    system: Sequence[Quantity]
    """Gains over the paper's own system."""


@dataclass(frozen=True, slots=True)
class PaperClaims:
    """Everything that the claims file of a paper declares, in its order."""

    claims: tuple[Claim, ...]
    goals: tuple[Claim, ...]
    """What we set out to reach, judged as claims are."""
    own: tuple[OwnFigure, ...]
    opening: Opening
    gains: Gains


@functools.cache
def paper_claims(paper: str) -> PaperClaims:
    """Read the claims file of a paper."""
    tables = read_data(f"{paper}/claims")
    opening, gains = tables["opening"], tables["gains"]
    bars = {name: _quantities(each) for name, each in opening["bars"].items()}
    return PaperClaims(
        tuple(_claim(fields) for fields in tables["claims"]),
        tuple(_claim(fields) for fields in tables["goals"]),
        tuple(OwnFigure(**fields | {"ours": _quantities(fields["ours"])}) for fields in tables["own"]),
        Opening(**opening | {"bars": bars}),
        Gains(gains["groups"], _quantities(gains["baseline"]), _quantities(gains["system"])),
    )


def _claim(fields: dict[str, Any]) -> Claim:
    values = {name: _quantity(each) for name, each in fields.get("values", {}).items()}
    return Claim(**fields | {"ours": _quantities(fields.get("ours", ())), "values": values})


def _quantities(tables: Sequence[dict[str, Any]]) -> tuple[Quantity, ...]:
    return tuple(_quantity(each) for each in tables)


def _quantity(fields: dict[str, Any]) -> Quantity:
    if "minimum" in fields:
        return Minimum(tuple(_cell(each) for each in fields["minimum"]))
    if "gains" in fields:
        gains, over = (tuple(_cell(each) for each in fields[name]) for name in ("gains", "over"))
        return CompoundGain(gains, over)
    if "speedup" in fields:
        return Speedup(_cell(fields["speedup"]), _cell(fields["over"]) if "over" in fields else None)
    if "error" in fields:
        return RelativeError(_cell(fields["error"]), _cell(fields["of"]))
    return _cell(fields)


def _cell(fields: dict[str, Any]) -> Cell:
    row = tuple(word if isinstance(word, str) else tuple(word) for word in fields.get("row", ()))
    minus = _cell(fields["minus"]) if "minus" in fields else None
    return Cell(**fields | {"row": row, "minus": minus})
