"""Packing: which samples go through the backbone together, and how each module splits them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.spec import Batch, Workload
from pipeloom.spec.model import Reads


@dataclass(frozen=True, slots=True)
class SubMicrobatch:
    """The part of a microbatch that goes through one module together.

    ``first`` and ``count`` select from the microbatch's instances for that module, in sample order; the
    runtime needs no more than these two numbers to cut the same part from the real data.
    """

    first: int
    count: int
    workload: Workload


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples (positions in the batch) and, per module of the layout, its sub-microbatches (maybe none)."""

    samples: tuple[int, ...]
    parts: tuple[tuple[SubMicrobatch, ...], ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """A batch as microbatches; ``modules`` names the columns of `Microbatch.parts`.

    ``reads`` says which part of a sample each module reads. Without it, parts at a module boundary are matched by
    their numbers alone: all into one, one into all, or one into one.
    """

    batch: Batch
    modules: tuple[str, ...]
    microbatches: tuple[Microbatch, ...]
    reads: tuple[Reads, ...] = ()

    def parts_of(self, microbatch: int, module: str) -> tuple[SubMicrobatch, ...]:
        """Sub-microbatches of one module in one microbatch."""
        return self.microbatches[microbatch].parts[self.modules.index(module)]
