"""One training iteration of one pipeline replica, operator by operator, with reused stages.

The other replicas do the same with their own data; the gradient reduction at the end connects them. Tensor-parallel
peers are simulated once. Every pass of a stage is one call of a subgraph. Messages between ranks use separate wires, so
they overlap with computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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
from pipeloom.emulator.subgraph import Call, Port
from pipeloom.emulator.tape import COMPUTE, NUM_DEVICES
from pipeloom.errors import InputError, check_count
from pipeloom.limits import MAX_PASSES
from pipeloom.spec import ChunkStrategy, chunk_strategy
from pipeloom.totals import PS_PER_S, check_work, summable

DEVICES_PER_RANK = NUM_DEVICES + 2
FORWARD_WIRE, BACKWARD_WIRE = NUM_DEVICES, NUM_DEVICES + 1


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
        self._choose(in_flight)
        self._issued = False

    def _choose(self, in_flight: int | None) -> None:
        ranks, count = self.model.num_ranks, len(self.microbatches)
        if in_flight is not None:
            check_count("in_flight", in_flight)
        options = sorted({min(count, max(1, round(ranks * k))) for k in (0.5, 1, 1.5, 2, 3)})
        duration = np.array([t.duration_ps for t in self._all.plans])

        def plan(option: int) -> tuple[bool, tuple[int, int, list[int]]]:
            order, start = list_schedule(self._all.plans, ranks, option, self._all.arrays)
            end = np.array(start) + duration
            fits = all(p <= self.capacity for p in self._peaks(np.array(start), end))
            return fits, (int(end.max()), option, order)

        queue = options if in_flight is None else [in_flight]
        self.planned_fits, first = plan(queue[0])
        found, self.planned_unconstrained = [first], self.planned_fits
        for before, option in itertools.pairwise(queue) if self.planned_fits else ():
            fits, candidate = plan(option)
            if fits:
                found.append(candidate)
                continue
            # Larger numbers need more memory. The middle of the two may fit.
            self.planned_unconstrained = False
            fits, candidate = plan((before + option + 1) // 2)
            found += [candidate] * fits
            break
        self.planned_ps, self.in_flight, self.order = min(found)

    @property
    def capacity(self) -> int:
        """Memory that tensors can use on each device."""
        return self.model.placement.cluster.device.usable_bytes

    def _peaks(self, start: IntArray, end: IntArray) -> tuple[int, ...]:
        """Return the peak bytes of each rank: static, held activations, and the workspace of the largest pass."""
        out = []
        held = summable("activations", [p.held_bytes for p in self._all.plans])
        rank, take_all, give_all = self._all.rank, self._all.takes, self._all.gives
        for r in range(self.model.num_ranks):
            mine = rank == r
            take, give = mine & take_all, mine & give_all
            time = np.concatenate([start[take], end[give]])
            change = np.concatenate([held[take], -held[give]])
            order = np.lexsort((change, time))
            peak = int(np.cumsum(change[order]).max(initial=0))
            out.append(self.model.static_bytes[r] + peak + self._workspace(r))
        return tuple(out)

    def _workspace(self, rank: int) -> int:
        """Return the largest workspace of a pass on a rank, on the largest workload of each module."""
        if not hasattr(self, "_largest"):
            self._largest = {
                m.name: max(
                    (w for work in self.microbatches for w in work.get(m.name, ())),
                    key=lambda w: (w.num_tokens, w.num_token_pairs),
                    default=None,
                )
                for m in self.model.architecture.modules
            }
            self._spaces: dict[int, int] = {}
        if rank not in self._spaces:
            self._spaces[rank] = max(
                (
                    self._all.stages[name][c].workspace_bytes(workload)
                    for name, workload in self._largest.items()
                    if workload is not None
                    for c in self.model.chunks(name)
                    if c % self.model.num_ranks == rank
                ),
                default=0,
            )
        return self._spaces[rank]

    def _local(self, rank: int) -> tuple[int, ...]:
        return tuple(rank * DEVICES_PER_RANK + d for d in range(NUM_DEVICES))

    def _issue(self) -> None:
        """Issue all calls in the order of the schedule. Sends follow the task whose result they send."""
        self.session = Session(self.model.num_ranks * DEVICES_PER_RANK)
        self._call: dict[int, int] = {}
        local = [self._local(rank) for rank in range(self.model.num_ranks)]
        self._send_call: dict[tuple[int, int], int] = {}
        self._sends_of: dict[int, list[tuple[int, int]]] = {}
        targets: dict[int, list[tuple[int, int]]] = {}
        for target, edges in enumerate(self._all.edges):
            for source, size in edges:
                if size:
                    targets.setdefault(source, []).append((target, size))
        for i in self.order:
            task = self.tasks[i]
            ports = [
                Port(self._send_call[source, i] if size else self._call[source], 0)
                for source, size in self._all.edges[i]
            ]
            graph = self._all.graph(task)
            self._call[i] = self.session.call(graph, local[task.rank], [ports, ports])
            for target, size in targets.get(i, ()):
                wire = task.rank * DEVICES_PER_RANK + (BACKWARD_WIRE if task.backward else FORWARD_WIRE)
                self._sends_of.setdefault(task.microbatch, []).append((i, target))
                self._send_call[i, target] = self.session.call(
                    self._all.send(size, i, target), (wire,), [[Port(self._call[i], 0)]]
                )

        self._issued = True
        self._call_of = np.array([self._call[i] for i in range(len(self.tasks))])

    def replace_microbatch(self, number: int, work: Work) -> None:
        """Replace a microbatch by one with the same number of parts. The order of tasks stays."""
        old = self.microbatches[number]
        names = [m.name for m in self.model.architecture.modules]
        if any(len(old.get(n, ())) != len(work.get(n, ())) for n in names):
            raise InputError(f"microbatches[{number}]", "changes its number of parts", "emulate the step anew")
        if not self._issued:
            self._issue()
        self.microbatches[number] = work
        for i in self._all.of_microbatch[number]:
            task = self.tasks[i]
            call = self.session.calls[self._call[i]]
            graph = self._all.graph(task)
            self.session.replace(self._call[i], Call(graph, call.devices, call.inputs))
            self._all.renew(i)
        for source, target in self._sends_of.get(number, ()):
            size = self._all.bytes_between(source, target)
            send = self._send_call[source, target]
            call = self.session.calls[send]
            self.session.replace(send, Call(self._all.send(size, source, target), call.devices, call.inputs))

    @collector_paused()
    def run(self) -> EmulatedStep:
        """Emulate the iteration."""
        if not self._issued:
            self._issue()
        free = self.session.run()
        ranks = self.model.num_ranks
        start, end = self._times()
        compute_end = np.array([free[r * DEVICES_PER_RANK + COMPUTE] for r in range(ranks)])
        pipeline = int(max(compute_end.max(), end.max()))
        last = np.zeros(ranks, np.int64)
        np.maximum.at(last, self._all.rank, end)
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
            in_flight=self.in_flight,
            num_calls=len(self.session.calls),
            num_tokens=sum(w.num_tokens for work in self.microbatches for w in work.get(last_module, ())),
            num_devices=ranks * spread_over,
            layers=tuple(self.model.layers_on(rank) for rank in range(ranks)),
        )

    def _times(self) -> tuple[IntArray, IntArray]:
        """Return start and end of every task on its rank's compute device."""
        return self.session.entries_and_exits_ps(self._call_of, self._all.rank * DEVICES_PER_RANK + COMPUTE)

    def _rank_times(self, start: IntArray, end: IntArray, total: int) -> tuple[RankTime, ...]:
        """Split every rank's time. A send starts when its task ends."""
        out = []
        sends: list[list[tuple[int, int]]] = [[] for _ in range(self.model.num_ranks)]
        for (source, _), call in self._send_call.items():
            duration = int(self.session.calls[call].graph.matrix.max())
            sends[self.tasks[source].rank].append((int(end[source]), int(end[source]) + duration))
        for rank, mine in enumerate(sends):
            tasks = np.flatnonzero(self._all.rank == rank)
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
        mine = np.flatnonzero((self._all.rank == rank) & self._all.takes)
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
