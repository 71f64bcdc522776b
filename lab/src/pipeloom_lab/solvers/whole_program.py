"""Partition, placement and schedule of a chain of layers as one mixed integer program, by HiGHS, to compare with.

What `adaptis.txt` §5.6 calls the ILP solver: where every layer lies and when every pass runs are decided together. A
layer is a chunk of its own; neighbours on one rank need no message, so every partition is among the answers. It states
no memory, as the program for the schedule alone does not either.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, graph_of, task_number
from pipeloom.search import gpipe
from pipeloom.taskgraph import IntArray, topological_order
from pipeloom.timeline import Schedule, check, simulate
from pipeloom_lab.solvers import highs
from pipeloom_lab.solvers.highs import Row

_TOLERANCE = 1e-6
"""Of HiGHS on rows, in the unit of time."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Answer of the program, and what it proved."""

    placement: PartitionPlacement
    schedule: Schedule
    makespan_ns: int
    bound_ns: int
    """Of the schedule, simulated; and what the solver proved no placement and order to be below."""
    proved: bool
    """Whether the solver proved its answer the best."""
    num_columns: int
    num_rows: int
    """Size of the program; 0: it was not stated in time."""


@dataclass(slots=True)
class _Program:
    """Columns and rows under construction; the last column is minimised."""

    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def column(self, high: float, integer: bool = False) -> int:
        """Add a variable from 0 to ``high``."""
        self.high.append(high)
        self.integer.append(integer)
        return len(self.high) - 1

    def row(self, low: float, *terms: tuple[int, float]) -> None:
        """Add a row: the sum of columns times factors is at least ``low``."""
        columns, factors = zip(*terms, strict=True)
        self.rows.append((columns, factors, low))


