"""Polish: local search on the order of the tasks, from the incumbent."""

from __future__ import annotations

import numpy as np

from pipeloom.search.kernels import polish as kernels
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.packed import DURATION
from pipeloom.search.state import Search
from pipeloom.search.stopping import WHOLE, Stretch
from pipeloom.taskgraph import IntArray


class Polisher:
    """One thread's polishing of a search's incumbent."""

    def __init__(self, search: Search, seed: int) -> None:
        self.random = np.array([seed | 1], np.uint64)
        self.desk = kernels.make_desk(search.packed, search.sequence)
        self.state = np.array([search.best_ns, search.best_ns], np.int64)

    def run(self, search: Search, terms: Terms) -> int:
        """Try up to so many orders; return how many were tried."""
        return int(kernels.polish(search.packed, self.desk, self.state, self.random, terms))

    def sequence(self, search: Search) -> IntArray:
        """The best order found, as one sequence that all ranks can follow."""
        self.desk.order[:] = self.desk.best
        self.desk.place[self.desk.best] = np.arange(len(self.desk.best))
        makespan = kernels.retime(search.packed, self.desk, NEVER)
        assert makespan == self.state[1]
        # Places break ties, so tasks that last no time keep their rank's order.
        ends = self.desk.trial + search.packed.task[:-1, DURATION]
        order: IntArray = np.lexsort((self.desk.place, ends, self.desk.trial))
        return order


def polish(search: Search, stretch: Stretch = WHOLE, heat: float = 0.0) -> None:
    """Polish the incumbent until a part of the budget is spent or the target is reached.

    ``heat``: start of the annealing, in mean durations of a task, falling to nothing over the stretch.
    """
    polisher = Polisher(search, int(search.random.integers(1, 1 << 62)))
    for count in search.rounds(stretch):
        temperature = heat * search.mean_task_ns * stretch.cooling(search.meter.spent)
        search.meter.used += max(1, polisher.run(search, Terms(temperature, search.target_ns, count)))
        if polisher.state[1] < search.best_ns:
            search.keep(int(polisher.state[1]), polisher.sequence(search))
        else:
            search.report()


def rearrange(search: Search, stretch: Stretch, heat: float) -> None:
    """Anneal on one list of all the tasks, from the incumbent: the search for small graphs.

    Lists also stand for schedules in which a rank waits although something is ready, as a rollout never does.
    ``heat`` as in `polish`.
    """
    if search.done:
        return
    listed = kernels.make_list(search.packed, search.sequence)
    random = np.array([search.random.integers(1, 1 << 62) | 1], np.uint64)
    state = np.array([search.best_ns, search.best_ns], np.int64)
    for count in search.rounds(stretch):
        temperature = heat * search.mean_task_ns * stretch.cooling(search.meter.spent)
        terms = Terms(temperature, search.target_ns, count)
        search.meter.used += max(1, int(kernels.rearrange(search.packed, listed, state, random, terms)))
        if state[1] < search.best_ns:
            search.keep(int(state[1]), listed.best)
