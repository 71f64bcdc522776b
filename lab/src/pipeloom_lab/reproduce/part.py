"""Parts of the evaluations: their options, their outcome, and the files that describe them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any, Literal, NamedTuple

from pipeloom.errors import InputError

PAPERS = {"dip": "DIP and PipeWeaver", "pipetune": "PipeTune", "adaptis": "AdaPtis"}
"""Packages in this folder, and the paper that each repeats."""

Setting = Literal["seeds", "iterations", "search", "solver"]
TimeKind = Literal["emulated", "planned", "measured", "processor"]
"""Emulated: times from the emulator. Planned: schedules of profiled costs. Measured: real runs that compute or sleep.
Processor: CPU time of our own programs (search, tuning)."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much work a reproduction does."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the sampled batches and of the searches."""
    iterations: int = 10
    """Batches that every mean is taken over, where the paper has more."""
    search_s: float = 1.0
    """Processor seconds of our search for one batch; in DIP's evaluation a tenth of those from its samples on."""
    solver_s: float = 60.0
    """Time limit of an exact solver in seconds."""
    full: bool = False
    """Use as many iterations, seconds and sizes as the paper. This may take days."""

    def __post_init__(self) -> None:
        """Raise `InputError` for empty or non-positive amounts."""
        if not self.seeds:
            raise InputError("--seeds", "is 0", "use at least 1")
        for name, value in (
            ("--iterations", self.iterations),
            ("--search", self.search_s),
            ("--solver", self.solver_s),
        ):
            if not 0 < value < 1e7:
                raise InputError(name, f"{value:g} is not above 0 and below 10000000")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options as one part used them; None for an option that it ignores."""

    seeds: tuple[int, ...] | None = None
    iterations: int | None = None
    search_s: float | None = None
    solver_s: float | None = None
    full: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. Our numbers and the paper's are in separate columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """Assumptions, and why numbers differ."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for rows of another width and for duplicate columns."""
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"table {self.title!r}: two columns of {self.columns} have the same name")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {row} has not {len(self.columns)} cells")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as SVG."""

    name: str
    """Stem of the file name."""
    title: str
    svg: str


class Line(NamedTuple):
    """A line of a figure, point by point."""

    x: list[float]
    y: list[float]

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        self.x.append(x)
        self.y.append(y)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part."""

    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """Names of the device tables behind the times, and whether each is calibrated or from a data sheet."""


@dataclass(frozen=True, slots=True)
class Part:
    """One table or figure of a paper, or several that are computed together."""

    name: str
    """The name on the command line, for example ``table-5``."""
    title: str
    source: str
    """The place in the paper, for example DIP Table 5, section 7.3."""
    time: TimeKind
    run: Callable[[Options], Outcome]
    uses: tuple[Setting, ...] = ("seeds", "iterations", "search")
    """Options that the part depends on; its section on the page lists them."""
    searched: str = "a batch"
    """The unit of work that ``search_s`` is spent on."""
    search_factor: float = 1.0
    """Multiplies ``search_s``. A placement is made once, before training, and gets several times a batch's."""
    shares: str = ""
    """Parts with the same value reuse each other's timings, so one process runs them in turn."""
    alone: bool = False
    """If true, nothing runs at the same time, because other work would disturb its timings."""
    most_iterations: int | None = None
    """Upper limit of ``iterations`` without ``--full``."""

    def given(self, options: Options) -> Options:
        """Return the options that the part runs with."""
        options = replace(options, search_s=self.search_factor * options.search_s)
        if self.most_iterations is None or options.full:
            return options
        return replace(options, iterations=min(options.iterations, self.most_iterations))

    def settings(self, options: Options) -> Settings:
        """Return the options that the part depends on."""
        return Settings(
            options.seeds if "seeds" in self.uses else None,
            self.given(options).iterations if "iterations" in self.uses else None,
            self.given(options).search_s if "search" in self.uses else None,
            options.solver_s if "solver" in self.uses else None,
            options.full,
        )


def read_data(name: str) -> dict[str, Any]:
    """Read a TOML file of this package by its path without suffix: ``pages``, ``dip/claims``."""
    return tomllib.loads(files("pipeloom_lab.reproduce").joinpath(f"{name}.toml").read_text("utf-8"))


def read_parts(paper: str, runs: Mapping[str, Callable[[Options], Outcome]]) -> tuple[Part, ...]:
    """Read the parts of a paper from its ``parts.toml``, each with the function that runs it."""
    parts = read_data(f"{paper}/parts")
    if parts.keys() != runs.keys():
        raise ValueError(f"{paper}: parts.toml and its functions differ in {sorted(parts.keys() ^ runs.keys())}")
    for fields in parts.values():
        if "uses" in fields:
            fields["uses"] = tuple(fields["uses"])
    return tuple(Part(name, run=runs[name], **fields) for name, fields in parts.items())


def parts_of(paper: str) -> tuple[Part, ...]:
    """Return all parts of a paper's evaluation, in the order of the paper.

    Raises
    ------
    InputError
        No such paper.
    """
    parts: tuple[Part, ...] = _package(paper).PARTS
    return parts


def full_of(paper: str) -> Options:
    """Return options with as many iterations, seeds and seconds as the paper."""
    full: Options = getattr(_package(paper), "FULL", Options(full=True))
    return full


def _package(paper: str) -> ModuleType:
    if paper not in PAPERS:
        raise InputError("paper", f"{paper!r} is none of {', '.join(PAPERS)}")
    return import_module(f"pipeloom_lab.reproduce.{paper}")
