"""Types of a packing: which samples pass through the backbone together, and how each module splits them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.errors import InputError
from pipeloom.spec import Batch, Workload
from pipeloom.spec.model import Reads


@dataclass(frozen=True, slots=True)
class SubMicrobatch:
    """The part of a microbatch that passes through one module together.

    ``first`` and ``count`` select from the microbatch's instances for that module, in sample order. The runtime needs
    only these two numbers to split the real data.
    """

    first: int
    count: int
    workload: Workload


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch: positions of its samples in the batch, and for each module its sub-microbatches, if any."""

    samples: tuple[int, ...]
    parts: tuple[tuple[SubMicrobatch, ...], ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """A batch divided into microbatches; ``modules`` names the columns of `Microbatch.parts`.

    ``reads`` states which part of a sample each module reads. It is needed only for several modules.
    """

    batch: Batch
    modules: tuple[str, ...]
    microbatches: tuple[Microbatch, ...]
    reads: tuple[Reads, ...] = ()

    def __post_init__(self) -> None:
        if len(self.modules) > 1 and len(self.reads) != len(self.modules):
            raise InputError(
                "packing.reads",
                f"has {len(self.reads)} entries for {len(self.modules)} modules",
                "pack with the model, so that the packing knows what each module reads",
            )

    def parts_of(self, microbatch: int, module: str) -> tuple[SubMicrobatch, ...]:
        """Return the sub-microbatches of one module in one microbatch."""
        return self.microbatches[microbatch].parts[self.modules.index(module)]
