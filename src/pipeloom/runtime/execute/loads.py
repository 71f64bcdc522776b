"""Loads samples of a `Dataset` ahead of the layers that take them, in the order of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pipeloom.runtime.data.dataset import LazySample, instances_to_load, load_part, with_loaded
from pipeloom.runtime.execute.linker import LinkedPlan
from pipeloom.runtime.execute.unit import PartState, part_of
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.model.model import Part


class Loader:
    """The loading threads of a rank.

    Threads suffice because decoding and resizing release the interpreter lock. Unlike with processes, loaded data need
    not be copied. With 0 ``workers``, a part is loaded when it is taken. The threads select the ``device`` of the rank.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        self.workers, self.device = workers, device
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads. `begin` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def begin(self, linked: LinkedPlan, samples: Sequence[Any]) -> Loads | None:
        """Start loading for a plan. Return None if no sample has to be loaded."""
        if not any(isinstance(sample, LazySample) for sample in samples):
            return None
        if self.workers and self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "pipeloom-load", accelerator.select, (self.device,))
        return Loads(self._pool, linked, samples, self.workers + 1)


class Loads:
    """Parts of one iteration that are being loaded, ``ahead`` of them before they are taken.

    The samples are in the order of the plan's batch.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, linked: LinkedPlan, samples: Sequence[Any], ahead: int) -> None:
        self._pool, self._packing, self._samples, self._ahead = pool, linked.packing, samples, ahead
        # Parts in the order of their forwards. If several units take one part, the first one loads it.
        self._upcoming = iter(dict.fromkeys(unit.part for unit in linked.units if unit.part is not None))
        self._loading: dict[PartState, tuple[Part, dict[int, Future[Any]]]] = {}
        self._load_ahead()

    def take(self, state: PartState) -> Part:
        """Return a loaded part; wait for it if necessary."""
        if self._pool is None:
            part = part_of(state, self._packing, self._samples)
            return load_part(part, state.module.name, state.contents, state.loss)
        while state not in self._loading:
            self._begin(next(self._upcoming))
        part, futures = self._loading.pop(state)
        self._load_ahead()
        return with_loaded(part, {place: future.result() for place, future in futures.items()})

    def close(self) -> None:
        """Cancel loads that are no longer needed."""
        for _, futures in self._loading.values():
            for future in futures.values():
                future.cancel()
        self._loading = {}

    def _load_ahead(self) -> None:
        while self._pool is not None and len(self._loading) < self._ahead:
            state = next(self._upcoming, None)
            if state is None:
                return
            self._begin(state)

    def _begin(self, state: PartState) -> None:
        assert self._pool is not None
        part, name = part_of(state, self._packing, self._samples), state.module.name
        wanted = instances_to_load(part, state.contents)
        self._loading[state] = (
            part,
            {i: self._pool.submit(part.samples[i].load, name, each, state.loss) for i, each in wanted.items()},
        )
