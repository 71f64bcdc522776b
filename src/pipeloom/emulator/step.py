"""One training iteration of one pipeline replica, operator by operator, from stages that are reused.

The other replicas do the same on data of their own; what joins them is the gradients' reduction at the end.
Tensor-parallel peers are simulated once. Every stage pass is one call of a subgraph; what travels between
ranks goes over wires of its own, so that it overlaps with computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeloom.emulator.collection import collection_paused
from pipeloom.emulator.graph import FOREVER, MemoryCurve, memory_curve
from pipeloom.emulator.pipeline import PipelineModel, Work
from pipeloom.emulator.program import Part
from pipeloom.emulator.result import RankTime, StageTask, StepResult, length, union
from pipeloom.emulator.rules import PS_PER_S, IntArray, RuleTable
from pipeloom.emulator.schedule import PipelineTask, list_schedule, task_arrays
from pipeloom.emulator.session import Session
from pipeloom.emulator.stage import Stage
from pipeloom.emulator.static import update_costs
from pipeloom.emulator.subgraph import Call, Leaf, Port
from pipeloom.emulator.tape import COMPUTE, NUM_DEVICES, Cost
from pipeloom.errors import InputError
from pipeloom.spec import Workload

__all__ = ["RankTime", "StageTask", "Step", "StepResult"]

DEVICES_PER_RANK = NUM_DEVICES + 2
FORWARD_WIRE, BACKWARD_WIRE = NUM_DEVICES, NUM_DEVICES + 1


@dataclass
class _Chain:
    """Tasks of one part of a module in a microbatch: forward by chunk, and backward by chunk."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


