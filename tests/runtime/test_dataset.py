"""Samples of a data set, loaded where a layer takes them: random models and plans are as exact as with samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeloom.errors import ExecutionError
from pipeloom.runtime import Dataset, LazySample, Part
from pipeloom.runtime.data.dataset import load_part
from pipeloom.runtime.execute.loads import Loader

from .cases import Run, assert_equal_gradients, expected, random_run, run_threads, take_gradients, total_loss


class Held(Dataset):
    """Samples that are there, and what was asked of them."""

    def __init__(self, samples: list[Any], broken: bool = False) -> None:
        self.samples, self.broken = samples, broken
        self.asked: list[tuple[int, str, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self.samples)

    def sizes(self, i: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool) -> Any:
        if self.broken:
            raise OSError("the disk is gone")
        self.asked.append((i, module, instances))
        return self.samples[i]


def loaded(run: Run, broken: bool = False) -> tuple[Run, Held]:
    held = Held(run.documents, broken)
    targets = [run.model.num_targets(document) for document in run.documents]
    lazy: list[Any] = [LazySample(held, i, each) for i, each in enumerate(targets)]
    return replace(run, documents=lazy), held


@pytest.mark.parametrize("seed", range(6))
def test_what_is_loaded_is_trained_on_exactly(seed: int) -> None:
    run = random_run(seed, 1 + seed % 3, replicate=seed % 2 == 0)
    loss, wanted = expected(run)
    lazy, held = loaded(run)
    assert abs(total_loss(run_threads(lazy)) - loss) < 1e-10
    assert_equal_gradients(take_gradients(run.model), wanted)
    # Whatever enters a module enters it once.
    contents = [(i, module, each) for i, module, instances in held.asked for each in instances]
    assert len(contents) == len(set(contents))
    assert contents


def test_the_undivided_model_loads_too() -> None:
    run = random_run(0, 1)
    loss, _ = expected(run)
    lazy, _ = loaded(run)
    assert expected(lazy)[0] == loss


def test_what_a_load_raises_ends_the_iteration_in_one_line() -> None:
    lazy, _ = loaded(random_run(0, 1), broken=True)
    with pytest.raises(
        ExecutionError, match=r"dataset.load\(\d+, '\w+', .*\): raised OSError: the disk is gone"
    ) as caught:
        run_threads(lazy)
    assert "\n" not in str(caught.value)


def test_a_loaded_part_is_of_the_same_iteration() -> None:
    part = Part((LazySample(Held(["a"]), 0, 1.0),), ((0, 0),), 7)
    assert load_part(part, "lm") == Part(("a",), ((0, 0),), 7)


def test_a_loader_ends_its_threads_and_may_begin_again() -> None:
    loader = Loader(2, torch.device("cpu"))
    linked: Any = SimpleNamespace(packing=None, units=[])
    for _ in range(2):
        assert loader.begin(linked, [LazySample(Held(["a"]), 0, 1.0)]) is not None
        pool = loader._pool
        assert pool is not None
        pool.submit(int).result()
        loader.close()
        assert not any(thread.is_alive() for thread in pool._threads)
