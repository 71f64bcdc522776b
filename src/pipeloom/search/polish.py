"""Polish: local search on the order of the tasks, from the incumbent."""

from __future__ import annotations

import numpy as np

from pipeloom.search import polish_kernels
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray


class Polisher:
    """One thread's polishing of a search's incumbent."""

    def __init__(self, search: Search, seed: int) -> None:
        self.random = np.array([seed | 1], np.uint64)
        self.restart(search)

    def restart(self, search: Search) -> None:
        """Go on from the incumbent."""
        self.desk = polish_kernels.make_desk(search.problem, search.sequence)
        self.state = np.array([search.best_ns, search.best_ns], np.int64)

    def run(self, search: Search, temperature: float, count: int) -> int:
        """Try up to ``count`` orders; return how many were tried."""
        used = polish_kernels.polish(
            search.problem, self.desk, self.state, self.random, temperature, search.target_ns, count
        )
        return int(used)

    def sequence(self, search: Search) -> IntArray:
        """The best order found, as one sequence that all ranks can follow."""
        self.desk.order[:] = self.desk.best
        self.desk.place[self.desk.best] = np.arange(len(self.desk.best))
        makespan = polish_kernels.retime(search.problem, self.desk, polish_kernels.NEVER)
        assert makespan == self.state[1]
        # Places break ties, so tasks that last no time keep their rank's order.
        ends = self.desk.trial + search.problem.task[:-1, 0]
        order: IntArray = np.lexsort((self.desk.place, ends, self.desk.trial))
        return order


def polish(search: Search, temperature: float = 0.0, until: float = 1.0, since: float = 0.0) -> None:
    """Polish the incumbent until the budget (or its part ``until``) is spent or the target is reached."""
    polisher = Polisher(search, int(search.random.integers(1, 1 << 62)))
    while search.watch.share(search.evaluations) < until:
        count = search.round_size(until)
        if count == 0:
            return
        spent = search.watch.share(search.evaluations)
        heat = temperature * search.mean_task_ns * max(0.0, 1 - (spent - since) / (until - since))
        search.evaluations += max(1, polisher.run(search, heat, count))
        if polisher.state[1] < search.best_ns:
            search.keep(int(polisher.state[1]), polisher.sequence(search))
        else:
            search.report()


def rearrange(search: Search, temperature: float, until: float = 1.0, since: float = 0.0) -> None:
    """Anneal on one list of all the tasks, from the incumbent: the search for small graphs.

    Lists also stand for schedules in which a rank waits although something is ready, as a rollout never does.

    Parameters
    ----------
    temperature : float
        Start of the annealing, in mean durations of a task, falling to nothing between the parts ``since`` and
        ``until`` of the budget.
    """
    if search.done:
        return
    num_tasks, num_ranks = search.graph.num_tasks, search.graph.num_ranks
    listed, best = search.sequence.copy(), search.sequence.copy()
    made, waiting, ready = (np.empty(num_tasks, np.int64) for _ in range(3))
    ends = np.empty(2 * num_ranks, np.int64)
    random = np.array([search.random.integers(1, 1 << 62) | 1], np.uint64)
    state = np.array([search.best_ns, search.best_ns], np.int64)
    heat = temperature * search.mean_task_ns
    while (spent := search.watch.share(search.evaluations)) < until:
        count = search.round_size(until)
        if count == 0:
            break
        now = heat * max(0.0, 1 - (spent - since) / (until - since))
        used = int(
            polish_kernels.rearrange(
                search.problem, listed, made, best, waiting, ready, ends, state, random, now, search.target_ns, count
            )
        )  # fmt: skip
        search.evaluations += max(used, 1)
        if state[1] < search.best_ns:
            search.keep(int(state[1]), best)
