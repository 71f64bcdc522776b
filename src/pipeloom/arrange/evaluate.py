"""Judge one arrangement under one rule: the kernels as functions of named types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.arrange import kernels
from pipeloom.arrange.layer_chain import Arrangement, LayerChain, graph_of
from pipeloom.arrange.rules import Rule, to_plan
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule

NEVER = kernels.NEVER


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """A chain as the kernels read it."""

    layers: IntArray
    num_strategies: IntArray
    statics: IntArray
    room: IntArray
    num_microbatches: int
    delay: int
    stride: int

    @property
    def problem(self) -> tuple[IntArray, IntArray, int, int, int]:
        """Arguments that `kernels.evaluate` takes after layers and strategy."""
        return self.statics, self.room, self.num_microbatches, self.delay, self.stride


def arrays_of(chain: LayerChain) -> Arrays:
    """Lay a chain out for the kernels. The stride of keys is the work of a microbatch on the mean rank."""
    layers = np.ascontiguousarray(np.stack([
        chain.forward_ns, chain.backward_ns, chain.weight_ns, chain.activation_bytes, chain.gradient_bytes,
    ]))  # fmt: skip
    stride = max(1, int(chain.total_ns[:, 0].sum()) // chain.num_ranks)
    return Arrays(
        layers, np.array([len(row) for row in chain.strategies], dtype=np.int64), chain.static_bytes,
        chain.room_bytes, chain.num_microbatches, chain.delay_ns, stride,
    )  # fmt: skip


class Scratch:
    """Working memory of one thread."""

    def __init__(self, arrays: Arrays, most_chunks: int) -> None:
        width = max(most_chunks, len(arrays.room)) + 2
        self.ints = np.zeros((32, width), np.int64)
        self.end = np.zeros((2, max(1, most_chunks) * arrays.num_microbatches), np.int64)


class Judge:
    """Run many arrangements of one chain; counts them."""

    def __init__(self, chain: LayerChain, most_chunks: int) -> None:
        self.arrays = arrays_of(chain)
        self.evaluations = 0
        self._most = most_chunks
        self._scratch = Scratch(self.arrays, most_chunks)
        self._none = np.empty(0, np.int64)

    def ns(
        self, arrangement: Arrangement, rule: Rule, cutoff: int = NEVER, record: IntArray | None = None
    ) -> int:
        """Makespan in ns; `NEVER` where memory or ``cutoff`` rules it out. See `kernels.run` for ``record``."""
        self.evaluations += 1
        arrays = self.arrays
        strategy = np.array(arrangement.strategies or (0,) * arrays.layers.shape[1], dtype=np.int64)
        plan = to_plan(arrangement, rule, self._most)
        return int(kernels.evaluate(
            plan, arrays.layers, strategy, *arrays.problem, cutoff, self._scratch.ints, self._scratch.end,
            self._none if record is None else record,
        ))  # fmt: skip


def evaluate(chain: LayerChain, arrangement: Arrangement, rule: Rule, cutoff: int = NEVER) -> int:
    """Makespan of an arrangement under a rule, in ns; `NEVER` where memory or ``cutoff`` rules it out."""
    return Judge(chain, arrangement.num_chunks).ns(arrangement, rule, cutoff)


def schedule_of(
    chain: LayerChain, arrangement: Arrangement, rule: Rule, *, name: str | None = None, method: str = ""
) -> tuple[TaskGraph, Schedule]:
    """Write out the graph of an arrangement and the order in which the rule runs it.

    Raises
    ------
    ValueError
        When the memory limit rules the arrangement out.
    """
    num, m = arrangement.num_chunks, chain.num_microbatches
    record = np.full(3 * num * m, -1, np.int64)
    if Judge(chain, num).ns(arrangement, rule, NEVER, record) >= NEVER:
        raise ValueError("one microbatch of each chunk does not fit on some rank")
    graph = graph_of(chain, arrangement, name)
    codes = record[record >= 0]
    # Codes number the weight gradients of all chunks; tasks only those that there are.
    split = np.zeros(num, bool)
    split[np.unique(graph.pair[graph.kind == 3] // m)] = True
    number = np.full(3 * num * m, -1, np.int64)
    there = np.concatenate([np.ones(2 * num, bool), split]).repeat(m)
    number[there] = np.arange(there.sum())
    tasks = number[codes]
    home = graph.rank[tasks]
    order = tuple(tasks[home == rank] for rank in range(chain.num_ranks))
    candidate = None if graph.candidates is None else np.ones(graph.num_pairs, np.int64)
    return graph, Schedule(order, candidate, method)
