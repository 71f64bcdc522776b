"""Module boundaries: which rows of one module's sub-microbatches go into which sub-microbatch of the next.

If two modules read the same part of the samples, a sub-microbatch takes the rows of its own instances. Otherwise it
takes the rows of all samples from that of its first instance to that of its last. The sub-microbatches of an encoder
are therefore concatenated for a language model, whose output is scattered over the sub-microbatches of a decoder. Two
sub-microbatches that share a sample both take its rows.
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
    """Instances of a sub-microbatch above a module boundary that go into one sub-microbatch below it.

    ``above`` and ``below`` are the numbers of the two sub-microbatches. ``first`` and ``count`` select instances within
    the sub-microbatch above; ``whole`` is true if they are all of its instances.
    """

    above: int
    below: int
    first: int
    count: int
    whole: bool


def pieces(packing: Packing, microbatch: int, above: int, below: int) -> tuple[Piece, ...]:
    """Split one module boundary of one microbatch into pieces.

    Parameters
    ----------
    above, below : int
        Positions in ``packing.modules`` of the module that produces rows and of the module that takes them.

    Returns
    -------
    tuple of Piece
        The pieces of each sub-microbatch below are adjacent, in the order of concatenation. Empty if either module has
        no instances in this microbatch.

    Raises
    ------
    InputError
        If the packing does not say what its modules read, and the numbers of sub-microbatches do not match.
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
    """Return the first of the instances above that the given instances below take, and their number.

    Both ranges count instances within the microbatch of ``samples``. ``above`` and ``below`` are the parts of a sample
    that the two modules read.
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
        f"splits microbatch {microbatch} into {len(under)} sub-microbatches, {packing.modules[above]!r} before it "
        f"into {len(over)}",
        "pack with the model, so that the packing knows what each module reads",
    )
