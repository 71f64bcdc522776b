"""A folder's copies on several hosts: what fails on one rank is told to all, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.runtime import launch

from .failing_copies import copy_in_spite

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("write", "Is a directory"),
        ("read", "Input/output error"),
        ("list", "Input/output error"),
        ("alone", "No such file or directory"),
        ("nothing", "none"),
    ],
)
def test_a_rank_that_fails_is_waited_for_by_nobody(tmp_path: Path, how: str, told: str) -> None:
    # Copies wait for one another for an hour: whoever is left waiting runs into the test's own bound.
    there, here = launch(copy_in_spite, 2, tmp_path, how)
    assert there == told
    # What was sent before is there; of the file that failed nothing is.
    assert here == (f"{told} a" if how == "write" else told)
    if how == "nothing":
        assert {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()} == {
            name: name.encode() * 100 for name in ("a", "b", "c")
        }
