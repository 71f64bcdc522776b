"""Records: the outcome of a part as a JSON file next to the pages."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec

from pipeloom import __version__
from pipeloom.errors import InputError
from pipeloom.io import make_folder, read_text, write_text
from pipeloom_lab.reproduce.part import Options, Outcome, Part, Settings, Table, TimeKind, parts_of
from pipeloom_lab.reproduce.provenance import machine, source_commit, source_digest


@dataclass(frozen=True, slots=True)
class Making:
    """When, where and from which source a record was made."""

    seconds: float
    processor_seconds: float | None
    """None if not recorded."""
    machine: str
    day: str
    version: str
    commit: str
    """Empty if unknown."""
    source_digest: str
    """`provenance.source_digest`; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of a part: everything that its section and the index need."""

    part: str
    title: str
    source: str
    time: TimeKind
    settings: Settings
    searched: str
    devices: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: dict[str, str]
    """Titles by the stem of the figure's file name."""
    notes: tuple[str, ...]
    made: Making


def record_path(out: Path, paper: str, name: str) -> Path:
    """Return the path of a part's record."""
    return out / paper / f"{name}.json"


def make_record(part: Part, options: Options) -> tuple[Record, Outcome]:
    """Run a part, and return its record and its outcome with the figures."""
    begin, begin_cpu = time.monotonic(), sum(os.times()[:4])
    outcome = part.run(part.given(options))
    elapsed, spent = time.monotonic() - begin, sum(os.times()[:4]) - begin_cpu
    made = Making(
        round(elapsed, 1), round(spent, 1), machine(), str(date.today()), __version__, source_commit(), source_digest()
    )
    record = Record(
        part.name,
        part.title,
        part.source,
        part.time,
        part.settings(options),
        part.searched,
        outcome.devices,
        outcome.tables,
        {figure.name: figure.title for figure in outcome.figures},
        outcome.notes,
        made,
    )
    return record, outcome


def make_part(part: Part, options: Options, out: Path, paper: str) -> Record:
    """Run a part, and write its figures and then its record."""
    record, outcome = make_record(part, options)
    make_folder(out / paper)
    for figure in outcome.figures:
        write_text(out / paper / f"{figure.name}.svg", figure.svg)
    write_record(record_path(out, paper, part.name), record)
    return record


def write_record(path: Path, record: Record) -> None:
    """Write a record with one line per cell, so that diffs are readable."""
    write_text(path, msgspec.json.format(msgspec.json.encode(record).decode(), indent=1) + "\n")


def read_record(path: Path) -> Record:
    """Read a record.

    Raises
    ------
    InputError
        The file cannot be read, or is no record.
    """
    try:
        return msgspec.json.decode(read_text(path), type=Record)
    except msgspec.DecodeError as error:
        raise InputError(str(path), f"is no record of a part: {error}", "remove it and make the part again") from error


def read_records(out: Path, paper: str) -> dict[str, Record]:
    """Read all records of a paper, by part, in the paper's order."""
    paths = {part.name: record_path(out, paper, part.name) for part in parts_of(paper)}
    return {name: read_record(path) for name, path in paths.items() if path.exists()}


def is_made(record: Record | None, part: Part, options: Options) -> bool:
    """Return whether a record has the current source and these options, so that a new run would repeat it."""
    return (
        record is not None
        and record.made.source_digest == source_digest()
        and record.settings == part.settings(options)
    )
