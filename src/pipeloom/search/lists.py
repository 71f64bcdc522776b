"""Priority rules applied to a graph.

`pipeloom.search.kernels.by_task` runs a rule on the tasks of a graph. The graph may have any number of microbatches,
and these may differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.errors import InputError
from pipeloom.search.kernels.by_task import TaskRule
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.packed import PLACE, PackedGraph, turn_of_task
from pipeloom.search.rule import OrderRule
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph

_LIMIT = 2.0**60


class Priorities(NamedTuple):
    """All tasks rank after rank, the most urgent first.

    ``rule`` is the rule from which the order follows. None: ranks never wait.
    """

    order: IntArray
    rule: TaskRule | None


class GroupPriorities(NamedTuple):
    """An order of groups (forward, then backward) and its choices, as `Search.try_order` takes them."""

    order: IntArray
    choice: IntArray


class Chunks(NamedTuple):
    """The chunks of a graph, by rank and then in layout order.

    ``label`` is the number of a chunk in the layout. ``most_parts`` is the maximum number of pairs of a microbatch in
    the chunk, and ``mean_held`` the mean number of bytes that a microbatch holds there between forward and backward.
    """

    label: IntArray
    rank: IntArray
    of_pair: IntArray
    most_parts: IntArray
    mean_held: IntArray


def chunks_of(graph: TaskGraph) -> Chunks | None:
    """Read chunks from the labels of a graph. None if it has no labels."""
    if (label := graph.chunk_of) is None:
        return None
    both, of_pair = np.unique(np.stack([graph.rank[graph.forward_of], label]), axis=1, return_inverse=True)
    of_pair = np.ravel(of_pair)
    num, microbatch = both.shape[1], graph.microbatch[graph.forward_of]
    visits, parts = np.unique(np.stack([of_pair, microbatch]), axis=1, return_counts=True)
    most = np.zeros(num, np.int64)
    np.maximum.at(most, visits[0], parts)
    held = np.bincount(of_pair, weights=_most_held(graph), minlength=num) / np.bincount(visits[0], minlength=num)
    return Chunks(both[1], both[0], of_pair, most, held.astype(np.int64))


def priorities_of(graph: TaskGraph, packed: PackedGraph, chunks: Chunks, rule: OrderRule, turn: IntArray) -> Priorities:
    """Apply a rule to a graph whose microbatches run in the order of their turns."""
    _check_chunks(rule, chunks.label)
    rules = [rule.chunks[label] for label in chunks.label]
    kind, chunk, turns = packed.task[:-1, PLACE] & 3, chunks.of_pair[graph.pair], turn[turn_of_task(graph)]
    # The keys of a microbatch increase by the work of the earlier microbatches, in whole periods.
    work = np.bincount(turns, weights=graph.duration_ns, minlength=len(turn)) / graph.num_ranks
    unit = float(work.sum()) / max(1, len(np.unique(graph.microbatch)))
    before = np.cumsum(work) - work
    added = before[np.arange(len(turn)) // rule.period * rule.period]
    keys = np.array([(one.forward, one.backward, one.weight) for one in rules]) * unit
    waits = np.array([(one.forward_wait, one.backward_wait, 0.0) for one in rules]) * unit
    key = np.rint(np.clip(keys, -_LIMIT, _LIMIT)[chunk, kind] + added[turns]).astype(np.int64)
    wait = np.where(kind == 2, -1, np.rint(np.minimum(waits, _LIMIT))[chunk, kind].astype(np.int64))
    # If keys are equal, the order is by chunk, then backwards first, then by the turn of the microbatch.
    order = np.lexsort((np.arange(graph.num_tasks), turns, np.array((1, 0, 2))[kind], chunk, key, graph.rank))
    row = np.searchsorted(chunks.rank, np.arange(graph.num_ranks + 1)).astype(np.int64)
    # Reserve memory for one microbatch in every later chunk of the rank.
    after = np.append(np.cumsum(chunks.mean_held[::-1])[::-1], 0)
    later = after[1:] - after[row[chunks.rank + 1]]
    limit = [NEVER if one.limit is None else one.limit for one in rules]
    flight, take = _flights(graph)
    in_flight, held, headroom = np.zeros((3, len(rules)), np.int64)
    applied = TaskRule(
        key=key,
        wait=wait,
        chunk=chunk,
        flight=flight,
        take=take,
        chunk_row=row,
        limit=np.minimum(np.array(limit, np.int64), NEVER // chunks.most_parts) * chunks.most_parts,
        later=later,
        in_flight=in_flight,
        held=held,
        headroom=headroom,
    )
    return Priorities(order, applied)


def priorities_of_sequence(graph: TaskGraph, sequence: IntArray) -> Priorities:
    """Convert a sequence of all tasks into priorities: earlier tasks run first, and ranks never wait.

    A sequence that list scheduling of such priorities has produced does not change. A sequence in which a rank is idle
    while one of its tasks is ready changes.
    """
    return Priorities(sequence[np.argsort(graph.rank[sequence], kind="stable")], None)


def choice_of(graph: TaskGraph, rule: OrderRule) -> IntArray | None:
    """Return the candidate of every pair according to a rule, or the base candidate if the rule has none for it.

    Return None if the rule has no strategies or the graph has no candidates or labels.
    """
    label_of = graph.chunk_of
    if label_of is None or graph.candidates is None or not any(one.strategies for one in rule.chunks):
        return None
    _check_chunks(rule, label_of)
    # Equal chunks share one row of candidates.
    known: dict[tuple[int, int], int] = {}
    choice = np.zeros(graph.num_pairs, np.int64)
    for pair, (chunk, row) in enumerate(zip(label_of.tolist(), graph.candidates, strict=True)):
        key = id(row), chunk
        if key not in known:
            wanted = rule.chunks[chunk].strategies
            same = [i for i, option in enumerate(row) if (option.layers or (option.strategy,) * len(wanted)) == wanted]
            known[key] = same[0] if wanted and same else 0
        choice[pair] = known[key]
    return choice


def _check_chunks(rule: OrderRule, labels: IntArray) -> None:
    """Raise `InputError` if the rule has no entry for one of these chunks of the layout."""
    most = int(labels.max(initial=-1)) + 1
    if len(rule.chunks) < most:
        problem = f"has {len(rule.chunks)} chunks, the graph's layout {most}"
        raise InputError("rules", problem, "give the rule of the layout that the graph was made from")


def _most_held(graph: TaskGraph) -> IntArray:
    """Return the peak bytes of every pair between its tasks; 0 without a backward."""
    split = graph.weight_of != NO_TASK
    most = np.where(split, np.maximum(graph.activation_bytes, graph.weight_gradient_bytes), graph.activation_bytes)
    held: IntArray = np.where(graph.backward_of != NO_TASK, most, 0)
    return held


def _flights(graph: TaskGraph) -> tuple[IntArray, IntArray]:
    """Return the change of the number of pairs in flight and of the held bytes due to every task.

    Bytes that are added between the halves of a backward count from its forward. Otherwise they might not fit.
    """
    flight, take = np.zeros(graph.num_tasks, np.int64), np.zeros(graph.num_tasks, np.int64)
    has, split = graph.backward_of != NO_TASK, graph.weight_of != NO_TASK
    most, left = _most_held(graph), np.where(split, graph.weight_gradient_bytes, 0)
    flight[graph.forward_of[has]] = 1
    take[graph.forward_of] = most
    flight[graph.backward_of[has]] = -1
    take[graph.backward_of[has]] = (left - most)[has]
    take[graph.weight_of[split]] = -left[split]
    return flight, take
