"""Batches of a `Dataset`: shuffled by seed, described ahead in a thread, the same in every process."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch.distributed as dist

from pipeloom.errors import InputError, check_count, check_seed
from pipeloom.runtime.data.dataset import CorruptSampleError, Dataset, LazySample
from pipeloom.runtime.data.prefetch import DescribedBatch, Reading
from pipeloom.runtime.model.model import Model, user_code
from pipeloom.spec import batch_from_dicts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batches:
    """Batches of a dataset for `fit` and `Trainer`. Every rank iterates them and loads what its layers need.

    The samples of a batch depend only on the batch number, the seed and the number of samples, not on the number of
    ranks or on earlier reads. A resumed run therefore starts at any batch at once, and its checkpoint stores only the
    iteration.

    Parameters
    ----------
    batch : int
        Number of samples of a batch. The last batch may have fewer.
    shuffle : bool
        Shuffle every pass over the data differently.
    seed : int
        Seed of the orders.
    epochs : int
        Number of passes over the data. A batch may contain the end of one pass and the beginning of the next.
    limit : int or None
        Largest number of batches, counted from batch 0. None is no limit.
    skip_corrupt : bool
        Skip samples whose sizes cannot be read, on all ranks alike. The batch then has fewer samples. False ends
        training at such a sample.
    depth : int
        Largest number of described batches that wait.
    first : int
        Number of the batch to start with.
    """

    dataset: Dataset
    batch: int
    _: KW_ONLY
    shuffle: bool = True
    seed: int = 0
    epochs: int = 1
    limit: int | None = None
    skip_corrupt: bool = False
    depth: int = 2
    first: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "depth"):
            check_count(name, getattr(self, name))
        check_seed("seed", self.seed)
        if self.limit is not None:
            check_count("limit", self.limit)
        if not len(self.dataset):
            raise InputError("dataset", "has no samples", "give at least one")

    def __len__(self) -> int:
        """Return the total number of batches, counted from batch 0."""
        every = -(-self.epochs * len(self.dataset) // self.batch)
        return every if self.limit is None else min(every, self.limit)

    def __iter__(self) -> Reading:
        """Start to describe batches ahead in a thread."""
        return Reading(map(self._describe, range(self.first, len(self))), None, self.depth)

    def members(self, number: int) -> list[tuple[int, int]]:
        """Return the pass and the sample number of every place in a batch."""
        size, end = len(self.dataset), self.epochs * len(self.dataset)
        places = range(number * self.batch, min((number + 1) * self.batch, end))
        return [
            (p // size, int(_order(size, p // size, self.seed)[p % size]) if self.shuffle else p % size) for p in places
        ]

    def _describe(self, number: int) -> DescribedBatch:
        samples: list[LazySample] = []
        rows: list[dict[str, Any]] = []
        skipped = []
        seen: set[str] = set()
        for epoch, index in self.members(number):
            try:
                with user_code(f"dataset.sizes({index})"):
                    row = dict(self.dataset.sizes(index))
            except CorruptSampleError as error:
                if not self.skip_corrupt:
                    remedy = f"{error.remedy or 'mend it'}; or skip_corrupt leaves damaged samples out"
                    raise CorruptSampleError(error.entity, error.problem, remedy) from error
                skipped.append(str(error))
                if not (dist.is_initialized() and dist.get_rank()):
                    _LOG.warning("batch %d: skipped %s: %s", number, error.entity, error.problem)
                continue
            name = str(row.get("id", index))
            # The end of one pass and the beginning of the next may contain the same sample, and two samples may share
            # an id.
            names = (name, f"{name}#{epoch}")
            row["id"] = next((each for each in names if each not in seen), f"{name}#{epoch}.{index}")
            seen.add(row["id"])
            try:
                targets = float(row.pop("targets"))
            except KeyError as error:
                raise InputError(
                    f"dataset.sizes({index})", "has no `targets`", "return the number of targets in the loss"
                ) from error
            samples.append(LazySample(self.dataset, index, targets))
            rows.append(row)
        if not samples:
            raise InputError(f"batch {number}", f"has no undamaged sample: {skipped[0]}", "repair the data")
        batch = DescribedBatch(samples)
        batch.metadata, batch.num_skipped = batch_from_dicts(rows).samples, len(skipped)
        return batch


@lru_cache(maxsize=4)
def _order(size: int, epoch: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def bound(batches: Iterable[Sequence[Any]], model: Model) -> Iterable[Sequence[Any]]:
    """Bind batches of a `Dataset` to the model. Return other batches unchanged."""
    if isinstance(batches, Batches):
        return dataclasses.replace(batches, dataset=batches.dataset.bind(model))
    return batches
