"""Print which figures and verdicts changed between two recorded results, as a Markdown table.

``python scripts/compare_results.py OLD [NEW]``: each is a commit, or a folder with an ``index.md``. NEW is by default
``docs/results`` of the working tree. The column *why* is to be filled in by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeloom.report import markdown_table

ROOT = Path(__file__).parents[1]
INDEX = "docs/results/index.md"
_ANCHOR = re.compile(r'^<a id="([^"]+)"></a>(.*)$')
_CELLS = re.compile(r"(?<!\\)\|")


class Entry(NamedTuple):
    """A claim or a figure of ours in an index. ``verdict`` is empty for a figure that no paper claims."""

    text: str
    ours: str
    verdict: str


class Change(NamedTuple):
    """An entry of two indexes that differs; None where an index does not have it."""

    name: str
    old: Entry | None
    new: Entry | None


def entries(index: str) -> dict[str, Entry]:
    """Return the claims and our own figures of an index page, by anchor."""
    found, header = {}, list[str]()
    for line in index.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]]
        header = header or cells
        row = dict(zip(header, cells, strict=False))
        anchor = _ANCHOR.match(cells[0])
        if anchor is not None and "ours" in row:
            found[anchor[1]] = Entry(anchor[2], row["ours"], row.get("verdict", ""))
    return found


def changes(old: Mapping[str, Entry], new: Mapping[str, Entry]) -> Iterator[Change]:
    """Yield what differs: changed verdicts first, each kind in the order of the new index, then what is gone."""
    names = [*new, *(name for name in old if name not in new)]
    differ = [name for name in names if old.get(name, Entry("", "", ""))[1:] != new.get(name, Entry("", "", ""))[1:]]

    def same_verdict(name: str) -> bool:
        return name in old and name in new and old[name].verdict == new[name].verdict

    for name in sorted(differ, key=same_verdict):
        yield Change(name, old.get(name), new.get(name))


def changes_table(old: str, new: str) -> str:
    """Return the table of what changed between two index pages. The reasons are to be filled in by hand."""
    before, after = entries(old), entries(new)
    rows = []
    for change in changes(before, after):
        entry = change.new or change.old
        assert entry is not None
        values = [cell for each in (change.old, change.new) for cell in (("", "") if each is None else each[1:])]
        rows.append((f"[{entry.text}](index.md#{change.name})", values[0], values[2], values[1], values[3], ""))
    verdicts = sum(row[3] != row[4] for row in rows)
    head = (
        f"{len(rows)} of {len(before.keys() | after.keys())} figures changed, {verdicts} of them with another verdict."
    )
    columns = ("figure", "old", "new", "old verdict", "new verdict", "why")
    return f"{head}\n\n{markdown_table(columns, rows, words=True)}" if rows else head


def index_of(where: str) -> str:
    """Return the index page of a folder or of a commit."""
    if Path(where).is_dir():
        return (Path(where) / "index.md").read_text()
    shown = subprocess.run(
        ["git", "-C", str(ROOT), "show", f"{where}:{INDEX}"], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        sys.exit(f"{where}: is neither a folder nor a commit with {INDEX}: {shown.stderr.strip()}")
    return shown.stdout


def main() -> None:
    """Print the table."""
    if not 2 <= len(sys.argv) <= 3:
        sys.exit((__doc__ or "").strip())
    old, new = sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else str(ROOT / "docs" / "results")
    print(changes_table(index_of(old), index_of(new)))


if __name__ == "__main__":
    main()
