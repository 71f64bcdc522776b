"""Print which figures and verdicts changed between two recorded results, as a Markdown table.

``python scripts/compare_results.py OLD [NEW]``: each is a commit, or a folder with an ``index.md``. NEW is by default
``docs/results`` of the working tree. The column *why* is to be filled in by hand.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeloom_lab.reproduce.changes import changes_table

ROOT = Path(__file__).parents[1]
INDEX = "docs/results/index.md"


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
