"""`make bench`: run every benchmark and write docs/benchmarks.md, a section each.

``python -m benchmarks planning`` runs one by name; the other sections stay as they are.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from datetime import date
from importlib import import_module
from pathlib import Path

from pipeloom.io import write_text

SECTIONS = ("planning", "search", "executor", "emulated", "emulator")
TARGET = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

Written by `make bench`. Times are CPU time of one core unless a table says otherwise; every section names the
machine and the day it was taken. Emulated and planned times are never called measured.
"""


def machine() -> str:
    """Processor and cores of this machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    return f"{model}, {len(os.sched_getaffinity(0))} hardware threads, Python {platform.python_version()}"


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all."""
    unknown = set(names) - set(SECTIONS)
    if unknown:
        sys.exit(f"benchmarks: {', '.join(sorted(unknown))} unknown; there are {', '.join(SECTIONS)}")
    old = TARGET.read_text() if TARGET.exists() else ""
    sections = dict(re.findall(r"^<!-- (\w+) -->\n(.*?)(?=^<!-- |\Z)", old, re.MULTILINE | re.DOTALL))
    for name in names or SECTIONS:
        module = import_module(f"benchmarks.{name}")
        print(f"{module.TITLE} ...", flush=True)
        body = module.run()
        print(body, flush=True)
        sections[name] = f"## {module.TITLE}\n\nOn {machine()}, {date.today()}.\n\n{body}\n\n"
    text = "".join(f"<!-- {name} -->\n{sections[name]}" for name in SECTIONS if name in sections)
    write_text(TARGET, f"{_HEAD}\n{text.rstrip()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
