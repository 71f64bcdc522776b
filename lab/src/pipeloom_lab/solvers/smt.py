"""The whole problem as a formula for Z3: is there a schedule of at most so long? Asked again and again by halves.

Start times are integers; two tasks of a rank have a true or false order, from which memory follows as in
`pipeloom_lab.solvers.linear`.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

from pipeloom.errors import InputError
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, check, longest_paths, simulate
from pipeloom_lab.solvers import linear
from pipeloom_lab.solvers.exact import Exact, finish, unit_of


def z3(
    graph: TaskGraph,
    *,
    seconds: float,
    hint: Schedule,
    bound_ns: int,
    workers: int = 1,  # noqa: ARG001
    seed: int = 0,
) -> Exact:
    """Solve with Z3, on one thread whatever ``workers`` says; arguments as in `pipeloom_lab.solvers.exact.cp_sat`.

    Raises
    ------
    InputError
        The graph has candidates; z3-solver is not installed.
    """
    linear.refuse_candidates(graph, "z3")
    if find_spec("z3") is None:
        raise InputError("method", "z3 needs z3-solver, which is not installed", "pip install 'pipeloom-lab[exact]'")
    end = time.monotonic() + seconds
    question = _Question(graph, hint, seed)
    best, shortest = hint, simulate(graph, hint).makespan_ns // question.unit
    least = -(-bound_ns // question.unit)
    while least < shortest and (left := end - time.monotonic()) > 0:
        target = (least + shortest - 1) // 2
        answer = question.ask(target, left)
        if answer is None:
            break
        if isinstance(answer, Schedule):
            best = answer
            if check(graph, best):
                break
            shortest = min(target, simulate(graph, best).makespan_ns // question.unit)
        else:
            least = target + 1
    return finish(graph, hint, best, max(bound_ns, least * question.unit), least >= shortest)


class _Question:
    """The formula without a limit on the makespan."""

    def __init__(self, graph: TaskGraph, hint: Schedule, seed: int) -> None:
        import z3 as solver

        self.solver = solver
        self.graph = graph
        self.unit = unit_of(graph)
        horizon = simulate(graph, hint).makespan_ns
        self.before = linear.settled_orders(graph, horizon)
        head, tail = (x // self.unit for x in longest_paths(graph, graph.duration_ns))
        length = (graph.duration_ns // self.unit).tolist()
        context = solver.Context()
        self.context: Any = context
        self.formula: Any = solver.Solver(ctx=context)
        self.formula.set("random_seed", seed % (1 << 31))
        start = [solver.Int(f"s{t}", context) for t in range(graph.num_tasks)]
        self.makespan: Any = solver.Int("makespan", context)
        add = self.formula.add
        for t in range(graph.num_tasks):
            add(start[t] >= int(head[t]), start[t] + length[t] + int(tail[t]) <= self.makespan)
            for e in range(graph.successor_start[t], graph.successor_start[t + 1]):
                delay = int(graph.successor_delay_ns[e]) // self.unit
                add(start[int(graph.successor[e])] >= start[t] + length[t] + delay)
        for a in range(graph.num_tasks):
            for b in self.before[a].nonzero()[0].tolist():
                add(start[b] >= start[a] + length[a])
        self.bits: dict[tuple[int, int], Any] = {}
        for a, b in linear.open_pairs(graph, self.before):
            first = self.bits[a, b] = solver.Bool(f"o{a}.{b}", context)
            add(solver.Implies(first, start[b] >= start[a] + length[a]))
            add(solver.Implies(solver.Not(first), start[a] >= start[b] + length[b]))
        self._add_memory()

    def _add_memory(self) -> None:
        solver = self.solver
        zero = solver.IntVal(0, self.context)
        for task, at_start, others, net, capacity in linear.memory_rows(self.graph):
            spare = capacity - at_start
            changes = []
            for other, change in zip(others.tolist(), net.tolist(), strict=True):
                if (other, task) in self.bits:
                    changes.append(solver.If(self.bits[other, task], change, zero))
                elif (task, other) in self.bits:
                    changes.append(solver.If(self.bits[task, other], zero, change))
                elif self.before[other, task]:
                    spare -= change
            if changes:
                self.formula.add(solver.Sum(changes) <= spare)

    def ask(self, target: int, seconds: float) -> Schedule | bool | None:
        """A schedule of at most ``target`` units; False: there is none; None: not known in time."""
        solver = self.solver
        self.formula.set("timeout", max(1, int(1000 * seconds)))
        self.formula.push()
        try:
            self.formula.add(self.makespan <= target)
            answer = self.formula.check()
            if answer == solver.unknown:
                return None
            if answer == solver.unsat:
                return False
            model = self.formula.model()
            before = self.before.copy()
            for (a, b), bit in self.bits.items():
                first = solver.is_true(model.eval(bit, model_completion=True))
                before[a, b], before[b, a] = first, not first
        finally:
            self.formula.pop()
        return Schedule(linear.orders_from_pairs(self.graph, before), None, "z3")
