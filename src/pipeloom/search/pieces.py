"""Search of large graphs piece by piece: a change to one microbatch of thousands need not try all of them again.

Where memory is limited, jobs run a few at a time, in about the order in which they begin. So the incumbent's jobs are
cut into pieces in that order, each piece is searched as a graph of its own, and what was found is put together again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from pipeloom.search.kernels.blocks import make_blocks, measure, sequence_of
from pipeloom.search.state import Run, Search
from pipeloom.search.stopping import WHOLE, Meter, Stretch, Until
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import lower_bound


def search_pieces(search: Search, stretch: Stretch, run: Run) -> None:
    """Search the pieces one after the other with ``run``, and keep what they give together, if it is better.

    The orders of all pieces, one behind the other, fit whenever each does. A rank begins with the next piece when it
    has ended the one before; what it waits there is less, the larger the pieces are.
    """
    meter, params, began, found = search.meter, search.params, search.meter.spent, []
    pieces = cut(search, params.pieces.tasks)
    take = Parts(search.graph)
    for number, tasks in enumerate(pieces):
        part = began + (stretch.until - began) * (number + 1) / len(pieces)
        graph = take(tasks)
        watch = Until(meter.watch, meter.used, part).start()
        context = replace(
            search.context,
            meter=Meter(watch),
            bound=lower_bound(graph),
            seed=search.context.seed + number,
            # A piece is not cut again.
            params=structs.replace(params, pieces=structs.replace(params.pieces, most_tasks=graph.num_tasks)),
            on_progress=None,
        )
        piece = Search(graph, context)
        run(piece, WHOLE)
        found.append(tasks[piece.sequence])
        meter.used += context.meter.used
        search.report()
    sequence = np.concatenate(found)
    blocks = make_blocks(search.packed, sequence)
    makespan = int(measure(search.packed, blocks))
    if makespan < search.best_ns:
        search.keep(makespan, sequence_of(search.packed, blocks))


def cut(search: Search, num_tasks: int) -> list[IntArray]:
    """Tasks of every piece, ascending: jobs in the order in which the incumbent begins them, about so many tasks."""
    job_of_task = search.jobs.job_of_task
    jobs, first = np.unique(job_of_task[search.sequence], return_index=True)
    turn = np.empty(len(jobs), np.int64)
    turn[np.argsort(first)] = np.arange(len(jobs))
    size = np.bincount(turn[job_of_task])
    count = max(1, round(len(job_of_task) / num_tasks))
    # A job belongs to the piece in which its middle lies.
    piece = ((np.cumsum(size) - size / 2) * count / len(job_of_task)).astype(np.int64)
    of_task = piece[turn[job_of_task]]
    return [tasks for tasks in _rows(of_task, count) if len(tasks)]


def _rows(row: IntArray, num_rows: int) -> list[IntArray]:
    """Indices of every row number, ascending."""
    return np.split(np.argsort(row, kind="stable"), np.cumsum(np.bincount(row, minlength=num_rows))[:-1])


class Parts:
    """Takes graphs of some whole jobs out of a graph; what that needs to know of the graph is found once.

    Parameters
    ----------
    graph : TaskGraph
        Without candidates.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.number = np.full(graph.num_tasks, NO_TASK, np.int64)
        self.edges = np.argsort(graph.edge_source, kind="stable")
        self.edge_start = np.searchsorted(graph.edge_source[self.edges], np.arange(graph.num_tasks + 1))

    def __call__(self, tasks: IntArray) -> TaskGraph:
        """Return the graph of some tasks, ascending, with which nothing else is connected; they are numbered anew."""
        graph, number = self.graph, self.number
        number[tasks] = np.arange(len(tasks))
        pairs, pair = np.unique(graph.pair[tasks], return_inverse=True)
        edges = np.sort(self.edges[_of_rows(self.edge_start, tasks)])

        def renumbered(of_pair: IntArray) -> IntArray:
            chosen = of_pair[pairs]
            return np.where(chosen == NO_TASK, NO_TASK, number[chosen])

        def row_start(start: IntArray) -> IntArray:
            return np.append(0, np.cumsum(start[tasks + 1] - start[tasks]))

        before, after = _of_rows(graph.predecessor_start, tasks), _of_rows(graph.successor_start, tasks)
        return replace(
            graph,
            kind=graph.kind[tasks],
            rank=graph.rank[tasks],
            duration_ns=graph.duration_ns[tasks],
            pair=pair,
            segment=np.unique(graph.segment[tasks], return_inverse=True)[1],
            microbatch=np.unique(graph.microbatch[tasks], return_inverse=True)[1],
            module=graph.module[tasks],
            activation_bytes=graph.activation_bytes[pairs],
            weight_gradient_bytes=graph.weight_gradient_bytes[pairs],
            edge_source=number[graph.edge_source[edges]],
            edge_target=number[graph.edge_target[edges]],
            edge_delay_ns=graph.edge_delay_ns[edges],
            edge_bytes=graph.edge_bytes[edges],
            labels=None,
            forward_of=renumbered(graph.forward_of),
            backward_of=renumbered(graph.backward_of),
            weight_of=renumbered(graph.weight_of),
            predecessor_start=row_start(graph.predecessor_start),
            predecessor=number[graph.predecessor[before]],
            predecessor_delay_ns=graph.predecessor_delay_ns[before],
            successor_start=row_start(graph.successor_start),
            successor=number[graph.successor[after]],
            successor_delay_ns=graph.successor_delay_ns[after],
        )


def _of_rows(start: IntArray, rows: IntArray) -> IntArray:
    """Indices of the entries of some compressed rows, row after row."""
    length = start[rows + 1] - start[rows]
    ends = np.cumsum(length)
    found: IntArray = np.repeat(start[rows] - (ends - length), length) + np.arange(int(ends[-1]) if len(ends) else 0)
    return found
