"""Judge one arrangement under one rule: the kernels as functions of named types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.arrange import kernels
from pipeloom.arrange.layer_chain import Arrangement, LayerChain, graph_of
from pipeloom.arrange.starts import Rule, to_plan
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


def evaluate(chain: LayerChain, arrangement: Arrangement, rule: Rule, cutoff: int = NEVER) -> int:
    """Makespan of an arrangement under a rule, in ns; `NEVER` where memory or ``cutoff`` rules it out."""
    return _evaluate(chain, arrangement, rule, cutoff, np.empty(0, np.int64))


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
    if _evaluate(chain, arrangement, rule, NEVER, record) >= NEVER:
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


def _evaluate(chain: LayerChain, arrangement: Arrangement, rule: Rule, cutoff: int, record: IntArray) -> int:
    arrays = arrays_of(chain)
    scratch = Scratch(arrays, arrangement.num_chunks)
    strategy = np.array(arrangement.strategies or (0,) * chain.num_layers, dtype=np.int64)
    plan = to_plan(arrangement, rule, arrangement.num_chunks)
    return int(
        kernels.evaluate(
            plan, arrays.layers, strategy, *arrays.problem, cutoff, scratch.ints, scratch.end, record
        )
    )
