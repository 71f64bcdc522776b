"""The best setting for all pairs alike, with the order that shows it."""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.search import kernels
from pipeloom.search.jobs import make_walks
from pipeloom.search.levels import levels_by_time
from pipeloom.search.sequences import try_first
from pipeloom.search.state import Search
from pipeloom.search.stopping import Evaluations
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


def uniform_start(graph: TaskGraph) -> Schedule | None:
    """First in, first out under the setting for all pairs with which that is fastest; None: no setting fits.

    Settings that fit in some odd order only are left out.
    """
    walks = None if graph.capacity_bytes is None else make_walks(graph)
    best_ns, best = kernels.NEVER, None
    for level in levels_by_time(graph):
        choice = np.full(graph.num_pairs, level, np.int64)
        watch = Evaluations(1).start()
        try:
            search = Search(graph.with_candidates(choice), 0, watch, 0, walks=walks, thorough=False)
        except InfeasibleError:
            continue
        try_first(search)
        if search.best_ns < best_ns:
            best_ns, best = search.best_ns, Schedule(search.orders(), choice, "first in, first out")
    return best
