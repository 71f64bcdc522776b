"""Candidates as arrays: read once for a graph, and nobody may write to them."""

from __future__ import annotations

import pytest

from pipeloom.taskgraph.candidates import Candidate, candidate_cube

KEEP = Candidate("keep", 3, 6, 0, 100, 0)
LEAN = Candidate("recompute", 3, 9, 0, 10, 0)


def test_what_was_read_last_is_not_read_again_and_others_are() -> None:
    candidates, other = ((KEEP, LEAN), (KEEP,)), ((LEAN,), (LEAN,))
    cube, lengths = candidate_cube(candidates)
    assert cube.tolist() == [[[3, 6, 0, 100, 0, 0], [3, 9, 0, 10, 0, 0]], [[3, 6, 0, 100, 0, 0]] * 2]
    assert lengths.tolist() == [2, 1]
    assert candidate_cube(candidates)[0] is cube
    assert candidate_cube(other)[0].tolist() == [[[3, 9, 0, 10, 0, 0]]] * 2
    # Equal ones are not the same ones.
    assert candidate_cube(((KEEP, LEAN), (KEEP,)))[0] is not cube


def test_arrays_that_are_shared_cannot_be_written_to() -> None:
    cube, _ = candidate_cube(((KEEP,),))
    with pytest.raises(ValueError, match="read-only"):
        cube[0, 0, 0] = 1
