"""One training iteration of one pipeline replica, operator by operator, with reused stages.

The other replicas do the same with their own data; the gradient reduction at the end connects them. Tensor-parallel
peers are simulated once. Every pass of a stage is one call of a subgraph. Messages between ranks use separate wires, so
they overlap with computation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeloom.collector import collector_paused
from pipeloom.emulator.graph import FOREVER, MemoryCurve, memory_curve
from pipeloom.emulator.pipeline import PipelineModel, Work
from pipeloom.emulator.result import EmulatedStep, RankTime, length, union
from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.schedule import list_schedule
from pipeloom.emulator.session import Session
from pipeloom.emulator.static import update_ps
from pipeloom.emulator.step_tasks import StepTasks
from pipeloom.emulator.subgraph import Call, Port, Subgraph
from pipeloom.emulator.tape import COMPUTE, NUM_DEVICES
from pipeloom.errors import InputError, check_count
from pipeloom.limits import MAX_PASSES
from pipeloom.spec import ChunkStrategy, chunk_strategy
from pipeloom.totals import PS_PER_S, check_work, summable

DEVICES_PER_RANK = NUM_DEVICES + 2
FORWARD_WIRE, BACKWARD_WIRE = NUM_DEVICES, NUM_DEVICES + 1


class StepPlan(NamedTuple):
    """The order of a step's tasks, and what it takes when every task takes its planned time."""

    duration_ps: int
    in_flight: int
    order: list[int]
    fits: bool
    """Whether the order fits in memory."""
    unconstrained: bool
    """Whether every number of microbatches in flight fits in memory."""


class _IssuedCalls:
    """The calls of a step's tasks and messages in one session, issued in the order of the plan.

    Sends follow the task whose result they send.
    """

    def __init__(self, tasks: StepTasks, order: list[int], num_ranks: int) -> None:
        self.session = Session(num_ranks * DEVICES_PER_RANK)
        self.sends: dict[tuple[int, int], int] = {}
        """The call of each message, by the tasks that send and receive it."""
        self._tasks = tasks
        self._of_task: dict[int, int] = {}
        self._sends_of: dict[int, list[tuple[int, int]]] = {}
        """Messages by the microbatch of the task that sends them."""
        self._issue(order, num_ranks)
        self._calls = np.array([self._of_task[i] for i in range(len(tasks.tasks))])

    def _issue(self, order: list[int], num_ranks: int) -> None:
        every = self._tasks
        local = [tuple(rank * DEVICES_PER_RANK + d for d in range(NUM_DEVICES)) for rank in range(num_ranks)]
        targets: dict[int, list[tuple[int, int]]] = {}
        for target, edges in enumerate(every.edges):
            for source, size in edges:
                if size:
                    targets.setdefault(source, []).append((target, size))
        for i in order:
            task = every.tasks[i]
            ports = [
                Port(self.sends[source, i] if size else self._of_task[source], 0) for source, size in every.edges[i]
            ]
            self._of_task[i] = self.session.call(every.costs.graph(task), local[task.rank], [ports, ports])
            for target, size in targets.get(i, ()):
                wire = task.rank * DEVICES_PER_RANK + (BACKWARD_WIRE if task.backward else FORWARD_WIRE)
                self._sends_of.setdefault(task.microbatch, []).append((i, target))
                self.sends[i, target] = self.session.call(
                    every.send(size, i, target), (wire,), [[Port(self._of_task[i], 0)]]
                )

    def renew(self, microbatch: int) -> None:
        """Replace the calls of a microbatch that has changed, and update the costs of its tasks."""
        for i in self._tasks.index.of_microbatch[microbatch]:
            self._replace(self._of_task[i], self._tasks.costs.graph(self._tasks.tasks[i]))
            self._tasks.renew(i)
        for source, target in self._sends_of.get(microbatch, ()):
            size = self._tasks.bytes_between(source, target)
            self._replace(self.sends[source, target], self._tasks.send(size, source, target))

    def _replace(self, number: int, graph: Subgraph) -> None:
        call = self.session.calls[number]
        self.session.replace(number, Call(graph, call.devices, call.inputs))

    def times(self) -> tuple[IntArray, IntArray]:
        """Return start and end of every task on its rank's compute device."""
        devices = self._tasks.index.rank * DEVICES_PER_RANK + COMPUTE
        return self.session.entries_and_exits_ps(self._calls, devices)


