"""Replicas of a folder on several hosts: all ranks learn of a failure on one rank, and none of them waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.runtime.launch.processes import launch

from .failing_replicas import copy_in_spite, keep_on_hosts, record_on_hosts

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("write", "Is a directory"),
        ("read", "Input/output error"),
        ("list", "Input/output error"),
        ("alone", "No such file or directory"),
        ("name", "Permission denied"),
        ("folder", "none"),
        ("nothing", "none"),
    ],
)
def test_a_rank_that_fails_is_waited_for_by_nobody(tmp_path: Path, how: str, reported: str) -> None:
    # Ranks wait for one another for an hour, so a rank that is left waiting exceeds the time limit of the test.
    there, here = launch(copy_in_spite, 2, tmp_path, how)
    assert there == reported
    # What was sent before is there; of the file that failed nothing is.
    assert here == (f"{reported} a" if how == "write" else reported)
    if how in ("nothing", "folder"):
        assert {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()} == {
            name: name.encode() * 100 for name in ("a", "b", "c")
        }


def test_a_checkpoint_counts_where_every_host_has_it_whole(tmp_path: Path) -> None:
    seen = [[2], [2, 4], [2, 4, 6], 6, 6, 6, [7]]
    assert launch(keep_on_hosts, 2, tmp_path) == [seen, seen]


@pytest.mark.parametrize("shared", ["run", "checkpoints"])
def test_a_history_is_copied_to_those_who_do_not_share_its_folder(tmp_path: Path, shared: str) -> None:
    # A copy onto itself would lose what rank 0 appends meanwhile.
    assert launch(record_on_hosts, 2, tmp_path, shared) == [(True, "0"), (shared == "run", "0")]
