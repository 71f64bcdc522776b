"""The papers' searches over segment orders: tree search in both published forms, depth-first, random; and worst.

A sequence of *tokens* stands for an order: every (microbatch, direction) is a chain of groups that must keep
their own order (`pipeweaver.txt` §6.1: a segment's priority is below that of the ones before it), so a
sequence of chain numbers, each as often as its chain is long, gives exactly the allowed orders.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from pipeloom.search import kernels
from pipeloom.search.portfolio import starts
from pipeloom.search.scratch import make_scratch
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray

ROLLOUTS = 10
"""Random completions of every new node, as in both papers."""

ALPHA, BETA = 8.0, 0.05
"""Of the selection rule ``score ** ALPHA + BETA * sqrt(log(N) / N_child)``. The papers do not give theirs;
these were set by hand and not tuned."""


class Tokens:
    """Sequences of chains and the orders of groups they stand for."""

    def __init__(self, search: Search) -> None:
        groups = search.groups
        num_forward = int(search.problem.num_groups[0])
        backward = np.arange(len(groups.first)) >= num_forward
        chain_of = 2 * groups.microbatch + backward
        self.groups: IntArray = np.lexsort((groups.first, chain_of))
        self.tokens: IntArray = np.unique(chain_of[self.groups], return_inverse=True)[1].astype(np.int64)
        self.num_chains = int(self.tokens.max()) + 1
        self.backward = backward
        self.default: IntArray = self.tokens[np.argsort(groups.first[self.groups], kind="stable")]

    def order(self, sequence: IntArray) -> IntArray:
        """Order of groups, forward groups first, of a sequence of tokens."""
        merged = np.empty(len(sequence), np.int64)
        merged[np.argsort(sequence, kind="stable")] = self.groups
        behind = self.backward[merged]
        return np.concatenate([merged[~behind], merged[behind]])


def _choice(search: Search) -> IntArray:
    """Alternate where both kinds are ready, as both papers do."""
    return np.array([kernels.ALTERNATE, kernels.WEIGHT_LAST, search.rule, 1], np.int64)


def _first(search: Search) -> None:
    """First in, first out, so that there is an answer whatever the budget."""
    start = next(starts(search.problem, search.groups, search.rule))
    search.try_order(start.order, start.choice)


def random_search(search: Search, _threads: int = 1, until: float = 1.0) -> None:
    """Uniformly random sequences."""
    _first(search)
    tokens, choice = Tokens(search), _choice(search)
    while search.watch.share(search.evaluations) < until and search.round_size():
        search.try_order(tokens.order(search.random.permutation(tokens.tokens)), choice)


def depth_first(search: Search, _threads: int = 1, until: float = 1.0) -> None:
    """All sequences in lexicographic order from first in, first out: the last places change first."""
    _first(search)
    tokens, choice = Tokens(search), _choice(search)
    # Ranks of the chains in the order of their first appearance, so that the default sequence is the first.
    sequence = tokens.default.copy()
    rank = np.empty(tokens.num_chains, np.int64)
    appearance = sequence[np.sort(np.unique(sequence, return_index=True)[1])]
    rank[appearance] = np.arange(tokens.num_chains)
    current = rank[sequence]
    while search.watch.share(search.evaluations) < until and search.round_size():
        search.try_order(tokens.order(appearance[current]), choice)
        if not _next_permutation(current):
            return


def _next_permutation(values: IntArray) -> bool:
    """Turn into the next sequence in lexicographic order; False after the last one."""
    falls = np.flatnonzero(values[:-1] < values[1:])
    if not falls.size:
        return False
    i = int(falls[-1])
    j = i + 1 + int(np.flatnonzero(values[i + 1 :] > values[i])[-1])
    values[i], values[j] = values[j], values[i]
    values[i + 1 :] = values[i + 1 :][::-1].copy()
    return True


@dataclass(slots=True)
class _Node:
    """One partial assignment: visits, best score below, children by token or priority, whether exhausted."""

    visits: int = 0
    score: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)
    closed: bool = False


def mcts_sequence(search: Search, threads: int = 1, until: float = 1.0) -> None:
    """DIP's form (`dip.txt` §5.1): the node at depth d picks the segment at place d; the score is time."""
    _tree_search(search, threads, until, by_place=True)


def mcts_priority(search: Search, threads: int = 1, until: float = 1.0) -> None:
    """PipeWeaver's form (§6.1): the node at depth d gives group d its place; the score is the non-bubble share."""
    _tree_search(search, threads, until, by_place=False)


def _tree_search(search: Search, threads: int, until: float, by_place: bool) -> None:
    _first(search)
    tokens, root, lock = Tokens(search), _Node(), threading.Lock()
    seeds = search.random.integers(1, 1 << 62, size=threads)

    def work(seed: int) -> None:
        walker = _Walker(search, tokens, root, lock, int(seed), by_place)
        while search.watch.share(search.evaluations) < until and search.round_size() and not root.closed:
            walker.step()

    if threads == 1:
        work(int(seeds[0]))
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, seeds))