class Step:
    """An iteration that can be emulated again after a microbatch has changed.

    Parameters
    ----------
    strategy : ChunkStrategy or its text
        Strategy of every chunk.
    like : Step or None
        A step of the same model and microbatches under another strategy. Its tasks and edges are reused.
    in_flight : int or None
        None: as many as fit in memory, up to three per rank.
    """

    @collector_paused()
    def __init__(
        self,
        model: PipelineModel,
        microbatches: Sequence[Work],
        strategy: ChunkStrategy | str = "keep",
        in_flight: int | None = None,
        like: Step | None = None,
    ) -> None:
        if not microbatches:
            raise InputError("microbatches", "is empty", "give at least one")
        chunks = sum(len(model.chunks(module.name)) for module in model.architecture.modules)
        check_work("microbatches", len(microbatches) * chunks, "passes through chunks", MAX_PASSES)
        self.model, self.strategy = model, chunk_strategy(strategy)
        self.microbatches = list(microbatches)
        base = None if like is None else like._all
        self._all: StepTasks = StepTasks(model, self.microbatches, self.strategy, base)
        self.tasks = self._all.tasks
        self._workspace_bytes = self._workspaces()
        self.plan = self._planned(in_flight)

    def _planned(self, in_flight: int | None) -> StepPlan:
        ranks, count = self.model.num_ranks, len(self.microbatches)
        if in_flight is not None:
            check_count("in_flight", in_flight)
        options = sorted({min(count, max(1, round(ranks * k))) for k in (0.5, 1, 1.5, 2, 3)})
        duration = np.array([t.duration_ps for t in self._all.plans])

        def plan(option: int) -> tuple[bool, tuple[int, int, list[int]]]:
            order, start = list_schedule(self._all.plans, ranks, option, self._all.index.arrays)
            end = np.array(start) + duration
            fits = all(p <= self.capacity for p in self._peaks(np.array(start), end))
            return fits, (int(end.max()), option, order)

        queue = options if in_flight is None else [in_flight]
        first_fits, first = plan(queue[0])
        found, unconstrained = [first], first_fits
        for before, option in itertools.pairwise(queue) if first_fits else ():
            fits, candidate = plan(option)
            if fits:
                found.append(candidate)
                continue
            # Larger numbers need more memory. The middle of the two may fit.
            unconstrained = False
            fits, candidate = plan((before + option + 1) // 2)
            found += [candidate] * fits
            break
        return StepPlan(*min(found), fits=first_fits, unconstrained=unconstrained)

    @property
    def capacity(self) -> int:
        """Memory that tensors can use on each device."""
        return self.model.placement.cluster.device.usable_bytes

    def _peaks(self, start: IntArray, end: IntArray) -> tuple[int, ...]:
        """Return the peak bytes of each rank: static, held activations, and the workspace of the largest pass."""
        out = []
        held = summable("activations", [p.held_bytes for p in self._all.plans])
        index = self._all.index
        for r in range(self.model.num_ranks):
            mine = index.rank == r
            take, give = mine & index.takes, mine & index.gives
            time = np.concatenate([start[take], end[give]])
            change = np.concatenate([held[take], -held[give]])
            order = np.lexsort((change, time))
            peak = int(np.cumsum(change[order]).max(initial=0))
            out.append(self.model.static_bytes[r] + peak + self._workspace_bytes[r])
        return tuple(out)

    def _workspaces(self) -> list[int]:
        """Return the largest workspace of a pass on each rank, on the largest workload of each module."""
        out = [0] * self.model.num_ranks
        for module in self.model.architecture.modules:
            every = [w for work in self.microbatches for w in work.get(module.name, ())]
            if not every:
                continue
            largest = max(every, key=lambda w: (w.num_tokens, w.num_token_pairs))
            for c in self.model.chunks(module.name):
                rank = c % self.model.num_ranks
                out[rank] = max(out[rank], self._all.costs.stages[module.name][c].workspace_bytes(largest))
        return out

    @functools.cached_property
    def _calls(self) -> _IssuedCalls:
        return _IssuedCalls(self._all, self.order, self.model.num_ranks)

    @property
    def order(self) -> list[int]:
        """The planned order of the tasks."""
        return self.plan.order

    @property
    def session(self) -> Session:
        """The session with all calls of the step."""
        return self._calls.session

    def replace_microbatch(self, number: int, work: Work) -> None:
        """Replace a microbatch by one with the same number of parts. The order of tasks stays."""
        old = self.microbatches[number]
        names = [m.name for m in self.model.architecture.modules]
        if any(len(old.get(n, ())) != len(work.get(n, ())) for n in names):
            raise InputError(f"microbatches[{number}]", "changes its number of parts", "emulate the step anew")
        calls = self._calls  # issued with the old microbatch, which the session then replaces
        self.microbatches[number] = work
        calls.renew(number)

    @collector_paused()
    def run(self) -> EmulatedStep:
        """Emulate the iteration."""
        free = self.session.run()
        ranks = self.model.num_ranks
        start, end = self._calls.times()
        compute_end = np.array([free[r * DEVICES_PER_RANK + COMPUTE] for r in range(ranks)])
        pipeline = int(max(compute_end.max(), end.max()))
        last = np.zeros(ranks, np.int64)
        np.maximum.at(last, self._all.index.rank, end)
        total = max(int(last[r]) + self._update_ps(r) for r in range(ranks))
        busy = sum(p.duration_ps for p in self._all.plans)
        peaks = self._peaks(start, end)
        degrees, device = self.model.placement.degrees, self.model.placement.cluster.device
        flops = float(sum(self._all.flops))
        spread_over = degrees.tensor * degrees.context  # counts are each device's share
        available = ranks * spread_over * device.flops_per_s * total / PS_PER_S
        bubble = max(0.0, 1 - busy / (ranks * pipeline))
        last_module = self.model.architecture.modules[-1].name
        return EmulatedStep(
            iteration_s=total / PS_PER_S,
            pipeline_s=pipeline / PS_PER_S,
            bubble=bubble,
            mfu=flops * spread_over / available,
            peak_bytes=peaks,
            static_bytes=self.model.static_bytes,
            ranks=self._rank_times(start, end, pipeline),
            fits=all(p <= self.capacity for p in peaks),
            tasks=tuple(self.tasks),
            start_ps=start,
            end_ps=end,
            strategy=str(self.strategy),
            in_flight=self.plan.in_flight,
            num_calls=len(self.session.calls),
            num_tokens=sum(w.num_tokens for work in self.microbatches for w in work.get(last_module, ())),
            num_devices=ranks * spread_over,
            layers=tuple(self.model.layers_on(rank) for rank in range(ranks)),
        )

    def _rank_times(self, start: IntArray, end: IntArray, total: int) -> tuple[RankTime, ...]:
        """Split every rank's time. A send starts when its task ends."""
        out = []
        sends: list[list[tuple[int, int]]] = [[] for _ in range(self.model.num_ranks)]
        for (source, _), call in self._calls.sends.items():
            duration = int(self.session.calls[call].graph.matrix.max())
            sends[self.tasks[source].rank].append((int(end[source]), int(end[source]) + duration))
        for rank, mine in enumerate(sends):
            tasks = np.flatnonzero(self._all.index.rank == rank)
            busy = union([(int(start[i]), int(end[i])) for i in tasks])
            wires = union(mine)
            overlap = length(busy) + length(wires) - length(union([*busy, *wires]))
            out.append(
                RankTime(total / PS_PER_S, length(busy) / PS_PER_S, length(wires) / PS_PER_S, overlap / PS_PER_S)
            )
        return tuple(out)

    def memory(self, rank: int, start: IntArray, end: IntArray) -> MemoryCurve:
        """Return static and held bytes of a rank over time, without the workspace of the running pass."""
        held = np.array([p.held_bytes for p in self._all.plans])
        give_at = np.full(len(self.tasks), -1, np.int64)
        backward = {(t.module, t.stage, t.microbatch, t.part): i for i, t in enumerate(self.tasks) if t.backward}
        for i, t in enumerate(self.tasks):
            if not t.backward:
                give_at[i] = end[backward.get((t.module, t.stage, t.microbatch, t.part), i)]
        mine = np.flatnonzero((self._all.index.rank == rank) & self._all.index.takes)
        static = np.array([self.model.static_bytes[rank]])
        return memory_curve(
            np.concatenate([static, held[mine]]),
            np.concatenate([[0], start[mine]]),
            np.concatenate([[FOREVER], give_at[mine]]),
        )

    @property
    def num_operators(self) -> int:
        """Number of operators of the iteration; reused ones count every time."""
        return sum(c.graph.num_operators * c.repeat for c in self.session.calls)

    def _update_ps(self, rank: int) -> int:
        layers = [t for name in self.model.layers for t in self.model.layers_of(name, rank)]
        return update_ps(layers, self.model.placement)
