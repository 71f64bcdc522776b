"""Batches of a data set: in an order that depends on the seed alone, from any batch on, damaged samples left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pipeloom.errors import InputError
from pipeloom.runtime import Batches, CorruptSampleError, Dataset, batch_of
from pipeloom.training.one_call import _batches
from pipeloom.training.task import Task


class Numbers(Dataset):
    """Samples of one token; some are damaged."""

    def __init__(self, size: int, damaged: tuple[int, ...] = (), sizes: Mapping[str, Any] | None = None) -> None:
        self.size, self.damaged, self.declared = size, damaged, {"targets": 1, **(sizes or {})}

    def __len__(self) -> int:
        return self.size

    def sizes(self, i: int) -> Mapping[str, Any]:
        if i in self.damaged:
            raise CorruptSampleError(f"sample {i}", "is damaged")
        return {"id": f"s{i}", "text_tokens": i + 1, **self.declared}

    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool) -> int:
        return i


def ids(batches: Batches) -> list[list[str]]:
    return [[sample.id for sample in batch_of(batch, None).samples] for batch in batches]


def test_every_pass_has_every_sample_once_in_an_order_of_its_own() -> None:
    batches = Batches(Numbers(10), 4, seed=3, epochs=2)
    found = ids(batches)
    assert [len(batch) for batch in found] == [4] * 5
    flat = [name.partition("#")[0] for batch in found for name in batch]
    assert sorted(flat[:10]) == sorted(flat[10:]) == sorted(f"s{i}" for i in range(10))
    assert flat[:10] != flat[10:]
    assert ids(batches) == found
    assert ids(replace(batches, seed=4)) != found


def test_a_batch_over_the_end_of_a_pass_names_no_sample_twice() -> None:
    (batch,) = ids(Batches(Numbers(3), 7, shuffle=False, epochs=3, limit=1))
    assert batch == ["s0", "s1", "s2", "s0#1", "s1#1", "s2#1", "s0#2"]


def test_the_last_batch_has_what_is_left() -> None:
    assert ids(Batches(Numbers(5), 4, shuffle=False)) == [["s0", "s1", "s2", "s3"], ["s4"]]


def test_any_batch_can_be_the_first() -> None:
    batches = Batches(Numbers(11), 3, seed=1, epochs=3)
    assert ids(replace(batches, first=4)) == ids(batches)[4:]
    assert len(batches) == 11


def own_batches(num_iterations: int) -> Batches:
    return Batches(Numbers(11), 3, epochs=num_iterations, first=5)


def batches_from(num_iterations: int, start: int = 0) -> Batches:
    return Batches(Numbers(11), 3, epochs=num_iterations, first=5 + start)


@pytest.mark.parametrize("function", [own_batches, batches_from])
def test_a_resumed_run_keeps_the_first_batch_of_a_task(function: Any) -> None:
    def begins(start: int) -> tuple[int, int]:
        batches, count = Task(lambda: None, function).batches_from(start, 4)
        assert isinstance(batches, Batches)
        return batches.first, count

    assert [begins(start) for start in (0, 1, 3)] == [(5, 0), (5, 1), (7, 1)]
    limited = _batches(lambda: own_batches(4), 2, num_iterations=2)
    assert len(ids(limited)) == 2


def test_targets_travel_with_the_samples() -> None:
    (batch,) = Batches(Numbers(2, sizes={"targets": 2.5}), 2)
    assert [sample.targets for sample in batch] == [2.5, 2.5]


def test_damaged_samples_end_training_or_are_left_out_and_counted() -> None:
    data = Numbers(6, damaged=(1, 2))
    with pytest.raises(CorruptSampleError, match="sample 1: is damaged"):
        ids(Batches(data, 3, shuffle=False))
    batches = Batches(data, 3, shuffle=False, skip_corrupt=True)
    assert ids(batches) == [["s0"], ["s3", "s4", "s5"]]
    assert [batch.num_skipped for batch in batches] == [2, 0]
    with pytest.raises(InputError, match="batch 0: has no undamaged sample"):
        ids(Batches(Numbers(2, damaged=(0, 1)), 2, skip_corrupt=True))


@pytest.mark.parametrize("given", [{"batch": 0}, {"batch": 1, "epochs": 0}, {"batch": 1, "limit": 0}])
def test_what_gives_no_batch_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="below 1"):
        Batches(Numbers(3), **given)
    with pytest.raises(InputError, match="no samples"):
        Batches(Numbers(0), 1)


def test_sizes_without_targets_are_refused() -> None:
    class Careless(Numbers):
        def sizes(self, i: int) -> Mapping[str, Any]:
            return {"text_tokens": 1}

    with pytest.raises(InputError, match="has no `targets`"):
        ids(Batches(Careless(1), 1))


def test_what_a_data_set_raises_is_reported_in_one_line() -> None:
    class Broken(Numbers):
        def sizes(self, i: int) -> Mapping[str, Any]:
            raise OSError("the disk is gone")

    with pytest.raises(InputError, match=r"dataset.sizes\(0\): raised OSError: the disk is gone"):
        ids(Batches(Broken(1), 1))
