"""Pages of the papers, written from records alone, and CSV files of long tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from pipeloom.report import markdown_table
from pipeloom_lab.reproduce.claims_file import paper_claims
from pipeloom_lab.reproduce.part import PAPERS, Figure, Settings, Table, read_data
from pipeloom_lab.reproduce.record import Record

MOST_ROWS = 20
"""Longest table on a page; a longer one becomes a CSV file."""
_KINDS = {
    "emulated": "emulated (no accelerator was used)",
    "planned": "planned: schedules simulated on measured layer costs",
    "measured": "measured on this machine",
    "processor": "processor seconds of this machine",
}


def opening_of(paper: str, records: Mapping[str, Record]) -> Figure | None:
    """Draw the opening figure of a paper's page from its records; None if a number is not recorded."""
    try:
        return paper_claims(paper).opening.draw(records)
    except LookupError:
        return None


def paper_page(paper: str, records: Mapping[str, Record], opening: Figure | None = None) -> str:
    """Return the page of a paper: opening figure, figures, and short tables."""
    texts = read_data("pages")
    head = [texts["paper_head"].format(title=PAPERS[paper], paper=paper).strip()]
    if opening is not None:
        head.append(f"![{opening.title}]({paper}/{opening.name}.svg)\n\n*{opening.title}.*")
    head += ["**Words**", texts["words"][paper].strip()]
    return "\n\n".join([*head, *(section(paper, record) for record in records.values())]) + "\n"


def long_tables(record: Record) -> dict[str, str]:
    """Return the tables that are too long for the page, as CSV by file name."""
    return {_file_of(record, table): _csv(table) for table in record.tables if len(table.rows) > MOST_ROWS}


def section(paper: str, record: Record) -> str:
    """Return one part as Markdown: figures, short tables, links to long ones, notes, and provenance."""
    blocks = [f"## {record.title}"]
    blocks += [f"![{title}]({paper}/{name}.svg)\n\n*{title}*" for name, title in record.figures.items()]
    for table in record.tables:
        if len(table.rows) > MOST_ROWS:
            rows = f"[{len(table.rows)} rows]({paper}/{_file_of(record, table)}): {'; '.join(table.columns)}."
            blocks.append(f"**{table.title}**: {rows}")
        else:
            blocks.append(f"**{table.title}**\n\n{markdown_table(table.columns, table.rows)}")
        if table.note:
            blocks.append(table.note)
    blocks += [f"- {note}" for note in record.notes]
    return "\n\n".join([*blocks, _facts(record)])


def _facts(record: Record) -> str:
    """Return the source, kind of time, settings, devices, and provenance of a record."""
    made = record.made
    spent = "" if made.processor_seconds is None else f", {made.processor_seconds:.0f} s of processor time"
    facts = [f"Repeats {record.source}. Times are {_KINDS[record.time]}.", *_amounts(record.settings, record.searched)]
    if record.devices:
        facts.append(f"Devices: {'; '.join(record.devices)}.")
    commit = f" at {made.commit}" if made.commit else ""
    facts.append(
        f"Made in {made.seconds:.0f} s{spent}, on {made.machine}, {made.day}, Pipeloom {made.version}{commit}."
    )
    return " ".join(facts)


def _amounts(settings: Settings, searched: str) -> list[str]:
    """Return the settings as one sentence, or nothing."""
    words = []
    if settings.seeds is not None:
        words.append(f"seeds {', '.join(map(str, settings.seeds))}")
    if settings.iterations is not None:
        words.append(f"{settings.iterations} iteration{'s' if settings.iterations > 1 else ''}")
    if settings.search_s is not None:
        words.append(f"{settings.search_s:g} s of search {searched}")
    if settings.solver_s is not None:
        words.append(f"solvers cut after {settings.solver_s:g} s")
    if settings.full and words:
        words.append("as large as in the paper")
    sentence = "; ".join(words)
    return [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []


def _file_of(record: Record, table: Table) -> str:
    return f"{record.part}-{record.tables.index(table) + 1}.csv"


def _csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
    return text.getvalue()
