"""Orders of groups as sequences of chains, for the papers' searches.

Every (microbatch, direction) is a chain of groups that must keep their own order (PipeWeaver §6.1: a
segment's priority is below that of the ones before it). So a sequence of chain numbers, each as often as its
chain is long, gives exactly the allowed orders.
"""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.search.budget import Budget
from pipeloom.search.components import make_walks
from pipeloom.search.context import begin
from pipeloom.search.kernels import codes
from pipeloom.search.starts.sorted_orders import FirstInFirstOut
from pipeloom.search.state import Search
from pipeloom.search.uniform import uniform_settings
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom_lab.solvers.kernels.tree import Chains, write_order


class Sequences:
    """Sequences of chains and the orders of groups they stand for.

    Attributes
    ----------
    groups, chain : array, shape (num_groups,)
        Groups chain by chain, and the chain of each.
    default : array, shape (num_groups,)
        First in, first out.
    """

    def __init__(self, search: Search) -> None:
        groups = search.groups
        self.num_forward = int(search.packed.num_groups[0])
        backward = np.arange(len(groups.first)) >= self.num_forward
        chain_of = 2 * groups.microbatch + backward
        self.groups: IntArray = np.lexsort((groups.first, chain_of))
        self.chain: IntArray = np.unique(chain_of[self.groups], return_inverse=True)[1].astype(np.int64)
        self.chain_size: IntArray = np.bincount(self.chain).astype(np.int64)
        self.chain_start: IntArray = np.cumsum(self.chain_size) - self.chain_size
        self.chains = Chains(self.groups, self.chain, self.chain_size, self.chain_start, self.num_forward)
        self._next_group = self.chain_start.copy()
        self.default: IntArray = self.chain[np.argsort(groups.first[self.groups], kind="stable")]

    def order(self, sequence: IntArray) -> IntArray:
        """Return the order of groups of a sequence of chains, forward groups first."""
        order = np.empty(len(sequence), np.int64)
        write_order(self.chains, sequence, self._next_group, order)
        return order


def published_choice(search: Search) -> IntArray:
    """Return the rule of both papers: alternate directions where both are ready."""
    return np.array([codes.ALTERNATE, codes.WEIGHT_LAST, search.rule, 1], np.int64)


def try_first(search: Search) -> None:
    """Try first in, first out, so that there is an answer under any budget."""
    start = next(FirstInFirstOut.propose(search))
    search.try_order(start.order, start.choice)


def uniform_start(graph: TaskGraph) -> Schedule | None:
    """Return first in, first out under its fastest uniform setting, or None if no setting fits.

    Settings that fit in some odd order only are left out.
    """
    walks = None if graph.capacity_bytes is None else make_walks(graph)
    best_ns, best = codes.NEVER, None
    for setting in uniform_settings(graph):
        choice = np.full(graph.num_pairs, setting, np.int64)
        try:
            search = Search(graph.with_candidates(choice), begin(Budget(evaluations=1)), walks=walks, states=0)
        except InfeasibleError:
            continue
        try_first(search)
        if search.best_ns < best_ns:
            best_ns, best = search.best_ns, Schedule(search.orders(), choice, "first in, first out")
    return best
