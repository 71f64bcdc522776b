"""Orders of groups as sequences of chains, for the papers' searches.

Every (microbatch, direction) is a chain of groups that must keep their own order (`pipeweaver.txt` §6.1: a
segment's priority is below that of the ones before it). So a sequence of chain numbers, each as often as its
chain is long, gives exactly the allowed orders.
"""

from __future__ import annotations

import numpy as np

from pipeloom.search import kernels, tree_kernels
from pipeloom.search.portfolio import starts
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray


class Sequences:
    """Sequences of chains and the orders of groups they stand for.

    Attributes
    ----------
    groups, chain : array, shape (num_groups,)
        Groups chain by chain, and the chain of each.
    chain_size, chain_start : array, shape (num_chains,)
    default : array, shape (num_groups,)
        First in, first out.
    """

    def __init__(self, search: Search) -> None:
        groups = search.groups
        self.num_forward = int(search.problem.num_groups[0])
        backward = np.arange(len(groups.first)) >= self.num_forward
        chain_of = 2 * groups.microbatch + backward
        self.groups: IntArray = np.lexsort((groups.first, chain_of))
        self.chain: IntArray = np.unique(chain_of[self.groups], return_inverse=True)[1].astype(np.int64)
        self.chain_size: IntArray = np.bincount(self.chain).astype(np.int64)
        self.chain_start: IntArray = np.cumsum(self.chain_size) - self.chain_size
        self._next_group = self.chain_start.copy()
        self.default: IntArray = self.chain[np.argsort(groups.first[self.groups], kind="stable")]

    def order(self, sequence: IntArray) -> IntArray:
        """Order of groups, forward groups first, of a sequence of chains."""
        order = np.empty(len(sequence), np.int64)
        tree_kernels.write_order(
            sequence, self._next_group, self.groups, self.chain_start, self.num_forward, order
        )
        return order


def published_choice(search: Search) -> IntArray:
    """Alternate where both kinds are ready, as both papers do."""
    return np.array([kernels.ALTERNATE, kernels.WEIGHT_LAST, search.rule, 1], np.int64)


def try_first(search: Search) -> None:
    """First in, first out, so that there is an answer whatever the budget."""
    start = next(starts(search.problem, search.groups, search.rule))
    search.try_order(start.order, start.choice)
