"""Tasks of an iteration, their dependencies, and their costs under one memory strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.emulator.build import Placement
from pipeloom.emulator.pipeline import PipelineModel, Stream, Work
from pipeloom.emulator.result import StageTask
from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.schedule import PipelineTask, task_arrays
from pipeloom.emulator.schedule_kernels import TaskArrays
from pipeloom.emulator.stage import Stage
from pipeloom.emulator.subgraph import Leaf, Subgraph
from pipeloom.spec import ChunkStrategy, Workload


class TaskCost(NamedTuple):
    """Costs of a stage's two passes on a workload: bytes held between them, bytes of the output, operations of both."""

    forward_ps: int
    backward_ps: int
    held_bytes: int
    output_bytes: int
    flops: float


@dataclass
class _Chain:
    """Tasks of one part of a module in a microbatch: forwards by chunk, and backwards in running order."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


class TaskCosts:
    """Stages, workloads and costs of tasks under one memory strategy.

    ``microbatches`` is read again for every request of a cost.
    """

    def __init__(self, stages: Mapping[str, Sequence[Stage]], microbatches: list[Work]) -> None:
        self.stages, self._microbatches = stages, microbatches
        self._known: dict[tuple[int, Workload], TaskCost] = {}

    def stage(self, task: StageTask) -> Stage:
        """Return the stage of a task."""
        return self.stages[task.module][task.stage]

    def workload(self, task: StageTask) -> Workload:
        """Return the workload of a task."""
        return self._microbatches[task.microbatch][task.module][task.part]

    def graph(self, task: StageTask) -> Subgraph:
        """Return the operators of a task."""
        return self.stage(task).graph(self.workload(task), "B" if task.backward else "F")

    def cost(self, task: StageTask) -> TaskCost:
        """Return the cost of a task's stage on its workload."""
        stage, workload = self.stage(task), self.workload(task)
        key = (id(stage), workload)
        if key not in self._known:
            cost = stage.cost(workload, ("F", "B"))
            self._known[key] = TaskCost(
                cost.duration_ps["F"],
                cost.duration_ps.get("B", 0),
                cost.activation_bytes,
                stage.output_bytes(workload),
                stage.model_flops(workload) * (3 if "B" in stage.parts else 1),
            )
        return self._known[key]


