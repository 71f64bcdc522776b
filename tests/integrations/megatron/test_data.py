"""Reading microbatches for plans that run them in any order. Needs torch, not Megatron Core."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import ExecutionError, InputError
from pipeloom.integrations.megatron.core.data import MicrobatchIterator, Reader, Readers

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 6), max_size=8), st.randoms(use_true_random=False), st.booleans())
def test_every_microbatch_gets_its_own_item(counts: list[int], rng: Any, ahead: bool) -> None:
    readers, source, taken = Readers(CPU), iter(range(100)), 0
    for count in counts:
        (reader,) = readers.of([source])
        assert reader is not None
        reader.begin()
        reader.fill(count)
        order = list(range(count))
        rng.shuffle(order)
        if ahead:
            following = reader.read_ahead(count, readers.thread)
            assert following.result() == list(range(taken + count, taken + 2 * count))
        assert {number: next(MicrobatchIterator(reader, number)) for number in order} == {
            number: taken + number for number in range(count)
        }
        taken += count
    readers.close()


def test_only_what_microbatches_take_is_read() -> None:
    source = iter(range(5))
    reader = Reader(source)
    reader.begin()
    assert reader.item(1) == 1
    assert next(source) == 2


def test_an_iterator_that_ends_early_is_an_error() -> None:
    reader = Reader(iter(range(3)))
    with pytest.raises(InputError, match="data_iterator: ends after 3 of 4 microbatches"):
        reader.fill(4)
    # One that has no item at all may be a placeholder, until a microbatch takes one.
    reader = Reader(iter(()))
    reader.fill(4)
    with pytest.raises(ExecutionError, match="ends before microbatch 2"):
        reader.item(2)


class Failing:
    """Has some items, and fails then."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __next__(self) -> int:
        if not self.left:
            raise OSError("the disk is gone")
        self.left -= 1
        return self.left


def test_an_iterator_that_fails_is_an_error_for_all_ranks_unless_nothing_was_read() -> None:
    with pytest.raises(InputError, match="data_iterator: failed in microbatch 2, OSError: the disk is gone"):
        Reader(Failing(2)).fill(4)
    reader = Reader(Failing(0))
    reader.fill(4)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.item(0)


def test_views_that_are_made_anew_for_each_step_are_not_read_ahead() -> None:
    """As Megatron Bridge does for virtual stages."""
    readers, source = Readers(CPU), iter(range(9))
    for step in range(3):
        (reader,) = readers.of([map(int, source)])
        assert reader is not None
        reader.begin()
        assert not reader.may_read_ahead
        assert [reader.item(number) for number in (1, 0, 2)] == [3 * step + 1, 3 * step, 3 * step + 2]
    reader.begin()
    assert reader.may_read_ahead
    readers.close()


def test_a_microbatch_has_one_item() -> None:
    iterator = MicrobatchIterator(Reader(iter("ab")), 0)
    assert next(iterator) == "a"
    with pytest.raises(ExecutionError, match="reads two items for microbatch 0"):
        next(iterator)


def test_readers_of_ended_iterators_are_dropped() -> None:
    readers = Readers(CPU)
    for _ in range(3):
        (reader,) = readers.of([iter("ab")])
        assert reader is not None
        reader.begin()
        assert [reader.item(1), reader.item(0)] == ["b", "a"]
        reader.read_ahead(2, readers.thread).result()
    assert len(readers._known) == 1
    # One that has read ahead stays while another is used, as in an evaluation.
    source, other = iter("abcd"), iter("xy")
    (reader,) = readers.of([source])
    assert reader is not None
    reader.begin()
    assert [reader.item(0), reader.item(1)] == ["a", "b"]
    reader.read_ahead(2, readers.thread)
    readers.of([other])
    (again,) = readers.of([source])
    assert again is reader
    again.begin()
    assert [again.item(0), again.item(1)] == ["c", "d"]
    readers.close()


class Rerun:
    """As Megatron's wrapper: it records the items of a step, and repeats them."""

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.saved_microbatches = iterable, []
        self.replaying, self.position = False, 0

    def __next__(self) -> Any:
        if self.replaying:
            self.position += 1
            return self.saved_microbatches[self.position - 1]
        return next(self.iterable)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_repeated_step_has_the_same_items(restarted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "_note", lambda self, item: self.iterator.saved_microbatches.append(item))
    readers, source = Readers(CPU), Rerun(iter(range(9)))
    reader = Reader(source)
    reader.begin()
    assert [reader.item(number) for number in (1, 0, 2)] == [1, 0, 2]
    reader.read_ahead(3, readers.thread)
    source.replaying = True
    if restarted:
        # Another process has loaded what the wrapper had recorded.
        saved = source.saved_microbatches
        source = Rerun(iter(range(3, 9)))
        source.saved_microbatches, source.replaying = saved, True
        reader.wait()
        reader = Reader(source)
    reader.begin()
    assert [reader.item(number) for number in (2, 1, 0)] == [2, 1, 0]
    source.replaying = False
    source.saved_microbatches = []
    reader.begin()
    assert [reader.item(number) for number in range(3)] == [3, 4, 5]
    readers.close()
