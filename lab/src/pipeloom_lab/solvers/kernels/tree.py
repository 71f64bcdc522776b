"""Compiled walks of the search tree: selection, expansion, random completion, propagation.

Nodes lie in flat arrays; children of a node are a linked list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import kernel
from pipeloom.compiled.arrays import assign_run
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.climb import evaluate
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]

NOBODY = -1
EXHAUSTED = -1


class Tree(NamedTuple):
    """Nodes of a search tree; number 0 is the root.

    Attributes
    ----------
    visits, num_children, first_child, next_sibling, option : array, shape (capacity,)
        ``option`` is what a node chooses: a chain for its place, or a place for its group.
    score : array, shape (capacity,)
        The best below.
    closed : array, shape (capacity,)
        Everything below has been tried.
    size : array, shape (1,)
        Nodes there are.
    """

    visits: Array
    num_children: Array
    first_child: Array
    next_sibling: Array
    option: Array
    score: Array
    closed: Array
    size: Array


def make_tree(capacity: int, old: Tree | None = None) -> Tree:
    """Room for so many nodes, with those of an older tree."""
    made = Tree(
        visits=np.zeros(capacity, np.int64),
        num_children=np.zeros(capacity, np.int64),
        first_child=np.full(capacity, NOBODY),
        next_sibling=np.full(capacity, NOBODY),
        option=np.zeros(capacity, np.int64),
        score=np.zeros(capacity),
        closed=np.zeros(capacity, np.bool_),
        size=np.ones(1, np.int64),
    )
    if old is not None:
        for array, before in zip(made, old, strict=True):
            array[: len(before)] = before
    return made


class Chains(NamedTuple):
    """What sequences are made of; see `pipeloom_lab.solvers.sequences`.

    ``groups`` and ``chain``: groups chain by chain, and the chain of each; ``size`` and ``start`` of every chain.
    """

    groups: Array
    chain: Array
    size: Array
    start: Array
    num_forward: int


class Workspace(NamedTuple):
    """What one thread writes while it walks."""

    path: Array
    prefix: Array
    left: Array
    taken: Array
    sequence: Array
    free: Array
    next_group: Array
    random: Array


def make_workspace(length: int, num_chains: int, seed: int) -> Workspace:
    """Arrays for sequences of so many places and chains."""
    return Workspace(
        path=np.zeros(length + 1, np.int64),
        prefix=np.zeros(length + 1, np.int64),
        left=np.zeros(num_chains, np.int64),
        taken=np.zeros(length + 1, np.bool_),
        sequence=np.zeros(length, np.int64),
        free=np.zeros(length + 1, np.int64),
        next_group=np.zeros(num_chains, np.int64),
        random=np.array([seed | 1], np.uint64),
    )


@kernel
def places_to_leave(chain: Array, depth: int) -> int:
    """How many groups of its chain are still to come behind group ``depth``."""
    count = 0
    while depth + 1 + count < len(chain) and chain[depth + 1 + count] == chain[depth]:
        count += 1
    return count


@kernel
def find_options(d: Workspace, c: Chains, depth: int, by_place: bool) -> int:
    """Mark in ``d.taken`` what the next level may not choose; return how many options it has.

    By place: chains with groups left. By group, chain by chain: free places behind the chain's group before,
    with room behind them for those of the chain that are still to come.
    """
    chain = c.chain
    if by_place:
        count = 0
        for i in range(len(c.size)):
            d.taken[i] = d.left[i] == 0
            count += d.left[i] > 0
        return count
    d.taken[:] = False
    for i in range(depth):
        d.taken[d.prefix[i]] = True
    least = 0
    if depth > 0 and chain[depth] == chain[depth - 1]:
        least = d.prefix[depth - 1] + 1
    leave = places_to_leave(chain, depth)
    place = len(chain) - 1
    while leave > 0:
        leave -= not d.taken[place]
        d.taken[place] = True
        place -= 1
    d.taken[:least] = True
    d.taken[len(chain)] = True
    count = 0
    for i in range(len(chain)):
        count += not d.taken[i]
    return count


@kernel
def select(t: Tree, d: Workspace, c: Chains, by_place: bool, alpha: float, beta: float) -> int:
    """Walk down by the upper confidence bound and add a node; the depth reached, or `EXHAUSTED`.

    ``d.path`` gets the nodes, ``d.prefix`` their options. A node with an option not yet tried gets that one as a
    new child, a random one of them. There must be room for one more node.
    """
    length = len(c.chain)
    while not t.closed[0]:
        node = 0
        depth = 0
        d.path[0] = 0
        assign_run(d.left, 0, c.size, 0, len(c.size))
        while True:
            if depth == length:
                t.closed[node] = True
                return depth
            if t.num_children[node] >= 0:
                # Not known to be complete: count the options, and take one that has no child.
                count = find_options(d, c, depth, by_place)
                if count > t.num_children[node]:
                    child = t.first_child[node]
                    while child != NOBODY:
                        d.taken[t.option[child]] = True
                        child = t.next_sibling[child]
                    skip = draw(d.random) % (count - t.num_children[node])
                    pick = 0
                    while d.taken[pick] or skip > 0:
                        skip -= not d.taken[pick]
                        pick += 1
                    fresh = t.size[0]
                    t.size[0] += 1
                    t.option[fresh] = pick
                    t.next_sibling[fresh] = t.first_child[node]
                    t.first_child[node] = fresh
                    t.num_children[node] += 1
                    d.prefix[depth] = pick
                    depth += 1
                    d.path[depth] = fresh
                    return depth
                t.num_children[node] = -1
            spread = np.log(max(2.0, float(t.visits[node])))
            best = -1.0
            child = t.first_child[node]
            chosen = NOBODY
            while child != NOBODY:
                if not t.closed[child]:
                    value = t.score[child] ** alpha + beta * np.sqrt(spread / max(1, t.visits[child]))
                    if value > best:
                        best = value
                        chosen = child
                child = t.next_sibling[child]
            if chosen == NOBODY:
                t.closed[node] = True
                break
            node = chosen
            if by_place:
                d.left[t.option[node]] -= 1
            d.prefix[depth] = t.option[node]
            depth += 1
            d.path[depth] = node
    return EXHAUSTED


@kernel
def shuffle(values: Array, count: int, random: Array) -> None:
    """Put the first ``count`` values in a random order."""
    for i in range(count - 1, 0, -1):
        j = draw(random) % (i + 1)
        values[i], values[j] = values[j], values[i]


@kernel
def complete(d: Workspace, c: Chains, depth: int, by_place: bool, orders: Array) -> None:
    """Fill every row of ``orders`` with a random order of groups that keeps what the prefix fixes."""
    length = len(c.chain)
    for row in range(len(orders)):
        if by_place:
            assign_run(d.next_group, 0, c.size, 0, len(c.size))
            for i in range(depth):
                d.sequence[i] = d.prefix[i]
                d.next_group[d.prefix[i]] -= 1
            at = depth
            for number in range(len(c.size)):
                for _ in range(d.next_group[number]):
                    d.sequence[at] = number
                    at += 1
            shuffle(d.sequence[depth:], length - depth, d.random)
        else:
            fill_around(d, c.chain, depth)
        write_order(c, d.sequence, d.next_group, orders[row])


@kernel
def fill_around(d: Workspace, chain: Array, depth: int) -> None:
    """Put the groups that have no place yet into the free places at random."""
    length = len(chain)
    d.sequence[:] = NOBODY
    for i in range(depth):
        d.sequence[d.prefix[i]] = chain[i]
    count = 0
    for i in range(length):
        if d.sequence[i] == NOBODY:
            d.free[count] = i
            count += 1
    shuffle(d.free, count, d.random)
    for i in range(count):
        d.sequence[d.free[i]] = chain[depth + i]
    if not 0 < depth < length or chain[depth] != chain[depth - 1]:
        return
    # What is left of a chain that the prefix cuts in two goes behind the part with a place. The free places are
    # in a random order, so what it changes places with is random.
    cut = chain[depth]
    last = d.prefix[depth - 1]
    other = 0
    for i in range(count):
        if d.sequence[d.free[i]] == cut and d.free[i] < last:
            while d.sequence[d.free[other]] == cut or d.free[other] < last:
                other += 1
            d.sequence[d.free[i]] = d.sequence[d.free[other]]
            d.sequence[d.free[other]] = cut


@kernel
def write_order(c: Chains, sequence: Array, next_group: Array, order: Array) -> None:
    """Order of groups, forward groups first, of a sequence of chains."""
    assign_run(next_group, 0, c.start, 0, len(c.start))
    ahead = 0
    behind = c.num_forward
    for i in range(len(sequence)):
        group = c.groups[next_group[sequence[i]]]
        next_group[sequence[i]] += 1
        if group < c.num_forward:
            order[ahead] = group
            ahead += 1
        else:
            order[behind] = group
            behind += 1


@kernel
def play(p: PackedGraph, s: Scratch, orders: Array, choice: Array, makespans: Array) -> None:
    """Makespan of every row of ``orders``, or a negative code."""
    for row in range(len(orders)):
        makespans[row] = evaluate(p, s, orders[row], choice, NEVER)


@kernel
def propagate(t: Tree, d: Workspace, depth: int, score: float) -> None:
    """Count a visit of every node of the path, and keep the best score."""
    for i in range(depth + 1):
        node = d.path[i]
        t.visits[node] += 1
        t.score[node] = max(t.score[node], score)
