"""List scheduling without memory limits."""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeloom.compiled import callee, inlined, int64, pointers
from pipeloom.search.kernels.codes import ABORTED, ALTERNATE, BACKWARD_FIRST, WEIGHT_AT_ONCE
from pipeloom.search.kernels.queues import (
    FREE,
    LAST_KIND,
    SLACK,
    SUMMARY,
    TIME,
    clear,
    first_key,
    first_word,
    pass_on_all,
    take_expected,
    take_first,
    take_late,
)
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import NODE_SHIFT, Scratch


class Policy(NamedTuple):
    """Which class runs first if several are ready, as numbers for arithmetic without branches.

    ``urgent`` is ``Scratch.urgent``.
    """

    weight_at_once: bool
    alternate: int
    backward_first: int
    urgent: int


@inlined
def step(done: int, queues: Scratch, policy: Policy) -> Any:
    """Start one task at the lowest key. Its rank is free at that time, and all tasks in its queues are ready.

    Return its end, or `ABORTED` if the rank has been idle too long for the bound.
    """
    node = queues.node
    first = first_key(queues)
    now = first >> queues.rank_bits
    rank = first & ((1 << queues.rank_bits) - 1)
    row = rank << NODE_SHIFT
    if node[row + TIME + 3] <= now:
        take_late(queues, rank, now)
    soonest = node[row + TIME + 3]
    forward, when = take_expected(queues, rank, 0, now)
    soonest = min(soonest, when)
    backward, when = take_expected(queues, rank, 1, now)
    soonest = min(soonest, when)
    weight = 0
    if queues.has_weights:
        weight, when = take_expected(queues, rank, 2, now)
        soonest = min(soonest, when)
    slack = node[row + SLACK] - (now - node[row + FREE])
    node[row + SLACK] = slack
    # Select the class without branches: all ones for a backward.
    last_kind = node[row + LAST_KIND]
    turn = (policy.alternate & ~last_kind) | policy.backward_first
    turn &= int64(backward & policy.urgent != 0)
    chosen = int64(backward != 0) & (turn | int64(forward == 0))
    behind = -chosen
    summary = forward ^ ((forward ^ backward) & behind)
    rest = forward ^ backward ^ summary
    start = queues.second & behind
    last_kind = chosen
    if weight != 0:
        if policy.weight_at_once or (forward | backward) == 0:
            rest = forward | backward
            summary = weight
            chosen = 2
            start = queues.third
            last_kind = node[row + LAST_KIND]
        else:
            rest |= weight
    node[row + SUMMARY] = forward
    node[row + SUMMARY + 1] = backward
    node[row + SUMMARY + 2] = weight
    queue = (4 * rank + chosen) << queues.word_shift
    word = first_word(queues, queue, summary)
    position, summary = take_first(queues, queue, word, summary)
    node[row + SUMMARY + chosen] = summary
    node[row + LAST_KIND] = last_kind
    cell = int64(queues.at[start + position]) + rank
    end = now + queues.record[2 * cell]
    node[row + FREE] = end
    queues.run[done] = cell
    # If a queue is not empty, the rank continues at the end of this task. Otherwise it waits for an expected task.
    soonest &= -int64((rest | summary) == 0)
    queues.key[rank] = max(end, soonest) << queues.rank_bits | rank
    pass_on_all(queues, cell, end, now, False)
    return end if slack > 0 else ABORTED


@callee
def decode_unlimited(packed: PackedGraph, scratch: Scratch, policy: int, weights: int, bound: int) -> int:
    """Return the makespan of the positions in ``scratch``, or `ABORTED`; see `decode`."""
    if not clear(packed, scratch, bound):
        return ABORTED
    queues, urgent = pointers(scratch), scratch.urgent[0]
    classes = Policy(weights == WEIGHT_AT_ONCE, int64(policy == ALTERNATE), int64(policy == BACKWARD_FIRST), urgent)
    makespan = 0
    for i in range(len(scratch.run)):
        end = step(i, queues, classes)
        if end < 0:
            return ABORTED
        makespan = max(makespan, end)
    return ABORTED if makespan >= bound else makespan
