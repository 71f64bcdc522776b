"""DualPipeV's order: a V placement whose two directions run at once, as DeepSeek's public code has it.

Every rank has two stages, numbered here 0 (on the way down) and 1 (on the way up). What the original runs at once,
a forward of one stage and a backward of the other, stands here one after the other.
"""

from __future__ import annotations

from pipeloom.errors import InputError
from pipeloom.search.stage_chain import as_schedule, chain_of
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


def dual_pipe_v(graph: TaskGraph) -> Schedule:
    """Order a graph whose 2p stages lie on the ranks in a V.

    Raises
    ------
    InputError
        The graph has no labels, its stages are no V, or it has fewer than 2p microbatches.
    """
    p = graph.num_ranks
    homes: dict[int, int] = {}
    chain = chain_of(graph)
    for pair, label in enumerate(graph.labels or ()):
        homes[label.chunk] = int(graph.rank[graph.forward_of[pair]])
    placed = [homes[chunk] for chunk in sorted(homes)]
    if placed != [*range(p), *reversed(range(p))]:
        raise InputError("layout", "is no V of two chunks a rank", "put chunk c on rank c, or 2p - 1 - c")
    if chain.num_microbatches < 2 * p:
        raise InputError("num_microbatches", f"{chain.num_microbatches} is below twice the ranks, {2 * p}", "use more")
    orders = [_Rank(graph, rank).order(chain.num_microbatches) for rank in range(p)]
    return as_schedule(graph, orders, "dualpipev")


class _Rank:
    """One rank's order, built as the original runs it."""

    def __init__(self, graph: TaskGraph, rank: int) -> None:
        self._p, self._rank = graph.num_ranks, rank
        chunks = (rank, 2 * graph.num_ranks - 1 - rank)
        self._tasks: dict[tuple[int, str], list[int]] = {(s, k): [] for s in (0, 1) for k in "FBW"}
        for pair, label in enumerate(graph.labels or ()):
            if label.chunk in chunks:
                stage = chunks.index(label.chunk)
                self._tasks[stage, "F"].append(int(graph.forward_of[pair]))
                self._tasks[stage, "B"].append(int(graph.backward_of[pair]))
                self._tasks[stage, "W"].append(int(graph.weight_of[pair]))
        self._done = dict.fromkeys(self._tasks, 0)
        self._out: list[int] = []
        self._weights: list[int] = []

    def _forward(self, stage: int) -> None:
        self._out.append(self._take(stage, "F"))

    def _backward(self, stage: int, *, delay_weight: bool = False) -> None:
        self._out.append(self._take(stage, "B"))
        weight = self._take(stage, "W")
        if weight < 0:
            return
        if delay_weight:
            self._weights.append(weight)
        else:
            self._out.append(weight)

    def _weight(self) -> None:
        if self._weights:
            self._out.append(self._weights.pop(0))

    def _take(self, stage: int, kind: str) -> int:
        place = self._done[stage, kind]
        self._done[stage, kind] += 1
        return self._tasks[stage, kind][place]

    def order(self, m: int) -> list[int]:
        """Eight steps: fill, meet, turn, steady state, and back."""
        p, r = self._p, self._rank
        for _ in range(2 * (p - r - 1)):
            self._forward(0)
        for _ in range(r + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(p - r - 1):
            self._backward(1, delay_weight=True)
            self._weight()
            self._forward(1)
        for _ in range(m - 2 * p + r + 1):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(p - r - 1):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        delay = False
        for i in range(r + 1):
            delay = delay or (i == (r + 1) // 2 and r % 2 == 1)
            self._backward(1, delay_weight=delay)
            delay = delay or (i == (r + 1) // 2 and r % 2 == 0)
            self._backward(0, delay_weight=delay)
        for _ in range(p - r - 1):
            self._weight()
            self._backward(0, delay_weight=True)
        while self._weights:
            self._weight()
        return self._out
