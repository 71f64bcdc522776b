"""Module boundaries: which rows of one module's sub-microbatches go into which sub-microbatch of the next.

If two modules read the same part of the samples, a sub-microbatch takes the rows of its own instances. Otherwise it
takes the rows of all samples from that of its first instance to that of its last. The sub-microbatches of an encoder
are therefore concatenated for a language model, whose output is scattered over the sub-microbatches of a decoder. Two
sub-microbatches that share a sample both take its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """
    parts = packing.microbatches[microbatch].parts
    over, under = parts[above], parts[below]
    if not over or not under:
        return ()
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