class Step:
    """An iteration that can be emulated again after a microbatch has changed.

    Parameters
    ----------
    model : PipelineModel
    microbatches : sequence of Work
    strategy : str
        ``keep``, ``selective``, ``full``, ``offload``, or one with a share of the layers (``full:0.5``).
    like : Step or None
        A step of the same model and microbatches under another strategy, whose tasks and edges are taken over.
    in_flight : int or None
        None: as many as fit in memory, up to three per rank.
    """

    @collection_paused()
    def __init__(
        self,
        model: PipelineModel,
        microbatches: Sequence[Work],
        strategy: str = "keep",
        in_flight: int | None = None,
        like: Step | None = None,
    ) -> None:
        if not microbatches:
            raise InputError("microbatches", "is empty", "give at least one")
        self.model, self.strategy = model, strategy
        self.microbatches = list(microbatches)
        self._stages = model.stages(strategy)
        self._wire = RuleTable(
            model.placement.devices, ("send",), np.array([model.placement.pipeline_link]), np.array([1.0])
        )
        self._sends: dict[int, Leaf] = {}
        self._costs: dict[tuple[int, Workload], tuple[int, int, int, int, float]] = {}
        self.tasks: list[StageTask] = []
        self._plans: list[PipelineTask] = []
        self._edges: list[list[tuple[int, int]]] = []
        self._forward_of: list[int] = []
        """Per task its forward; a forward is its own."""
        self._flops: list[float] = []
        if like is None:
            self._build()
            self._look()
        else:
            self._build_like(like)
        self._choose(in_flight)
        self._issued = False

    def _look(self) -> None:
        """What follows from the tasks, whatever the strategy."""
        self._arrays = task_arrays(self._plans)
        self._rank = self._arrays.rank
        back = np.array([t.backward for t in self.tasks])
        lone = np.ones(len(self.tasks), np.bool_)
        lone[[f for i, f in enumerate(self._forward_of) if f != i]] = False
        self._tasks_of: dict[int, list[int]] = {}
        for i, task in enumerate(self.tasks):
            self._tasks_of.setdefault(task.microbatch, []).append(i)
        # Bytes are taken by a forward, and given back by its backward or, without one, by itself.
        self._takes, self._gives = ~back, back | lone

    def _stage(self, task: StageTask) -> Stage:
        return self._stages[task.module][task.stage]

    def _workload(self, task: StageTask) -> Workload:
        return self.microbatches[task.microbatch][task.module][task.part]

    def _cost(self, stage: Stage, workload: Workload) -> tuple[int, int, int, int, float]:
        """Forward and backward picoseconds, bytes held, bytes handed on, operations."""
        key = (id(stage), workload)
        if key not in self._costs:
            cost = stage.cost(workload, ("F", "B"))
            self._costs[key] = (
                cost.duration_ps["F"], cost.duration_ps.get("B", 0), cost.activation_bytes,
                stage.output_bytes(workload), stage.model_flops(workload) * (3 if "B" in stage.parts else 1),
            )  # fmt: skip
        return self._costs[key]

    def _transfer_ps(self, num_bytes: int) -> int:
        return int(self._send(num_bytes).duration_ps[0])

    def _send(self, num_bytes: int) -> Leaf:
        if num_bytes not in self._sends:
            duration = self._wire.durations_ps(np.array([[0.0, 0.0, float(num_bytes)]]))
            self._sends[num_bytes] = Leaf(
                1, 1, np.array([0]), duration, np.array([0, 1]), np.array([-1]), np.array([0])
            )  # fmt: skip
        return self._sends[num_bytes]

    def _add(self, task: StageTask, forward_of: int | None = None) -> int:
        self._forward_of.append(len(self.tasks) if forward_of is None else forward_of)
        self.tasks.append(task)
        self._edges.append([])
        self._plan(task, self._cost(self._stage(task), self._workload(task)), [])
        return len(self.tasks) - 1

    def _plan(
        self, task: StageTask, cost: tuple[int, int, int, int, float], before: list[tuple[int, int]]
    ) -> None:
        duration = cost[1] if task.backward else cost[0]
        self._flops.append(0.0 if task.backward else cost[4])
        self._plans.append(PipelineTask(task.rank, task.microbatch, task.backward, duration, cost[2], before))

    def _link(self, source: int, target: int, carrier: int) -> None:
        """``target`` waits for ``source``; what travels has the size of ``carrier``'s output."""
        a, b = self.tasks[source], self.tasks[target]
        size = 0
        if a.rank != b.rank:
            size = self._cost(self._stage(self.tasks[carrier]), self._workload(self.tasks[carrier]))[3]
        self._edges[target].append((source, size))
        self._plans[target].before.append((source, self._transfer_ps(size) if size else 0))

    def _build_like(self, like: Step) -> None:
        """Take over tasks and edges; durations and bytes are this strategy's."""
        self.tasks, self._edges, self._forward_of = like.tasks, like._edges, like._forward_of
        self._arrays, self._rank, self._tasks_of = like._arrays, like._rank, like._tasks_of
        self._takes, self._gives = like._takes, like._gives
        costs: list[tuple[int, int, int, int, float]] = []
        # Workloads are long; those at hand are told apart by identity before they are compared.
        known: dict[tuple[int, int], tuple[int, int, int, int, float]] = {}
        for i, (task, plan) in enumerate(zip(self.tasks, like._plans, strict=True)):
            if task.backward:
                cost = costs[self._forward_of[i]]
            else:
                stage, workload = self._stage(task), self._workload(task)
                key = (id(stage), id(workload))
                if key not in known:
                    known[key] = self._cost(stage, workload)
                cost = known[key]
            costs.append(cost)
            self._plan(task, cost, plan.before)

    def _build(self) -> None:
        modules = self.model.architecture.modules
        for number, work in enumerate(self.microbatches):
            chains: dict[str, list[_Chain]] = {}
            for module in modules:
                parts = work.get(module.name, ())
                chains[module.name] = [self._chain(module.name, number, part) for part in range(len(parts))]
                for source in module.after:
                    for below in chains[module.name]:
                        for above in chains[source]:
                            self._link(above.forward[-1], below.forward[0], above.forward[-1])
            for module in reversed(modules):
                for chain in chains[module.name]:
                    self._chain_back(module.name, number, chain)
            for module in modules:
                for source in module.after:
                    for below in chains[module.name]:
                        for above in chains[source]:
                            if above.backward and below.backward:
                                self._link(below.backward[-1], above.backward[0], above.forward[-1])

    def _chain(self, name: str, microbatch: int, part: int) -> _Chain:
        chain = _Chain()
        for chunk in self.model.chunks(name):
            task = StageTask(name, chunk, chunk % self.model.num_ranks, microbatch, part, False)
            chain.forward.append(self._add(task))
            if chunk:
                self._link(chain.forward[-2], chain.forward[-1], chain.forward[-2])
        return chain

    def _chain_back(self, name: str, microbatch: int, chain: _Chain) -> None:
        for chunk in reversed(self.model.chunks(name)):
            forward = self.tasks[chain.forward[chunk]]
            if "B" not in self._stage(forward).parts:
                break
            task = StageTask(name, chunk, forward.rank, microbatch, forward.part, True)
            chain.backward.append(self._add(task, chain.forward[chunk]))
            self._link(chain.forward[chunk], chain.backward[-1], chain.forward[chunk])
            if len(chain.backward) > 1:
                # The gradient has the size of what came the other way.
                self._link(chain.backward[-2], chain.backward[-1], chain.forward[chunk])

    def _choose(self, in_flight: int | None) -> None:
        ranks, count = self.model.num_ranks, len(self.microbatches)
        if in_flight is not None and in_flight < 1:
            raise InputError("in_flight", f"{in_flight} is below 1")
        options = sorted({min(count, max(1, round(ranks * k))) for k in (0.5, 1, 1.5, 2, 3)})
        duration = np.array([t.duration_ps for t in self._plans])

        def plan(option: int) -> tuple[bool, tuple[int, int, list[int]]]:
            order, start = list_schedule(self._plans, ranks, option, self._arrays)
            end = np.array(start) + duration
            fits = all(p <= self.capacity for p in self._peaks(np.array(start), end))
            return fits, (int(end.max()), option, order)

        queue = options if in_flight is None else [in_flight]
        self.planned_fits, first = plan(queue[0])
        found, self.roomy = [first], self.planned_fits
        for before, option in itertools.pairwise(queue) if self.planned_fits else ():
            fits, candidate = plan(option)
            if fits:
                found.append(candidate)
                continue
            # More in flight would take more still; what lies between may just fit.
            self.roomy = False
            fits, candidate = plan((before + option + 1) // 2)
            found += [candidate] * fits
            break
        self.planned_ps, self.in_flight, self.order = min(found)

    @property
    def capacity(self) -> int:
        """Memory that tensors can have on each device."""
        return self.model.placement.machine.device.usable_bytes

    def _peaks(self, start: IntArray, end: IntArray) -> tuple[int, ...]:
        """Largest memory of each rank: static, held activations, and the workspace of the largest pass."""
        out = []
        held = np.array([p.held_bytes for p in self._plans])
        rank, take_all, give_all = self._rank, self._takes, self._gives
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
        """Most that any pass on a rank uses for itself, on the largest workload of each module."""
        if not hasattr(self, "_largest"):
            self._largest = {
                m.name: max(
                    (w for work in self.microbatches for w in work.get(m.name, ())),
                    key=lambda w: (w.num_tokens, w.num_token_pairs), default=None,
                )
                for m in self.model.architecture.modules
            }  # fmt: skip
            self._spaces: dict[int, int] = {}
        if rank not in self._spaces:
            self._spaces[rank] = max(
                (
                    self._stages[name][c].workspace_bytes(workload)
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
        """Issue all calls in the order of the schedule; sends right after what they send."""
        self.session = Session(self.model.num_ranks * DEVICES_PER_RANK)
        self._call: dict[int, int] = {}
        local = [self._local(rank) for rank in range(self.model.num_ranks)]
        self._send_call: dict[tuple[int, int], int] = {}
        self._sends_of: dict[int, list[tuple[int, int]]] = {}
        targets: dict[int, list[tuple[int, int]]] = {}
        for target, edges in enumerate(self._edges):
            for source, size in edges:
                if size:
                    targets.setdefault(source, []).append((target, size))
        for i in self.order:
            task = self.tasks[i]
            ports = [
                Port(self._send_call[source, i] if size else self._call[source], 0)
                for source, size in self._edges[i]
            ]
            part: Part = "B" if task.backward else "F"
            graph = self._stage(task).graph(self._workload(task), part)
            self._call[i] = self.session.call(graph, local[task.rank], [ports, ports])
            for target, size in targets.get(i, ()):
                wire = task.rank * DEVICES_PER_RANK + (BACKWARD_WIRE if task.backward else FORWARD_WIRE)
                self._sends_of.setdefault(task.microbatch, []).append((i, target))
                self._send_call[i, target] = self.session.call(
                    self._send(size), (wire,), [[Port(self._call[i], 0)]]
                )

        self._issued = True
        self._call_of = np.array([self._call[i] for i in range(len(self.tasks))])

    def replace_microbatch(self, number: int, work: Work) -> None:
        """Put another microbatch of as many parts in one's place; the order of tasks stays."""
        old = self.microbatches[number]
        names = [m.name for m in self.model.architecture.modules]
        if any(len(old.get(n, ())) != len(work.get(n, ())) for n in names):
            raise InputError(
                f"microbatches[{number}]", "changes its number of parts", "emulate the step anew"
            )
        if not self._issued:
            self._issue()
        self.microbatches[number] = work
        for i in self._tasks_of[number]:
            task = self.tasks[i]
            part: Part = "B" if task.backward else "F"
            call = self.session.calls[self._call[i]]
            graph = self._stage(task).graph(self._workload(task), part)
            self.session.replace(self._call[i], Call(graph, call.devices, call.inputs))
            forward, backward, held, _, flops = self._cost(self._stage(task), self._workload(task))
            self._flops[i] = 0.0 if task.backward else flops
            plan = self._plans[i]
            plan.duration_ps, plan.held_bytes = (backward if task.backward else forward), held
        for source, target in self._sends_of.get(number, ()):
            carrier = self.tasks[self._carrier(source, target)]
            size = self._cost(self._stage(carrier), self._workload(carrier))[3]
            send = self._send_call[source, target]
            call = self.session.calls[send]
            self.session.replace(send, Call(self._send(size), call.devices, call.inputs))

    def _carrier(self, source: int, target: int) -> int:
        """The forward task whose output (or its gradient) travels from ``source`` to ``target``."""
        return self._forward_of[target] if self.tasks[target].backward else source

    @collection_paused()
    def run(self) -> StepResult:
        """Emulate."""
        if not self._issued:
            self._issue()
        free = self.session.run()
        ranks = self.model.num_ranks
        start, end = self._times()
        compute_end = np.array([free[r * DEVICES_PER_RANK + COMPUTE] for r in range(ranks)])
        pipeline = int(max(compute_end.max(), end.max()))
        last = np.zeros(ranks, np.int64)
        np.maximum.at(last, self._rank, end)
        total = max(int(last[r]) + self._update_ps(r) for r in range(ranks))
        busy = sum(p.duration_ps for p in self._plans)
        peaks = self._peaks(start, end)
        degrees, device = self.model.placement.degrees, self.model.placement.machine.device
        flops = float(sum(self._flops))
        spread_over = degrees.tensor * degrees.context  # each device's share is what was counted
        available = ranks * spread_over * device.flops_per_s * total / PS_PER_S
        bubble = max(0.0, 1 - busy / (ranks * pipeline))
        return StepResult(
            iteration_s=total / PS_PER_S, pipeline_s=pipeline / PS_PER_S, bubble=bubble,
            mfu=flops * spread_over / available, peak_bytes=peaks, static_bytes=self.model.static_bytes,
            ranks=self._rank_times(start, end, pipeline),
            fits=all(p <= self.capacity for p in peaks), tasks=tuple(self.tasks), start_ps=start, end_ps=end,
            strategy=self.strategy, in_flight=self.in_flight, num_calls=len(self.session.calls),
        )  # fmt: skip

    def _times(self) -> tuple[IntArray, IntArray]:
        """Start and end of every task on its rank's compute device."""
        return self.session.entries_and_exits_ps(self._call_of, self._rank * DEVICES_PER_RANK + COMPUTE)

    def _rank_times(self, start: IntArray, end: IntArray, total: int) -> tuple[RankTime, ...]:
        """Split every rank's time; a send is laid right after the task that it follows."""
        out = []
        sends: list[list[tuple[int, int]]] = [[] for _ in range(self.model.num_ranks)]
        for (source, _), call in self._send_call.items():
            duration = int(self.session.calls[call].graph.matrix.max())
            sends[self.tasks[source].rank].append((int(end[source]), int(end[source]) + duration))
        for rank, mine in enumerate(sends):
            tasks = np.flatnonzero(self._rank == rank)
            busy = union([(int(start[i]), int(end[i])) for i in tasks])
            wires = union(mine)
            overlap = length(busy) + length(wires) - length(union([*busy, *wires]))
            out.append(
                RankTime(
                    total / PS_PER_S, length(busy) / PS_PER_S, length(wires) / PS_PER_S, overlap / PS_PER_S
                )
            )
        return tuple(out)

    def memory(self, rank: int, start: IntArray, end: IntArray) -> MemoryCurve:
        """Static and held bytes of a rank over time (without the workspace of the pass at work)."""
        held = np.array([p.held_bytes for p in self._plans])
        give_at = np.full(len(self.tasks), -1, np.int64)
        backward = {
            (t.module, t.stage, t.microbatch, t.part): i for i, t in enumerate(self.tasks) if t.backward
        }
        for i, t in enumerate(self.tasks):
            if not t.backward:
                give_at[i] = end[backward.get((t.module, t.stage, t.microbatch, t.part), i)]
        mine = np.flatnonzero((self._rank == rank) & self._takes)
        static = np.array([self.model.static_bytes[rank]])
        return memory_curve(
            np.concatenate([static, held[mine]]), np.concatenate([[0], start[mine]]),
            np.concatenate([[FOREVER], give_at[mine]]),
        )  # fmt: skip

    @property
    def num_operators(self) -> int:
        """Operators that the iteration stands for, reused ones counted every time."""
        return sum(c.graph.num_operators * c.repeat for c in self.session.calls)

    def _update_ps(self, rank: int) -> int:
        layers = [t for name in self.model.layers for t in self.model.layers_of(name, rank)]
        costs: list[Cost] = update_costs(layers, self.model.placement.degrees, self.model.placement.data_link)
        if not costs:
            return 0
        table = RuleTable(
            self.model.placement.devices, tuple(c.kind for c in costs), np.array([c.device for c in costs]),
            np.array([c.steps for c in costs]),
        )  # fmt: skip
        amounts = np.array([[c.flops.one, c.memory.one, c.network.one] for c in costs])
        return int(table.durations_ps(amounts).sum())