class Messages:
    """Messages between pipeline ranks, as subgraphs on one wire. They are cached by size and link."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._known: dict[tuple[int, int], Leaf] = {}

    def between(self, source: int, target: int, num_bytes: int) -> Leaf:
        """Return a message from one rank to another."""
        link = self._placement.pipeline_link(source, target)
        if (num_bytes, link) not in self._known:
            duration = self._placement.send_ps(num_bytes, link)
            self._known[num_bytes, link] = Leaf(
                1, 1, np.array([0]), np.array([duration]), np.array([0, 1]), np.array([-1]), np.array([0])
            )
        return self._known[num_bytes, link]


@dataclass(frozen=True)
class TaskIndex:
    """Arrays of a step's tasks that do not depend on the strategy.

    Attributes
    ----------
    arrays : TaskArrays
        The tasks for the scheduler.
    takes, gives : bool array, shape (num_tasks,)
        A forward takes bytes; its backward gives them back, or the forward itself if there is no backward.
    of_microbatch : dict
        Tasks of each microbatch.
    """

    arrays: TaskArrays
    takes: npt.NDArray[np.bool_]
    gives: npt.NDArray[np.bool_]
    of_microbatch: dict[int, list[int]]

    @property
    def rank(self) -> IntArray:
        """Rank of each task."""
        return self.arrays.rank


class StepTasks:
    """Forward and backward tasks of all microbatches, in the order of microbatches and modules.

    Parameters
    ----------
    microbatches : list of Work
        Read again for every request of a cost.
    like : StepTasks or None
        Tasks of the same model and microbatches under another strategy. Its tasks and edges are reused.

    Attributes
    ----------
    plans : list of PipelineTask
        The tasks for the scheduler.
    edges : list of list
        Predecessors of each task, and the bytes of the message; 0 within a rank.
    forward_of : list of int
        Forward of each task; a forward is its own.
    index : TaskIndex
        Ranks, memory events and microbatches of the tasks.
    """

    def __init__(
        self, model: PipelineModel, microbatches: list[Work], strategy: ChunkStrategy, like: StepTasks | None = None
    ) -> None:
        self._model, self._messages = model, Messages(model.placement)
        self.costs = TaskCosts(model.stages(strategy), microbatches)
        self._joined: dict[tuple[int, int], list[tuple[int, Stream | None]]] = {}
        """Edges with streams, by their ends: forward tasks and their streams; None is the output."""
        self.tasks: list[StageTask] = []
        self.plans: list[PipelineTask] = []
        self.edges: list[list[tuple[int, int]]] = []
        self.forward_of: list[int] = []
        self.flops: list[float] = []
        if like is None:
            self._build(microbatches)
            self.index = self._index()
        else:
            self._build_like(like)

    def send(self, num_bytes: int, source: int, target: int) -> Leaf:
        """Return one message from a task's rank to another's, as a subgraph on its wire."""
        return self._messages.between(self.tasks[source].rank, self.tasks[target].rank, num_bytes)

    def bytes_between(self, source: int, target: int) -> int:
        """Return the bytes of the message between two tasks: a forward's output, its streams, or their gradients."""
        carriers = self._joined.get((source, target))
        if carriers is None:
            carriers = [(self.forward_of[target] if self.tasks[target].backward else source, None)]
        return sum(self._bytes(*carrier) for carrier in carriers)

    def _bytes(self, carrier: int, stream: Stream | None) -> int:
        task = self.tasks[carrier]
        if stream is None:
            return self.costs.cost(task).output_bytes
        return stream.template.on(self.costs.workload(task)).output_bytes

    def renew(self, i: int) -> None:
        """Update a task's cost after its microbatch has changed."""
        task, plan = self.tasks[i], self.plans[i]
        cost = self.costs.cost(task)
        self.flops[i] = 0.0 if task.backward else cost.flops
        plan.duration_ps = cost.backward_ps if task.backward else cost.forward_ps
        plan.held_bytes = cost.held_bytes

    def _index(self) -> TaskIndex:
        back = np.array([t.backward for t in self.tasks])
        lone = np.ones(len(self.tasks), np.bool_)
        lone[[f for i, f in enumerate(self.forward_of) if f != i]] = False
        of_microbatch: dict[int, list[int]] = {}
        for i, task in enumerate(self.tasks):
            of_microbatch.setdefault(task.microbatch, []).append(i)
        return TaskIndex(task_arrays(self.plans), ~back, back | lone, of_microbatch)

    def _build_like(self, like: StepTasks) -> None:
        """Reuse tasks and edges. Durations and bytes are those of this strategy."""
        self.tasks, self.edges, self.forward_of = like.tasks, like.edges, like.forward_of
        self.index, self._joined = like.index, like._joined
        costs: list[TaskCost] = []
        # Workloads are long, so look them up by identity before comparing them.
        known: dict[tuple[int, int], TaskCost] = {}
        for i, (task, plan) in enumerate(zip(self.tasks, like.plans, strict=True)):
            if task.backward:
                cost = costs[self.forward_of[i]]
            else:
                key = (id(self.costs.stage(task)), id(self.costs.workload(task)))
                if key not in known:
                    known[key] = self.costs.cost(task)
                cost = known[key]
            costs.append(cost)
            self._plan(task, cost, plan.before)

    def _build(self, microbatches: list[Work]) -> None:
        modules = self._model.architecture.modules
        for number, work in enumerate(microbatches):
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
            for stream in self._model.streams:
                self._link_stream(stream, chains)

    def _link_stream(self, stream: Stream, chains: dict[str, list[_Chain]]) -> None:
        (source, chunk), (target, taking) = stream.source, stream.target
        for above in chains[source]:
            for below in chains[target]:
                carrier = above.forward[chunk]
                self._link(carrier, below.forward[taking], carrier, stream)
                # Backwards are in running order, the last chunk's first.
                back, down = len(above.forward) - 1 - chunk, len(below.forward) - 1 - taking
                if back < len(above.backward) and down < len(below.backward):
                    self._link(below.backward[down], above.backward[back], carrier, stream)

    def _chain(self, name: str, microbatch: int, part: int) -> _Chain:
        chain = _Chain()
        for chunk in self._model.chunks(name):
            task = StageTask(name, chunk, chunk % self._model.num_ranks, microbatch, part, False)
            chain.forward.append(self._add(task))
            if chunk:
                self._link(chain.forward[-2], chain.forward[-1], chain.forward[-2])
        return chain

    def _chain_back(self, name: str, microbatch: int, chain: _Chain) -> None:
        for chunk in reversed(self._model.chunks(name)):
            forward = self.tasks[chain.forward[chunk]]
            if "B" not in self.costs.stage(forward).parts:
                break
            task = StageTask(name, chunk, forward.rank, microbatch, forward.part, True)
            chain.backward.append(self._add(task, chain.forward[chunk]))
            self._link(chain.forward[chunk], chain.backward[-1], chain.forward[chunk])
            if len(chain.backward) > 1:
                # The gradient has the size of the activation.
                self._link(chain.backward[-2], chain.backward[-1], chain.forward[chunk])

    def _add(self, task: StageTask, forward_of: int | None = None) -> int:
        self.forward_of.append(len(self.tasks) if forward_of is None else forward_of)
        self.tasks.append(task)
        self.edges.append([])
        self._plan(task, self.costs.cost(task), [])
        return len(self.tasks) - 1

    def _plan(self, task: StageTask, cost: TaskCost, before: list[tuple[int, int]]) -> None:
        duration = cost.backward_ps if task.backward else cost.forward_ps
        self.flops.append(0.0 if task.backward else cost.flops)
        self.plans.append(PipelineTask(task.rank, task.microbatch, task.backward, duration, cost.held_bytes, before))

    def _link(self, source: int, target: int, carrier: int, stream: Stream | None = None) -> None:
        """Add an edge. The message has the size of ``carrier``'s output, or of one of its streams."""
        a, b = self.tasks[source], self.tasks[target]
        size = self._bytes(carrier, stream) if a.rank != b.rank else 0
        edges, before, place = self.edges[target], self.plans[target].before, len(self.edges[target])
        if stream is not None:
            # A stream joins the message between the same tasks.
            joined = self._joined.setdefault((source, target), [])
            for number, (other, known) in enumerate(edges):
                if other == source:
                    joined[:0] = [] if joined else [(carrier, None)]
                    size, place = size + known, number
            joined.append((carrier, stream))
        edge = (source, size)
        delay = (source, int(self.send(size, source, target).duration_ps[0]) if size else 0)
        edges[place : place + 1], before[place : place + 1] = [edge], [delay]
