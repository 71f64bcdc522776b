"""`make bench`: run every benchmark and write docs/benchmarks.md and docs/notes/benchmarks.md, a section each.

``python -m benchmarks planning`` runs one by name; the other sections stay as they are. ``--layers FOLDER`` gives
``arrange`` and ``one_planner`` the layer files of measured models; ``--rows NAMES`` prints some rows of ``one_planner``
and writes nothing.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from datetime import date
from importlib import import_module
from pathlib import Path

from pipeloom.io import write_text
from pipeloom.report import join_sections, sections
from pipeloom_lab.reproduce.provenance import machine

RESULTS = (
    "planning",
    "search",
    "arrange",
    "executor",
    "pipelining",
    "megatron_steps",
    "emulated",
    "beside",
    "startup",
    "slow_ranks",
    "hosts",
    "real",
    "traces",
    "emulator",
    "gpu",
)
"""Sections of docs/benchmarks.md."""
DETAILS = (
    "one_planner",
    "joint",
    "replicas",
    "large",
    "threads",
    "overtaking",
    "methods",
    "scaling",
    "list_scheduling",
    "streams",
    "ablation",
)
"""Sections of docs/notes/benchmarks.md."""
SECTIONS = (*RESULTS, *DETAILS)
_DOCS = Path(__file__).parents[1] / "docs"
_TEXT = """Written by `make bench`. Times are CPU time of one core unless a table says otherwise. Every section names
its machine and date. Emulated and planned times are never called measured.
"""
PAGES = (
    # The summary and the remarks are written by hand and stay.
    (_DOCS / "benchmarks.md", f"# Benchmarks\n\n{_TEXT}", ("summary", *RESULTS)),
    (_DOCS / "notes" / "benchmarks.md", f"# Notes on the benchmarks\n\n{_TEXT}", (*DETAILS, "remarks")),
)
"""File, beginning and sections of every page."""


def main(names: list[str], layers: Path | None = None, rows: tuple[str, ...] = ()) -> None:
    """Run the named benchmarks, or all; ``layers`` and ``rows`` go to those that take them."""
    unknown = set(names) - set(SECTIONS)
    if unknown:
        sys.exit(f"benchmarks: {', '.join(sorted(unknown))} unknown; there are {', '.join(SECTIONS)}")
    if rows and not names:
        names = ["one_planner"]
    for name in names or SECTIONS:
        module = import_module(f"benchmarks.{name}")
        if not names and not getattr(module, "available", lambda: True)():
            continue
        print(f"{module.TITLE} ...", flush=True)
        takes = inspect.signature(module.run).parameters
        given = {"layers": layers, "rows": rows}
        body = module.run(**{name: value for name, value in given.items() if name in takes})
        print(body, flush=True)
        if rows:
            continue
        # Read only now, and written at once: another run may have written other sections meanwhile.
        target, head, order = next(page for page in PAGES if name in page[2])
        bodies = sections(target.read_text()) if target.exists() else {}
        bodies[name] = f"## {module.TITLE}\n\nOn {machine()}, {date.today()}.\n\n{body}"
        write_text(target, join_sections(head, order, bodies))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--layers", type=Path, metavar="FOLDER", help="measured layers, for arrange")
    parser.add_argument("--rows", default="", metavar="NAMES", help="of one_planner, with commas between")
    given = parser.parse_args()
    main(given.names, given.layers, tuple(filter(None, given.rows.split(","))))
