"""The memory of rank 0, which runs the encoder parts."""

from __future__ import annotations

from pipeloom.compiled import Array, kernel
from pipeloom.tuning.kernels.chain import Chain


@kernel
def needs_at_turns(chain: Chain, order: Array, ahead: int, needs: Array) -> bool:
    """Write the memory of rank 0 at the turn of every microbatch if no encoder part runs early or late.

    Return whether it fits.
    """
    held = chain.static[0]
    for n in range(len(order)):
        if n - ahead - 1 >= 0:
            gone = order[n - ahead - 1]
            held -= chain.activation[gone, 0]
            if chain.trained:
                for q in range(chain.part_start[gone], chain.part_start[gone + 1]):
                    held -= chain.part_bytes[q]
        m = order[n]
        own = 0
        most = 0
        for q in range(chain.part_start[m], chain.part_start[m + 1]):
            most = max(most, own + chain.part_bytes[q])
            own += chain.part_output[q]
            if chain.trained:
                own += chain.part_bytes[q]
                most = max(most, own)
        needs[n] = held + max(most, own + chain.activation[m, 0])
        if needs[n] > chain.capacity[0]:
            return False
        held += chain.activation[m, 0]
        if chain.trained:
            for q in range(chain.part_start[m], chain.part_start[m + 1]):
                held += chain.part_bytes[q]
    return True


@kernel
def held_bytes(chain: Chain, part: int) -> int:
    """Return the bytes that an encoder part holds between its forward and the turn of its microbatch."""
    return int(chain.part_output[part] + (chain.part_bytes[part] if chain.trained else 0))


@kernel
def fits_early(chain: Chain, order: Array, needs: Array, turn: int, at: int, part: int, used: int) -> bool:
    """Return whether a part of the microbatch at position ``at`` fits when rank 0 is at position ``turn``.

    ``part`` is the next part to run. All earlier parts have run.
    """
    if used + chain.part_bytes[part] + chain.part_output[part] > chain.capacity[0]:
        return False
    early = held_bytes(chain, part)
    for q in range(chain.part_start[order[at]], part):
        early += held_bytes(chain, q)
    for n in range(at - 1, turn - 1, -1):
        if needs[n] + early > chain.capacity[0]:
            return False
        for q in range(chain.part_start[order[n]], chain.part_start[order[n] + 1]):
            early += held_bytes(chain, q)
    return True
