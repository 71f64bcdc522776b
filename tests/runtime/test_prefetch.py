"""Batches read ahead in a thread: the same ones, described, bounded, with the loader's errors, and closed."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from pipeloom.errors import InputError
from pipeloom.runtime import DescribedBatch, Prefetched, Size
from pipeloom.runtime.data.prefetch import batch_of
from pipeloom.runtime.data.read_ahead import ReadAhead

SIZES = {"text_tokens": Size("ids"), "image_tokens": Size("images", (), 1), "image_patches": Size("images", (1, 2), 4)}


class Documents(Dataset[dict[str, Any]]):
    """Documents of ids and of images of channels, height and width."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.broken:
            raise ValueError(f"document {number} is broken")
        images = [torch.zeros(1, 2, 3 + k) for k in range(number % 3)]
        return {"ids": torch.arange(number + 1), "images": images}


def threads() -> int:
    return sum(thread.name == "pipeloom-prefetch" for thread in threading.enumerate())


def ends(count: int = 0) -> bool:
    """Whether all threads but so many end."""
    give_up = time.monotonic() + 20
    while threads() > count and time.monotonic() < give_up:
        time.sleep(0.01)
    return threads() == count


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_batches_come_in_order_with_their_sizes(workers: int) -> None:
    def loader() -> DataLoader[dict[str, Any]]:
        return DataLoader(
            Documents(),
            batch_size=4,
            collate_fn=list,
            num_workers=workers,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
        )

    batches = Prefetched(loader(), SIZES)
    for samples, plain in zip(batches, loader(), strict=True):
        assert isinstance(samples, DescribedBatch)
        assert [s["ids"].tolist() for s in samples] == [s["ids"].tolist() for s in plain]
        batch = batch_of(samples, None, 7)
        assert batch.iteration == 7
        for place, (sample, reported) in enumerate(zip(plain, batch.samples, strict=True)):
            assert reported.id == str(place)
            assert reported.text_tokens == len(sample["ids"])
            assert reported.image_tokens == (1,) * len(sample["images"])
            # Two rows of pixels, four pixels to a patch, and a part of a patch is one.
            assert reported.image_patches == tuple(-(-2 * x.shape[2] // 4) for x in sample["images"])
    assert ends()
    # Once more from the beginning, and left before the end.
    again = iter(batches)
    assert len(next(again)) == 4
    again.close()
    assert list(again) == []
    assert ends()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loader_raises_is_raised_in_its_turn(workers: int) -> None:
    loader = DataLoader(Documents(broken=6), batch_size=3, collate_fn=list, num_workers=workers)
    reading = iter(Prefetched(loader, SIZES))
    assert [len(next(reading)) for _ in range(2)] == [3, 3]
    with pytest.raises(ValueError, match="document 6 is broken") as caught:
        next(reading)
    reported = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in reported
    assert next(reading, None) is None
    assert ends()


def test_no_more_than_the_depth_waits() -> None:
    made = []

    def forever() -> Iterator[list[int]]:
        for i in range(10**6):
            made.append(i)
            yield [i]

    reading = iter(Prefetched(forever(), {"text_tokens": lambda sample: sample + 1}, depth=3))
    for wanted in range(3):
        give_up = time.monotonic() + 20
        # Those that wait, and the one that is in the thread's hands.
        while len(made) < wanted + 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(made) == wanted + 4
        assert next(reading) == [wanted]
    del reading
    assert ends(), "dropped without being closed, its thread ends too"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_that_gives_none_is_reported_and_ends_nothing_early(ahead: bool) -> None:
    given: list[Any] = [["a"], None, ["b"]]
    source: Any = Prefetched(given, sizes={"text_tokens": len}) if ahead else given
    batches = ReadAhead(source, 5, None, 0)
    first = batches.take()
    assert first is not None
    assert list(first.samples) == ["a"]
    with pytest.raises(InputError, match="is None, not a batch" if ahead else "iteration 6: is None, not a batch"):
        batches.take()


def test_no_batch_is_read_beyond_the_last_iteration() -> None:
    source = iter([[number] for number in range(9)])
    batches = ReadAhead(source, 5, None, 1, end=8)
    taken = [batches.take() for _ in range(4)]
    assert [None if each is None else each.iteration for each in taken] == [5, 6, 7, None]
    assert next(source) == [3]


def test_a_wrong_rule_names_the_sample() -> None:
    samples = [[{"ids": torch.zeros(2)}, {"text": torch.zeros(2)}]]
    with pytest.raises(InputError, match=r"samples\[1\]\['ids'\]: is not there"):
        next(iter(Prefetched(samples, {"text_tokens": Size("ids")})))
    with pytest.raises(InputError, match=r"samples\[0\]\['ids'\]: has shape \(2,\), and no dimension of \(3,\)"):
        next(iter(Prefetched(samples, {"text_tokens": Size("ids", (3,))})))
    with pytest.raises(InputError, match=r"samples\[0\].describe: raised ZeroDivisionError"):
        next(iter(Prefetched(samples, {"text_tokens": lambda _: 1 // 0})))
    with pytest.raises(InputError, match=r"sizes\['tokens'\]: is not a field"):
        Prefetched(samples, {"tokens": Size("ids")})
    with pytest.raises(InputError, match="sizes: or describe is needed"):
        Prefetched(samples)
    with pytest.raises(InputError, match="describe: is missing"):
        batch_of(samples[0], None)
    one = next(iter(Prefetched([[torch.zeros(3, 5)]], {"image_tokens": lambda x: (len(x),)})))
    assert batch_of(one, None).samples[0].image_tokens == (3,)
    equal = next(iter(Prefetched([[(torch.zeros(3, 5),)]], {"image_tokens": Size(0)})))
    assert batch_of(equal, None).samples[0].image_tokens == (5, 5, 5)
    assert ends()
