"""What each kernel of list scheduling takes on the same pipelines: why there is more than one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.arrange import random_layers
from benchmarks.search import one_by_one
from pipeloom.compiled import kernel
from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, chain_of_layers, graph_of, in_memory_of_1f1b
from pipeloom.layout.cooptimize.evaluate import arrays_of
from pipeloom.layout.cooptimize.evaluate import make_scratch as scratch_of_chain
from pipeloom.layout.cooptimize.kernels.evaluate import evaluate as evaluate_chain
from pipeloom.layout.cooptimize.layer_chain import chunk_costs
from pipeloom.layout.cooptimize.rules import PriorityRule, order_rule, to_draft
from pipeloom.layout.cooptimize.standard import round_robin, stages
from pipeloom.report import markdown_table
from pipeloom.search import Budget, context, first_in_first_out, one_f_one_b
from pipeloom.search.kernels.by_task import decode_by_task, make_ranks
from pipeloom.search.kernels.climb import expand
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.lists import Priorities, chunks_of, priorities_of
from pipeloom.search.packed import PackedGraph, pack_graph
from pipeloom.search.starts.sorted_orders import FirstInFirstOut
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import simulate
from pipeloom.tuning.kernels.chain import Chain, make_scratch
from pipeloom.tuning.kernels.one_f_one_b import NUM_SETTINGS
from pipeloom.tuning.kernels.one_f_one_b import run as run_1f1b

TITLE = "Kernels of list scheduling"
_RANKS, _MICROBATCHES, _LAYERS = 4, 64, 48
_LOOP_S = 0.01
_LOOKAHEAD = 256
_REPEATS = 61
_FIRST_NS = 10**15
"""Key by which backwards run before all forwards."""
_Loop = Callable[[int], object]
"""Calls a kernel several times."""


@kernel
def _by_task(packed: Any, ranks: Any, order: Any, made: Any, rule: Any, repeats: int) -> None:
    for _ in range(repeats):
        decode_by_task(packed, ranks, order, made, _LOOKAHEAD, NEVER, rule)


@kernel
def _by_chunk(draft: Any, arrays: Any, scratch: Any, record: Any, repeats: int) -> None:
    for _ in range(repeats):
        evaluate_chain(draft, arrays, scratch, NEVER, record)


@kernel
def _by_recurrence(chain: Any, order: Any, settings: Any, scratch: Any, repeats: int) -> None:
    for _ in range(repeats):
        run_1f1b(chain, order, settings, scratch, NEVER)


def run() -> str:
    """Measure, and return the section as Markdown."""
    chain = chain_of_layers(random_layers(0, _LAYERS, _RANKS, _MICROBATCHES))
    columns = []
    for placement, memory in ((stages(chain), 2.0), (round_robin(chain, 4), 1.5)):
        limited = in_memory_of_1f1b(chain, memory)
        loops, num_tasks = dict(_loops(limited, placement)), graph_of(limited, placement).num_tasks
        columns.append(dict(zip(loops, _per_task(list(loops.values()), num_tasks), strict=True)))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in columns[0]]
    header = ["kernel", "1 chunk per rank, 512 tasks", "4 chunks per rank, 2,048 tasks"]
    text = (
        f"The same pipeline for all kernels: a random chain of {_LAYERS} layers on {_RANKS} ranks with {_MICROBATCHES} "
        "equal microbatches, whole backwards, and a memory limit where the kernel knows one. CPU nanoseconds per task "
        f"in compiled code, median (least) of {_REPEATS} measurements. Co-optimization changes the placement in each "
        "evaluation, so a kernel that reads a task graph needs a new graph and new priorities each time. The last two "
        "rows measure this from Python:"
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _loops(chain: LayerChain, placement: PartitionPlacement) -> Iterator[tuple[str, _Loop]]:
    """Yield the name of each kernel and a loop over it."""
    graph = graph_of(chain, placement)
    for name, each in (
        ("`decode_unlimited`", graph_of(chain.with_capacity(None), placement)),
        ("`decode_limited`", graph),
    ):
        yield f"priorities of groups, {name}", _groups(each)

    rule = _backwards_first(placement)
    search = Search(graph, context.begin(Budget(evaluations=1)))
    order = first_in_first_out(graph).order
    ranks, made = make_ranks(search.packed), np.zeros(graph.num_tasks, np.int64)
    priorities = _priorities(chain, placement, rule, graph, search.packed)
    for name, arguments in (
        ("an order", (np.concatenate(order), made, None)),
        ("a rule", (priorities.order, made, priorities.rule)),
    ):
        loop = _loop(_by_task, search.packed, ranks, *arguments)
        yield f"priorities of tasks, {name}: `decode_by_task`", loop

    arrays = arrays_of(chain, placement.num_chunks)
    draft, record = to_draft(placement, rule, arrays.most_chunks), np.empty(0, np.int64)
    scratch = scratch_of_chain(arrays)
    by_task = decode_by_task(search.packed, ranks, priorities.order, made, _LOOKAHEAD, NEVER, priorities.rule)
    assert evaluate_chain(draft, arrays, scratch, NEVER, record) == by_task
    equal = "a rule, equal microbatches: `evaluate` and `run` of co-optimization"
    yield equal, _loop(_by_chunk, draft, arrays, scratch, record)
    if placement.num_chunks == chain.num_ranks:
        yield "1F1B by recurrence: `run` of tuning", _recurrence(chain, placement)

    def rebuilt(repeats: int) -> None:
        for _ in range(repeats):
            new = graph_of(chain, placement)
            packed = pack_graph(new)[0]
            again = _priorities(chain, placement, rule, new, packed)
            decode_by_task(packed, make_ranks(packed), again.order, made, _LOOKAHEAD, NEVER, again.rule)

    def evaluated(repeats: int) -> None:
        for _ in range(repeats):
            evaluate_chain(to_draft(placement, rule, arrays.most_chunks), arrays, scratch, NEVER, record)

    yield "another placement: graph, priorities and `decode_by_task`", rebuilt
    yield "another placement: `evaluate` and `run` of co-optimization", evaluated


def _backwards_first(placement: PartitionPlacement) -> PriorityRule:
    """Return the rule of 1F1B where memory limits the forwards."""
    keys = np.zeros((3, placement.num_chunks), np.int64)
    keys[1] = -_FIRST_NS
    return PriorityRule(keys, np.zeros_like(keys))


def _priorities(
    chain: LayerChain, placement: PartitionPlacement, rule: PriorityRule, graph: TaskGraph, packed: PackedGraph
) -> Priorities:
    """Apply a rule of co-optimization to the tasks of a graph."""
    chunks = chunks_of(graph)
    assert chunks is not None
    return priorities_of(graph, packed, chunks, order_rule(chain, placement, rule), np.arange(chain.num_microbatches))


def _groups(graph: TaskGraph) -> _Loop:
    """Return a loop over list scheduling of the first static order."""
    search = Search(graph, context.begin(Budget(evaluations=1)))
    start = next(FirstInFirstOut.propose(search))
    expand(search.packed, search.scratch, start.order)
    return _loop(one_by_one, search.packed, search.scratch, start.choice)


def _recurrence(chain: LayerChain, placement: PartitionPlacement) -> _Loop:
    """Return a loop over the recurrence of 1F1B. It gives the same makespan as the simulator."""
    costs, none = chunk_costs(chain, placement), np.zeros(0, np.int64)

    def equal(values: IntArray) -> IntArray:
        return np.tile(values, (chain.num_microbatches, 1))

    rows = Chain(
        forward=equal(costs.forward_ns),
        backward=equal(costs.backward_ns),
        activation=equal(costs.activation_bytes),
        delay=equal(np.zeros_like(costs.forward_ns)),
        part_start=np.zeros(chain.num_microbatches + 1, np.int64),
        part_forward=none,
        part_backward=none,
        part_bytes=none,
        part_output=none,
        static=np.zeros(chain.num_ranks, np.int64),
        capacity=np.full(chain.num_ranks, NEVER),
        trained=False,
    )
    order, settings, scratch = np.arange(chain.num_microbatches), np.zeros(NUM_SETTINGS, np.int64), make_scratch(rows)
    graph = graph_of(chain.with_capacity(None), placement)
    assert run_1f1b(rows, order, settings, scratch, NEVER)[0] == simulate(graph, one_f_one_b(graph)).makespan_ns
    return _loop(_by_recurrence, rows, order, settings, scratch)


def _loop(compiled: Callable[..., object], *arguments: Any) -> _Loop:
    return lambda repeats: compiled(*arguments, repeats)


def _per_task(loops: list[_Loop], num_tasks: int) -> list[str]:
    """Return the CPU nanoseconds per task of every loop: median (least). The loops are measured in turn."""
    repeats, times = [], []
    for loop in loops:
        loop(1)
        began_s = time.process_time()
        loop(1)
        repeats.append(max(1, int(_LOOP_S / max(time.process_time() - began_s, 1e-9))))
    for _ in range(_REPEATS):
        row = []
        for loop, count in zip(loops, repeats, strict=True):
            began_s = time.process_time()
            loop(count)
            row.append(1e9 * (time.process_time() - began_s) / (count * num_tasks))
        times.append(row)
    return [f"{statistics.median(column):,.0f} ({min(column):,.0f})" for column in zip(*times, strict=True)]
