"""What ranks find out about one another: whether they read the same data, and how their clocks differ."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from pipeloom.runtime.launch.coordination import SharedClock, measure_offset
from pipeloom.runtime.launch.processes import launch
from tests.runtime.other_data import AssignsHere, assigned, reported
from tests.runtime.training import DOCUMENTS, losses_undivided

pytestmark = pytest.mark.ranks

AHEAD_NS = 10**12
WRONGS = ["nothing", "other samples of equal sizes", "other contents", "another order", "an early end", "none at all"]
Reported = dict[str, tuple[int, str]]
Shares = tuple[list[float], list[tuple[str, ...]]]
Asked = tuple[tuple[int, ...], int, int]


def find_out() -> tuple[Asked, Reported, Shares]:
    """Two pipelines of two ranks; the last rank is the second one of the second replica."""
    return ask_on_ranks(), reported(2, 2, WRONGS), assigned(2, 2)


def ask_on_ranks() -> Asked:
    """Every rank's clock is ahead of the one before, and ranks 0 and 1 are of one host."""
    rank = dist.get_rank()

    def clock() -> int:
        return time.monotonic_ns() + rank * AHEAD_NS

    alone = SharedClock(None)
    assert alone.asking == ()
    assert alone.offset_ns() == 0
    shared = SharedClock(None, b"one" if rank < 2 else b"other", clock)
    first = shared.offset_ns()
    assert shared.offset_ns() == first
    return shared.asking, *measure_offset(None, (1, 2, 3), clock)


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Asked, Reported, Shares]]:
    return launch(find_out, 4, timeout_s=60.0)


def test_ranks_of_other_hosts_find_their_offsets(ranks: list[tuple[Asked, Reported, Shares]]) -> None:
    found = [asked for asked, _, _ in ranks]
    assert [asking for asking, _, _ in found] == [(2, 3)] * 4
    assert found[0][1:] == (0, 0)
    for rank, (_, ns, error_ns) in enumerate(found[1:], start=1):
        assert abs(ns - rank * AHEAD_NS) <= error_ns


def test_ranks_with_other_data_are_named_by_all_of_them(ranks: list[tuple[Asked, Reported, Shares]]) -> None:
    found = ranks[0][1]
    assert all(rank == found for _, rank, _ in ranks)
    assert found["nothing"] == (3, "")
    for wrong in ("other samples of equal sizes", "other contents", "another order"):
        count, message = found[wrong]
        assert count == 2
        assert message.startswith("iteration 2: rank 3 has other samples than rank 0, or in another order; give all")
    assert found["an early end"][0] == 2
    assert found["an early end"][1].startswith("iteration 2: rank 3 has no more batches, but other ranks have")
    assert found["none at all"][0] == 0
    assert found["none at all"][1].startswith("iteration 0: rank 3 has no more batches")


def test_a_planners_assignment_is_every_replicas_and_one_that_cannot_be_is_nobodys(
    ranks: list[tuple[Asked, Reported, Shares]],
) -> None:
    """Losses are those of undivided training, whatever is dealt; samples are neither lost nor doubled."""
    wanted = losses_undivided(len(AssignsHere.ASSIGNED), documents=DOCUMENTS)
    for _, _, (losses, _) in ranks:
        assert losses == pytest.approx(wanted, abs=1e-8, rel=0)
    # Neighbouring ranks are replicas of one pipeline rank.
    first, second = (shares for _, _, (_, shares) in ranks[:2])
    sizes = [(len(a), len(b)) for a, b in zip(first, second, strict=True)]
    for a, b in zip(first, second, strict=True):
        assert len({*a, *b}) == len(a) + len(b) == DOCUMENTS
    assert (sizes[1], sizes[5]) == ((1, 3), (3, 1))
