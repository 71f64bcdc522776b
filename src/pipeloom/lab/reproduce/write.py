"""Run parts of an evaluation and write what they found: one page per paper, pictures beside it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pipeloom import __version__
from pipeloom.errors import InputError
from pipeloom.io import make_folder, write_text
from pipeloom.lab.reproduce.commit import source_commit
from pipeloom.lab.reproduce.part import PAPERS, Options, Outcome, Part, parts_of, preface_of
from pipeloom.report import join_sections, markdown_table, sections

CLAIMS = "claims"
"""The section that opens a page: what the paper claims and whether it was reached. People write it; it stays."""
_TITLE = "# {title}: the evaluation again"
_ABOUT = """Written by `pipeloom reproduce {paper}`, but for the first table: a section for every part;
`pipeloom reproduce {paper} PART` makes one again. Every section names its seeds and the kind of its times. Columns
headed "paper" are quotations and enter no computation.
"""
_KINDS = {
    "emulated": "emulated (no accelerator was used)",
    "planned": "planned: schedules simulated on measured layer costs",
    "measured": "measured on this machine",
    "processor": "processor seconds of this machine",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """A part that begins, or has ended."""

    part: Part
    elapsed_s: float | None
    """None: it begins."""


def reproduce(
    paper: str,
    names: Sequence[str],
    options: Options,
    out: Path,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[Path, dict[str, Outcome]]:
    """Run the named parts, or all, and write ``out/PAPER.md`` and ``out/PAPER/*.svg``.

    Each part is written as soon as it has ended, so a run that is stopped leaves what it has; sections of parts
    that are not run stay as they are, and so does the table of claims that opens the page.

    Returns
    -------
    tuple of Path and dict
        The page, and the outcome of every part that was run.

    Raises
    ------
    InputError
        No such paper or part.
    """
    parts = parts_of(paper)
    known = {part.name: part for part in parts}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"part of {paper}", f"{unknown[0]!r} is none of {', '.join(known)}")
    source_commit()
    make_folder(out / paper)
    page = out / f"{paper}.md"
    outcomes = {}
    for part in (part for part in parts if not names or part.name in names):
        on_progress(Progress(part, None))
        begin, begin_cpu = time.monotonic(), sum(os.times()[:4])
        outcome = part.run(options)
        elapsed, spent = time.monotonic() - begin, sum(os.times()[:4]) - begin_cpu
        for figure in outcome.figures:
            write_text(out / paper / f"{figure.name}.svg", figure.svg)
        old = sections(page.read_text(encoding="utf-8")) if page.exists() else {}
        old[part.name] = section(paper, part, outcome, options, elapsed, spent)
        old["about"] = "\n".join(filter(None, (_ABOUT.format(paper=paper), preface_of(paper))))
        order = (CLAIMS, "about", *(p.name for p in parts))
        write_text(page, join_sections(_TITLE.format(title=PAPERS[paper]), order, old))
        outcomes[part.name] = outcome
        on_progress(Progress(part, elapsed))
    return page, outcomes


def section(paper: str, part: Part, outcome: Outcome, options: Options, elapsed_s: float, processor_s: float) -> str:
    """One part as Markdown."""
    facts = [f"Repeats {part.source}. Times are {_KINDS[part.time]}.", *_amounts(part, options)]
    if outcome.devices:
        facts.append(f"Devices: {'; '.join(outcome.devices)}.")
    facts.append(
        f"Made in {elapsed_s:.0f} s, {processor_s:.0f} s of processor time, on {machine()}, {date.today()}, "
        f"Pipeloom {__version__}{f' at {commit}' if (commit := source_commit()) else ''}."
    )
    blocks = [f"## {part.title}", " ".join(facts)]
    for table in outcome.tables:
        blocks.append(f"**{table.title}**\n\n{markdown_table(table.columns, table.rows)}")
        if table.note:
            blocks.append(table.note)
    blocks += [f"![{figure.title}]({paper}/{figure.name}.svg)\n\n*{figure.title}*" for figure in outcome.figures]
    blocks += [f"- {note}" for note in outcome.notes]
    return "\n\n".join(blocks)


def _amounts(part: Part, options: Options) -> list[str]:
    """The options that make a difference to a part, as one sentence, or none."""
    plural = "s" if options.iterations > 1 else ""
    said = {
        "seeds": f"seeds {', '.join(map(str, options.seeds))}",
        "iterations": f"{options.iterations} iteration{plural}",
        "search": f"{part.search_factor * options.search_s:g} s of search {part.searched}",
        "solver": f"solvers cut after {options.solver_s:g} s",
    }
    words = [text for name, text in said.items() if name in part.uses]
    if options.full and words:
        words.append("as large as in the paper")
    sentence = "; ".join(words)
    return [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []


def machine() -> str:
    """Processor, cores and Python of this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    name = named or platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} hardware threads, Python {platform.python_version()}"
