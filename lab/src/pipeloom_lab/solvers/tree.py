"""The papers' Monte Carlo tree search, in both published forms.

Threads share one tree: they select and propagate under one lock, and make their rollouts, which take nearly all of
the time, outside it (DIP §6.2).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pipeloom.search.budget import Stretch
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.climb import evaluate
from pipeloom.search.scratch import make_scratch
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray
from pipeloom_lab.solvers.kernels import tree as tree_kernels
from pipeloom_lab.solvers.rollouts import RolloutSearch
from pipeloom_lab.solvers.sequences import Sequences, published_choice, try_first

ROLLOUTS = 10
"""Random completions of every new node, as in both papers."""

ALPHA, BETA = 32.0, 0.003
"""Of the selection rule ``score ** ALPHA + BETA * sqrt(log(N) / N_child)``. The papers do not give theirs. Tuned: the
least sum of gaps over four families (``docs/notes/search.md``) among alpha 1, 8, 32, 128 and beta 0.003, 0.03, 0.3.
"""

FIRST_CAPACITY = 1 << 12


def mcts_sequence(search: Search, stretch: Stretch) -> None:
    """DIP's form (§5.1): the node at depth d picks the segment at place d; the score is time."""
    _tree_search(search, stretch, by_place=True)


def mcts_priority(search: Search, stretch: Stretch) -> None:
    """PipeWeaver's form (§6.1): the node at depth d gives group d its place; the score is the non-bubble share."""
    _tree_search(search, stretch, by_place=False)


def _tree_search(search: Search, stretch: Stretch, by_place: bool) -> None:
    threads = search.context.threads
    try_first(search)
    shared = _SharedTree(search, by_place)
    seeds = search.random.integers(1, 1 << 62, size=threads)

    def work(seed: int) -> None:
        walker = _Walker(shared, seed)
        while search.meter.spent < stretch.until and search.round_size() and walker.step():
            pass

    if threads == 1:
        work(int(seeds[0]))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, seeds.tolist()))


class _SharedTree:
    """The tree, and what all threads read; tree and incumbent change under the lock only."""

    def __init__(self, search: Search, by_place: bool) -> None:
        self.search, self.by_place = search, by_place
        self.sequences = Sequences(search)
        self.tree = tree_kernels.make_tree(FIRST_CAPACITY)
        self.lock = threading.Lock()
        # DIP scores by time, here against the bound, so that it is at most one; PipeWeaver by the busy share.
        work = float(search.packed.work.sum()) / len(search.packed.capacity)
        self.full_score = float(search.target_ns) if by_place else work

    def grow_if_full(self) -> None:
        """Make the tree larger if it is full."""
        if self.tree.size[0] == len(self.tree.visits):
            self.tree = tree_kernels.make_tree(2 * len(self.tree.visits), self.tree)


@dataclass(frozen=True, slots=True)
class _Best:
    makespan: int
    order: IntArray | None


class _Walker:
    """One thread of a tree search."""

    def __init__(self, shared: _SharedTree, seed: int) -> None:
        self.shared = shared
        search, sequences = shared.search, shared.sequences
        self.scratch = make_scratch(search.packed)
        self.chooser = search.chooser.another() if isinstance(search, RolloutSearch) else None
        self.choice = published_choice(search)
        self.workspace = tree_kernels.make_workspace(len(sequences.chain), len(sequences.chain_size), seed)
        self.orders = np.empty((ROLLOUTS, len(sequences.chain)), np.int64)
        self.makespans = np.empty(ROLLOUTS, np.int64)

    def step(self) -> bool:
        """Select, expand, roll out ten times, propagate; False once everything has been tried."""
        shared, search, sequences = self.shared, self.shared.search, self.shared.sequences
        with shared.lock:
            shared.grow_if_full()
            depth = tree_kernels.select(shared.tree, self.workspace, sequences.chains, shared.by_place, ALPHA, BETA)
        if depth == tree_kernels.EXHAUSTED:
            return False
        tree_kernels.complete(self.workspace, sequences.chains, depth, shared.by_place, self.orders)
        best = self._roll_out()
        with shared.lock:
            search.meter.used += ROLLOUTS
            if best.order is not None:
                search.adopt(best.makespan, best.order, self.choice)
            score = shared.full_score / max(1, best.makespan)
            tree_kernels.propagate(shared.tree, self.workspace, depth, score)
        return True

    def _roll_out(self) -> _Best:
        """Interleave every order (DIP §5.2), choose its strategies (§5.3), and keep the shortest."""
        search, makespans = self.shared.search, self.makespans
        packed = search.packed
        if self.chooser is None:
            tree_kernels.play(packed, self.scratch, self.orders, self.choice, makespans)
        else:
            for row, order in enumerate(self.orders):
                makespans[row] = evaluate(packed, self.scratch, order, self.choice, codes.NEVER)
                if makespans[row] >= 0:
                    makespans[row] = self.chooser.choose(self.scratch.sequence)
        finished = np.flatnonzero(makespans >= 0)
        if not finished.size:
            return _Best(codes.NEVER, None)
        row = int(finished[np.argmin(makespans[finished])])
        return _Best(int(makespans[row]), self.orders[row])
