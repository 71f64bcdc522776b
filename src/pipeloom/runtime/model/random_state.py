"""Random numbers of layers, such as dropout's, that do not depend on the plan.

Drawn in sequence from a rank's generator, they would depend on the order of the plan. The generator is therefore seeded
before each forward that draws, from the iteration, the samples, the part and the layers. The numbers are then the same
for any order and any memory strategies. After each such forward the generator is restored, so that other code that
draws from it, such as a shuffling loader, is not affected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.collector import collector_paused
from pipeloom.packing import Packing
from pipeloom.runtime.launch import accelerator

_MASK = 2**63 - 1


@dataclass(slots=True)
class RandomState:
    """State of the random generators, for repeating dropout in recomputation."""

    cpu: Tensor
    device: Tensor | None = None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the current state."""
        on_device = accelerator.random_state(device)
        # The state is wrapped while the generator is locked. If Python's collector ran in that moment, and a finalizer
        # let another thread run that requests the state, that thread would deadlock on the interpreter's lock.
        with collector_paused():
            return cls(torch.get_rng_state(), on_device)

    def equals(self, other: RandomState) -> bool:
        """Return whether both states give the same numbers."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.device is None or other.device is None or torch.equal(self.device, other.device)

    def set(self, device: torch.device) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            accelerator.set_random_state(self.device, device)


class ForwardSeeds:
    """Seeds of a rank's chunks, and which of them draw random numbers. ``seed`` is the same on all ranks.

    A chunk is observed in the first iteration in which it runs. If it draws nothing, it costs nothing from then on. If
    it starts to draw later, this is detected at the end of the iteration, and all chunks are observed again. In that
    iteration, it draws from generators that are seeded once, before the first action.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.silent: set[int] = set()
        """Chunks that draw nothing."""
        self._observed: dict[int, bool] = {}
        """Observed chunks of this iteration, and whether they have drawn."""
        self._drawing: set[int] = set()
        self._bases: dict[int, int] = {}
        self._iteration = 0
        self._packing: Packing | None = None
        self._outside = self._begun = RandomState.now(device)
        """States before the iteration, and before its first action."""

    def begin(self, iteration: int, packing: Packing) -> None:
        """Prepare for the first action of an iteration."""
        self._iteration, self._packing, self._bases, self._observed = iteration, packing, {}, {}
        self._outside = RandomState.now(self.device)
        self._seed(hash((self.seed, iteration)))
        self._begun = RandomState.now(self.device)

    def end(self) -> None:
        """Restore the generators after the last action of an iteration."""
        if RandomState.now(self.device).equals(self._begun):
            self.silent |= {chunk for chunk, drew in self._observed.items() if not drew}
        else:
            # A chunk that was not observed has drawn numbers.
            self.silent, self._drawing = set(), set()
        self._outside.set(self.device)

    def _seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number & _MASK)
        accelerator.seed(number & _MASK, self.device)

    @contextmanager
    def seeded(
        self,
        chunk: int,
        layers: tuple[int, int],
        column: int,
        where: tuple[int, int],
        own: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Seed the generators for a forward of a chunk that is not silent.

        ``layers`` are the first and last layer of the chunk, ``column`` is the number of its module, and ``where`` has
        microbatch and sub-microbatch. Under encoder data parallelism, ``own`` has the first instance and the number of
        instances of this rank. They draw numbers like a separate part.
        """
        assert self._packing is not None
        microbatch, sub = where
        part = self._packing.microbatches[microbatch].parts[column][sub]
        first, count = (part.first, part.count) if own is None else (part.first + own[0], own[1])
        # The hash of numbers is the same in every process.
        number = hash((self._base(microbatch), column, layers, first, count))
        # Not the state at the beginning, so that numbers that a silent chunk has drawn are noticed at the end.
        earlier = RandomState.now(self.device)
        self._seed(number)
        if chunk in self._drawing or own is not None:
            # Under encoder data parallelism, ranks have unequal shares or none, so drawing nothing once proves little.
            yield
        else:
            before = RandomState.now(self.device)
            yield
            drew = not RandomState.now(self.device).equals(before)
            self._observed[chunk] = drew or self._observed.get(chunk, False)
            if drew:
                self._drawing.add(chunk)
        earlier.set(self.device)

    def _base(self, microbatch: int) -> int:
        """Return the seed of a microbatch from the run, the iteration and its samples."""
        base = self._bases.get(microbatch)
        if base is None:
            assert self._packing is not None
            samples = self._packing.batch.samples
            members = (samples[number].id for number in self._packing.microbatches[microbatch].samples)
            text = "\0".join((str(self.seed), str(self._iteration), *members))
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest()
            base = self._bases[microbatch] = int.from_bytes(digest, "little")
        return base
