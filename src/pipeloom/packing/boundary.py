"""Module boundaries: which rows of one module's sub-microbatches go into which sub-microbatch of the next.

A sub-microbatch takes what belongs to it: of a module that reads the same part of the samples, the rows of its
own instances; of another one, the rows of all samples from its first instance's to its last one's. So the
sub-microbatches of an encoder are concatenated for a language model, and its output is scattered over those of a
decoder behind it; two of them that share a sample both take its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.errors import InputError
from pipeloom.packing.types import Packing
from pipeloom.spec import Sample
from pipeloom.spec.model import Reads, num_instances


@dataclass(frozen=True, slots=True)
class Piece:
    """Instances of one part of a module that go into one part of the next.

    Attributes
    ----------
    above, below : int
        Numbers of the two parts.
    first, count : int
        Instances, counted within the part above.
    whole : bool
        Whether they are all of it.
    """

    above: int
    below: int
    first: int
    count: int
    whole: bool


def pieces(packing: Packing, microbatch: int, above: int, below: int) -> tuple[Piece, ...]:
    """Cut one module boundary of one microbatch.

    Parameters
    ----------
    packing : Packing
    microbatch : int
    above, below : int
        Numbers of the module that gives and of the one that takes, as in ``packing.modules``.

    Returns
    -------
    tuple of Piece
        Those of one part below stand together, in the order in which it concatenates them. None where either
        module has nothing in this microbatch.

    Raises
    ------
    InputError
        When the packing does not say what modules read, and the parts match in no way.
    """
    parts = packing.microbatches[microbatch].parts
    over, under = parts[above], parts[below]
    if not over or not under:
        return ()
    if not packing.reads:
        return _by_number(packing, microbatch, above, below)
    samples = [packing.batch.samples[number] for number in packing.microbatches[microbatch].samples]
    found = []
    for number, part in enumerate(under):
        first, count = reach(samples, packing.reads[above], packing.reads[below], part.first, part.count)
        for source, other in enumerate(over):
            begin, end = max(first, other.first), min(first + count, other.first + other.count)
            if begin < end:
                found.append(Piece(source, number, begin - other.first, end - begin, end - begin == other.count))
    return tuple(found)


def reach(samples: Sequence[Sample], above: Reads, below: Reads, first: int, count: int) -> tuple[int, int]:
    """Instances above that instances below take: the first, and how many.

    Parameters
    ----------
    samples : sequence of Sample
        Of the microbatch.
    above, below : Reads
        What the two modules read.
    first, count : int
        Instances below, counted within the microbatch.
    """
    if above == below:
        return first, count
    seen = 0
    covered = []
    for number, sample in enumerate(samples):
        here = num_instances(below, sample)
        if here and seen < first + count and first < seen + here:
            covered.append(number)
        seen += here
    if not covered:
        return 0, 0
    begin = sum(num_instances(above, sample) for sample in samples[: covered[0]])
    inside = samples[covered[0] : covered[-1] + 1]
    return begin, sum(num_instances(above, sample) for sample in inside)


def _by_number(packing: Packing, microbatch: int, above: int, below: int) -> tuple[Piece, ...]:
    parts = packing.microbatches[microbatch].parts
    over, under = parts[above], parts[below]
    if len(under) == 1:
        return tuple(Piece(i, 0, 0, part.count, True) for i, part in enumerate(over))
    if len(over) == 1:
        return tuple(Piece(0, i, 0, over[0].count, True) for i in range(len(under)))
    if len(over) == len(under):
        return tuple(Piece(i, i, 0, part.count, True) for i, part in enumerate(over))
    raise InputError(
        f"module {packing.modules[below]!r}.sub_microbatch",
        f"cuts microbatch {microbatch} into {len(under)} parts, {packing.modules[above]!r} before it into {len(over)}",
        "pack with the model, so that the packing knows what each module reads",
    )
