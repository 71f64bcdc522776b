"""The example of `pl.WebDataset` learns, and the page shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.on_ranks import EXAMPLES


def test_the_page_shows_the_example() -> None:
    page = (EXAMPLES.parent / "docs" / "data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert (EXAMPLES / "own_data.py").read_text() == code


@pytest.mark.full
@pytest.mark.ranks
def test_it_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_data.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    first, last = map(float, re.findall(r"loss (\S+) to (\S+),", done.stdout)[0])
    assert last < first