class _Statement:
    """The program of a chain, no longer than a horizon; passes are F and B of every layer and microbatch.

    Microbatches are alike, so that they may keep one order: those of a layer's forwards, and of its backwards.
    """

    def __init__(self, chain: LayerChain, horizon: float, unit: float, until: float) -> None:
        self.chain, self.horizon, self.program, self.until = chain, horizon, _Program(), until
        layers, microbatches = range(chain.num_layers), range(chain.num_microbatches)
        times = (chain.forward_ns[:, 0], chain.backward_ns[:, 0] + chain.weight_ns[:, 0])
        self.length = [(each / unit).tolist() for each in times]
        self.delay = chain.delay_ns / unit
        # Ranks are alike, so that layer i has but i + 1 of them to choose from.
        self.on = [
            [self.program.column(1.0 if r <= i else 0.0, integer=True) for r in range(chain.num_ranks)] for i in layers
        ]
        self.start = [[[self.program.column(horizon) for _ in microbatches] for _ in layers] for _ in range(2)]
        self.same: dict[tuple[int, int], int] = {}

    def whole(self) -> bool:
        """Build the whole program; return False if time runs out."""
        self._place()
        self._follow()
        if not self._exclude():
            return False
        # The makespan comes last. No rank ends before it has done what lies on it.
        makespan, count = self.program.column(self.horizon), self.chain.num_microbatches
        for m in range(count):
            self.program.row(self.length[1][0], (makespan, 1.0), (self.start[1][0][m], -1.0))
        for rank in range(self.chain.num_ranks):
            loads = (
                (self.on[i][rank], -count * (self.length[0][i] + self.length[1][i]))
                for i in range(self.chain.num_layers)
            )
            self.program.row(0.0, (makespan, 1.0), *loads)
        return True

    def _place(self) -> None:
        for mine in self.on:
            self.program.row(1.0, *((column, 1.0) for column in mine))
            self.program.row(-1.0, *((column, -1.0) for column in mine))

    def _follow(self) -> None:
        """A microbatch goes through all layers and back, with messages between ranks, after those before it."""
        last = self.chain.num_layers - 1
        hops = [self.program.column(1.0) for _ in range(last)]
        for i, hop in enumerate(hops):
            for here, there in zip(self.on[i], self.on[i + 1], strict=True):
                self.program.row(0.0, (hop, 1.0), (here, -1.0), (there, 1.0))
        for m in range(self.chain.num_microbatches):
            for i, hop in enumerate(hops):
                for kind, before, after in ((0, i, i + 1), (1, i + 1, i)):
                    terms = (self.start[kind][after][m], 1.0), (self.start[kind][before][m], -1.0)
                    self.program.row(self.length[kind][before], *terms, (hop, -self.delay))
            self.program.row(self.length[0][last], (self.start[1][last][m], 1.0), (self.start[0][last][m], -1.0))
            for kind, starts in enumerate(self.start) if m else ():
                for i, mine in enumerate(starts):
                    self.program.row(self.length[kind][i], (mine[m], 1.0), (mine[m - 1], -1.0))

    def _exclude(self) -> bool:
        """Keep passes of open order apart on one rank; return False if building takes too long."""
        passes = [
            (kind, i, m)
            for m in range(self.chain.num_microbatches)
            for kind in range(2)
            for i in range(self.chain.num_layers)
        ]
        for number, (a, b) in enumerate(combinations(passes, 2)):
            if number % 4096 == 0 and time.monotonic() > self.until:
                return False
            if not (_before(a, b) or _before(b, a)):
                self._apart(a, b)
        return True

    def _apart(self, a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
        bit, far = self.program.column(1.0, integer=True), 2 * self.horizon
        away: tuple[tuple[int, float], ...] = ()
        slack = 0.0
        if a[1] != b[1]:  # passes of one layer are on one rank anyway
            away, slack = ((self._same(a[1], b[1]), -far),), -far
        first, second = (self.start[kind][i][m] for kind, i, m in (a, b))
        self.program.row(self.length[a[0]][a[1]] + slack - far, (second, 1.0), (first, -1.0), (bit, -far), *away)
        self.program.row(self.length[b[0]][b[1]] + slack, (first, 1.0), (second, -1.0), (bit, far), *away)

    def _same(self, one: int, other: int) -> int:
        """Return the column that is 1 if two layers are on one rank."""
        key = (min(one, other), max(one, other))
        if key not in self.same:
            self.same[key] = same = self.program.column(1.0)
            for here, there in zip(self.on[key[0]], self.on[key[1]], strict=True):
                self.program.row(-1.0, (same, 1.0), (here, -1.0), (there, -1.0))
        return self.same[key]


def _before(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    """Return whether a precedes b in every answer, by the chain or the order of microbatches."""
    (kind, i, m), (other, j, n) = a, b
    if m > n:
        return False
    return other > kind or (other == kind and (j >= i if kind == 0 else j <= i))


def whole_program(chain: LayerChain, *, seconds: float) -> WholeAnswer:
    """Choose placement and schedule with HiGHS, within a wall-clock limit.

    The solver gets no bound and no good schedule. Equal stages under GPipe only set its horizon.

    Parameters
    ----------
    chain : LayerChain
        With the first strategy of every layer; its memory is not stated.
    """
    until = time.monotonic() + seconds
    free = chain.with_capacity(None)
    known = _known(free)
    unit = max(1.0, float(free.total_ns[:, 0].mean()))
    statement = _Statement(free, known.makespan_ns / unit, unit, until)
    if not statement.whole():
        return known
    program = statement.program
    left = max(0.01, until - time.monotonic())
    high, low, slack = np.array(program.high), np.zeros(len(program.high)), np.zeros(len(program.rows))
    lp = highs.program_of_rows(low, high, program.integer, program.rows, slack)
    answer = highs.solve(lp, threads=1, random_seed=0, time_limit=left, mip_rel_gap=0.0)
    bound = max(0, int((answer.bound - _TOLERANCE) * unit)) if np.isfinite(answer.bound) else 0
    found = _answer(free, statement, answer.values, known) if answer.feasible else known
    return WholeAnswer(
        found.placement,
        found.schedule,
        found.makespan_ns,
        min(bound, found.makespan_ns),
        answer.optimal,
        len(high),
        len(program.rows),
    )


def _known(chain: LayerChain) -> WholeAnswer:
    from pipeloom.layout.cooptimize.standard import stages

    placement = stages(chain)
    graph = graph_of(chain, placement)
    schedule = gpipe(graph)
    return WholeAnswer(placement, schedule, simulate(graph, schedule).makespan_ns, 0, False, 0, 0)


def _answer(
    chain: LayerChain, statement: _Statement, values: npt.NDArray[np.float64], known: WholeAnswer
) -> WholeAnswer:
    """Return the simulated placement and orders of a solution, or ``known`` if the checker rejects them."""
    home = tuple(int(np.argmax(values[mine])) for mine in statement.on)
    # A layer stays a chunk of its own: passes of layers of one rank need not follow at once.
    placement = PartitionPlacement(tuple(range(chain.num_layers + 1)), home)
    graph = graph_of(chain, placement)
    depth: IntArray = np.zeros(graph.num_tasks, np.int64)
    depth[topological_order(graph)] = np.arange(graph.num_tasks)
    start = np.zeros(graph.num_tasks)
    for kind, starts in enumerate(statement.start):
        for i, mine in enumerate(starts):
            for m, column in enumerate(mine):
                start[task_number(kind, i, m, chain.num_layers, chain.num_microbatches)] = values[column]
    order = np.lexsort((depth, start))
    schedule = Schedule(tuple(order[graph.rank[order] == r] for r in range(chain.num_ranks)), None, "whole program")
    if check(graph, schedule):
        return known
    makespan = simulate(graph, schedule).makespan_ns
    return WholeAnswer(placement, schedule, makespan, 0, False, 0, 0)