class _Walker:
    """One thread of a tree search; statistics and incumbent change under the lock (`dip.txt` §6.2)."""

    def __init__(
        self, search: Search, tokens: Tokens, root: _Node, lock: threading.Lock, seed: int, by_place: bool
    ) -> None:
        self.search, self.tokens, self.root, self.lock, self.by_place = search, tokens, root, lock, by_place
        self.random = np.random.default_rng(seed)
        self.scratch = make_scratch(search.problem)
        self.choice = _choice(search)
        self.work_share = float(search.problem.work.sum()) / len(search.problem.room)

    def step(self) -> None:
        """Select, expand, roll out ten times, propagate."""
        with self.lock:
            path, prefix = self._select()
        best, best_order = kernels.NEVER, None
        for _ in range(ROLLOUTS):
            order = self.tokens.order(self._complete(prefix))
            makespan = int(
                kernels.evaluate(self.search.problem, self.scratch, order, self.choice, kernels.NEVER)
            )
            if 0 <= makespan < best:
                best, best_order = makespan, order
        with self.lock:
            self.search.evaluations += ROLLOUTS
            if best_order is not None:
                self.search.adopt(best, best_order, self.choice)
                score = (self.search.target_ns if self.by_place else self.work_share) / max(1, best)
                for node in path:
                    node.score = max(node.score, score)
            for node in path:
                node.visits += 1

    def _options(self, prefix: list[int]) -> list[int]:
        """What the next level may choose: chains with groups left, or places still free."""
        length = len(self.tokens.tokens)
        if len(prefix) == length:
            return []
        if self.by_place:
            left = np.bincount(self.tokens.tokens, minlength=self.tokens.num_chains)
            left -= np.bincount(np.array(prefix, np.int64), minlength=self.tokens.num_chains)
            return [int(c) for c in np.flatnonzero(left)]
        # Groups go chain by chain; a later group of a chain goes behind the earlier one, and leaves places
        # behind it for those of its chain that are still to come.
        depth = len(prefix)
        chain = self.tokens.tokens
        last = prefix[-1] if depth and chain[depth - 1] == chain[depth] else -1
        free = np.ones(length, np.bool_)
        free[np.array(prefix, np.int64)] = False
        places = np.flatnonzero(free)
        to_come = int((chain[depth:] == chain[depth]).sum()) - 1
        places = places[: len(places) - to_come] if to_come else places
        return [int(x) for x in places[places > last]]

    def _select(self) -> tuple[list[_Node], list[int]]:
        node, path = self.root, [self.root]
        prefix: list[int] = []
        while True:
            options = self._options(prefix)
            if not options:
                node.closed = True
                return path, prefix
            fresh = [option for option in options if option not in node.children]
            if fresh:
                pick = fresh[int(self.random.integers(0, len(fresh)))]
                node.children[pick] = child = _Node()
                return [*path, child], [*prefix, pick]
            opened = [(key, child) for key, child in node.children.items() if not child.closed]
            if not opened:
                node.closed = True
                if node is self.root:
                    return path, prefix
                node, path, prefix = self.root, [self.root], []
                continue
            spread = math.log(max(2, node.visits))
            pick, node = max(
                opened,
                key=lambda item: item[1].score ** ALPHA + BETA * math.sqrt(spread / max(1, item[1].visits)),
            )
            path.append(node)
            prefix.append(pick)

    def _complete(self, prefix: list[int]) -> IntArray:
        """A random sequence of tokens that begins with, or contains, what the prefix fixes."""
        chain = self.tokens.tokens
        if self.by_place:
            left = np.bincount(chain, minlength=self.tokens.num_chains)
            fixed = np.array(prefix, np.int64)
            left -= np.bincount(fixed, minlength=self.tokens.num_chains)
            rest = np.repeat(np.arange(self.tokens.num_chains), left)
            return np.concatenate([fixed, self.random.permutation(rest)])
        depth = len(prefix)
        sequence = np.full(len(chain), -1, np.int64)
        sequence[np.array(prefix, np.int64)] = chain[:depth]
        free = np.flatnonzero(sequence < 0)
        sequence[free] = self.random.permutation(chain[depth:])
        if 0 < depth < len(chain) and chain[depth] == chain[depth - 1]:
            # The rest of the chain that is cut in two goes behind its fixed part.
            ahead = free[(sequence[free] == chain[depth]) & (free < prefix[-1])]
            behind = free[(sequence[free] != chain[depth]) & (free > prefix[-1])]
            for a, b in zip(ahead.tolist(), self.random.permutation(behind).tolist(), strict=False):
                sequence[a], sequence[b] = sequence[b], sequence[a]
        return sequence


def worst(search: Search, _threads: int = 1, until: float = 1.0) -> None:
    """The inverted objective (`dip.txt` §7.3): the longest schedule that any order gives.

    Random sequences, and changes of the longest one found; the answer is not an incumbent to improve on.
    """
    tokens, choice = Tokens(search), _choice(search)
    longest, at_best = -1, tokens.default
    problem, scratch = search.problem, search.scratch
    turn = 0
    while longest < 0 or (
        search.watch.share(search.evaluations) < until and search.watch.left(search.evaluations, 1)
    ):
        sequence = at_best.copy()
        if turn % 4 == 3:
            sequence = search.random.permutation(sequence)
        elif turn:
            a, b = search.random.integers(0, len(sequence), size=2)
            sequence[a], sequence[b] = sequence[b], sequence[a]
        turn += 1
        search.evaluations += 1
        makespan = int(kernels.evaluate(problem, scratch, tokens.order(sequence), choice, kernels.NEVER))
        if makespan > longest:
            longest, at_best = makespan, sequence
            search.keep(makespan, scratch.sequence)
