"""List scheduling by priorities of groups, without memory limits and with them.

Under limited memory, a task that is not admitted is skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeloom.compiled import callee, inlined, int64, pointers
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.banker import Bank, can_finish, grant, open_bank
from pipeloom.search.kernels.queues import (
    BLOCKED,
    FREE,
    LAST_KIND,
    SLACK,
    SUMMARY,
    TIME,
    clear,
    expected,
    first_key,
    first_word,
    pass_on_all,
    take_expected,
    take_first,
    take_late,
    trailing_zeros,
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
def step_unlimited(done: int, queues: Scratch, policy: Policy) -> Any:
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
    return end if slack > 0 else codes.ABORTED


@callee
def decode_unlimited(packed: PackedGraph, scratch: Scratch, policy: int, weights: int, bound: int) -> int:
    """Return the makespan of the positions in ``scratch``, or `ABORTED`; see `decode`."""
    if not clear(packed, scratch, bound):
        return codes.ABORTED
    queues, urgent = pointers(scratch), scratch.urgent[0]
    classes = Policy(
        weights == codes.WEIGHT_AT_ONCE, int64(policy == codes.ALTERNATE), int64(policy == codes.BACKWARD_FIRST), urgent
    )
    makespan = 0
    for i in range(len(scratch.run)):
        end = step_unlimited(i, queues, classes)
        if end < 0:
            return codes.ABORTED
        makespan = max(makespan, end)
    return codes.ABORTED if makespan >= bound else makespan


@inlined
def admit(queues: Scratch, bank: Bank, place: int, rule: int, reach: int, num_active: int) -> Any:
    """Find the first task that is admitted among the first ``reach`` tasks of a queue.

    Return its cell (-1 if none is admitted), its position, and whether some task would fit but leave a component unable
    to finish.
    """
    rank = place >> 2
    which = place & 3
    queue = place << queues.word_shift
    start = 0 if which == 0 else queues.second if which == 1 else queues.third
    word = first_word(queues, queue, queues.node[(rank << NODE_SHIFT) + SUMMARY + which])
    left = queues.bits[queue + word]
    found = -1
    position = 0
    unsafe = False
    seen = 0
    while left != 0:
        position = (word << 6) + int64(trailing_zeros(left))
        cell = int64(queues.at[start + position]) + rank
        if bank.size[2 * cell] <= bank.free[rank]:
            if rule == codes.FITS or bank.size[2 * cell + 1] <= 0 or can_finish(bank, cell, rank, num_active):
                found = cell
                break
            unsafe = True
        seen += 1
        if seen >= reach:
            break
        left &= left - 1
        while left == 0 and word + 1 < 1 << queues.word_shift:
            word += 1
            left = queues.bits[queue + word]
    return found, position, unsafe


@inlined
def take_out(queues: Scratch, place: int, position: int) -> None:
    """Remove a task from its queue."""
    word = position >> 6
    queue = place << queues.word_shift
    left = queues.bits[queue + word] & ~(1 << (position & 63))
    queues.bits[queue + word] = left
    if left == 0:
        gone = int64(1)
        group = word >> queues.group_shift
        for other in range(group << queues.group_shift, (group + 1) << queues.group_shift):
            if queues.bits[queue + other] != 0:
                gone = int64(0)
        queues.node[((place >> 2) << NODE_SHIFT) + SUMMARY + (place & 3)] ^= gone << group


@callee
def decode_limited(
    packed: PackedGraph, scratch: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int
) -> int:
    """Return the makespan of the positions in ``scratch``, `DEADLOCK`, or `ABORTED`; see `decode`.

    For each class of a rank in turn, the first ``lookahead`` tasks are tried. If none is admitted, the rank waits until
    a task becomes ready or, if components on other ranks block it, until they free memory.
    """
    if not clear(packed, scratch, bound):
        return codes.ABORTED
    queues, bank = pointers(scratch), pointers(scratch.bank)
    node, key, free, urgent = queues.node, queues.key, bank.free, scratch.urgent[0]
    num_tasks, num_ranks = len(scratch.run), bank.num_ranks
    num_classes = 3 if queues.has_weights else 2
    num_active = 0
    open_bank(bank, packed, rule == codes.BANKER)
    makespan = 0
    done = 0
    while done < num_tasks:
        first = first_key(queues)
        now = first >> queues.rank_bits
        rank = first & ((1 << queues.rank_bits) - 1)
        first_rank = rank
        last_rank = rank
        reach = lookahead
        if first >= codes.NEVER:
            # Every rank waits for memory. The banker always admits some task behind the first ones.
            if rule != codes.BANKER:
                return codes.DEADLOCK
            first_rank = 0
            last_rank = num_ranks - 1
            reach = num_tasks
        else:
            row = rank << NODE_SHIFT
            if node[row + TIME + 3] <= now:
                take_late(queues, rank, now)
            for which in range(num_classes):
                summary, _ = take_expected(queues, rank, which, now)
                node[row + SUMMARY + which] = summary
        chosen = -1
        unsafe = False
        which = 0
        position = 0
        for candidate_rank in range(first_rank, last_rank + 1):
            rank = candidate_rank
            row = rank << NODE_SHIFT
            backward_first = int64(
                policy == codes.BACKWARD_FIRST or (policy == codes.ALTERNATE and node[row + LAST_KIND] == 0)
            )
            backward_first &= int64(node[row + SUMMARY + 1] & urgent != 0)
            for turn in range(num_classes):
                which = turn ^ backward_first
                if queues.has_weights:
                    if weights == codes.WEIGHT_AT_ONCE:
                        which = 2 if turn == 0 else (turn - 1) ^ backward_first
                    elif turn == 2:
                        which = 2
                if node[row + SUMMARY + which] == 0:
                    continue
                chosen, position, refused = admit(queues, bank, 4 * rank + which, rule, reach, num_active)
                unsafe |= refused
                if chosen >= 0:
                    break
            if chosen >= 0:
                break
        row = rank << NODE_SHIFT
        if chosen < 0:
            if first >= codes.NEVER:
                return codes.DEADLOCK
            key[rank] = expected(queues, row) << queues.rank_bits | rank
            node[row + BLOCKED] = int64(unsafe)
            continue
        begin = max(node[row + FREE], queues.ready[chosen])
        idle = begin - node[row + FREE]
        if idle > 0:
            node[row + SLACK] -= idle
            if node[row + SLACK] <= 0:
                return codes.ABORTED
        take_out(queues, 4 * rank + which, position)
        if which < 2:
            node[row + LAST_KIND] = which
        end = begin + queues.record[2 * chosen]
        node[row + FREE] = end
        queues.ready[chosen] = -1
        queues.run[done] = chosen
        makespan = max(makespan, end)
        done += 1
        net = bank.size[2 * chosen + 1]
        free[rank] -= net
        if rule == codes.BANKER:
            num_active = grant(bank, chosen, rank, num_active)
            if net < 0:
                for r in range(num_ranks):
                    other_row = r << NODE_SHIFT
                    if node[other_row + BLOCKED] != 0:
                        node[other_row + BLOCKED] = 0
                        resumed = max(node[other_row + FREE], begin) << queues.rank_bits | r
                        key[r] = min(key[r], resumed)
        pass_on_all(queues, chosen, end, -1, True)
        if node[row + SUMMARY] | node[row + SUMMARY + 1] | node[row + SUMMARY + 2]:
            key[rank] = end << queues.rank_bits | rank
        else:
            key[rank] = max(end, expected(queues, row)) << queues.rank_bits | rank
    return codes.ABORTED if makespan >= bound else makespan


@inlined
def decode(
    graph: PackedGraph, scratch: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int
) -> int:
    """Return the makespan of the positions in ``scratch``, `DEADLOCK`, or `ABORTED` at ``bound``.

    ``scratch.run`` receives the cells of the tasks in the order in which they were scheduled.
    """
    if rule == codes.UNLIMITED:
        return decode_unlimited(graph, scratch, policy, weights, bound)
    return decode_limited(graph, scratch, policy, weights, rule, lookahead, bound)
