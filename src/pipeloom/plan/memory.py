"""Peak bytes of a plan on every rank, counted along its list of actions as the executor allocates and frees memory.

The memory of a rank depends only on its list of actions. A receive allocates its buffer when it is posted, the wait for
a send frees the sent tensor, and the computations of the rank allocate and free all other memory. The count therefore
does not depend on the speed of the ranks. Planned times matter only through the order of the list.

The count includes:

- Weights, gradients and optimizer state (``static_bytes`` of the graph, with casts and gathered shards) during the
  whole iteration, except that each layer's gradients count from its first backward.
- The bytes of a pair from the start of its F to the end of its backward, and between I and W of a split backward.
- An output or a stream from the end of its F until all consumers on this rank have started and all its sends have
  completed. The gradient of an input is counted in the same way, from the end of a backward.
- A buffer from the post of its receive until the consumer starts.
- The workspace of the running computation with its emitted streams, and bytes that offloading has not yet moved to the
  host or has loaded early. If copies run beside computation, these are released at the rank's next OFFLOAD.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

from pipeloom.cost import CostModel, PassBytes
from pipeloom.cost.encoder_dp import costs_under_layout
from pipeloom.packing import Packing
from pipeloom.plan.action import Action, ExecutionPlan, Verb
from pipeloom.plan.routes import BoundaryTransfer, Routes, Unit, make_routes, target_word, transferred_workload
from pipeloom.spec import Chunk, Layout, Workload
from pipeloom.taskgraph import TaskGraph

_NUMBER_BYTES = 8
"""Bytes of a loss, which is kept to the end of the iteration. Its gradient and its recomputed value are counted too."""


class PassCosts(CostModel, Protocol):
    """Costs with the bytes of single passes."""

    def pass_bytes(self, chunk: Chunk, workload: Workload, strategy: str) -> PassBytes:
        """Return the bytes that a pass of the chunk uses in addition to those of its pair, under one strategy."""
        ...

    def gradient_bytes(self, chunk: Chunk) -> int:
        """Return the static bytes that the chunk's first backward allocates."""
        ...


def peak_bytes(
    plan: ExecutionPlan, graph: TaskGraph, layout: Layout, packing: Packing, costs: PassCosts
) -> tuple[int, ...]:
    """Return the peak bytes of each rank under a plan.

    Parameters
    ----------
    plan : ExecutionPlan
        A plan lowered from a schedule of ``graph``.
    graph : TaskGraph
        A graph with ``labels`` and the bytes of the chosen strategies (`resolve_candidates`).
    """
    assert graph.labels is not None
    units = [Unit(*label[:3]) for label in graph.labels]
    sizes = zip(graph.activation_bytes.tolist(), graph.weight_gradient_bytes.tolist(), strict=True)
    held = dict(zip(units, sizes, strict=True))
    costs = cast(PassCosts, costs_under_layout(costs, layout))
    problem = _Problem(layout, packing, costs, make_routes(layout, packing, units), held)
    static = graph.static_bytes.tolist()
    return tuple(
        _Count(problem, rank, held_bytes).peak_bytes(actions)
        for rank, (actions, held_bytes) in enumerate(zip(plan.ranks, static, strict=True))
    )


class _Name(NamedTuple):
    """Name of a message, as in actions."""

    chunk: str
    microbatch: int
    sub_microbatch: int
    target: str
    stream: str


@dataclass
class _Problem:
    """Data shared by the counts of all ranks."""

    layout: Layout
    packing: Packing
    costs: PassCosts
    routes: Routes
    held: dict[Unit, tuple[int, int]]
    sent: dict[BoundaryTransfer, int] = field(default_factory=dict)
    """Bytes of every transfer."""
    named: dict[_Name, BoundaryTransfer] = field(default_factory=dict)
    known: dict[tuple[tuple[str, tuple[int, int]], Workload, str], PassBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = self.layout.chunk_names
        self.number_of = {name: number for number, name in enumerate(self.names)}
        self.trained = [self.layout.has_backward(chunk.module) for chunk in self.layout.chunks]
        sizes: dict[tuple[int, Workload, str], int] = {}
        for transfer in self.routes.transfers:
            chunk = transfer.producer.chunk
            workload = transferred_workload(transfer, self.layout, self.packing)
            key = chunk, workload, transfer.stream
            if key not in sizes:
                sizes[key] = self._num_bytes(*key)
            self.sent[transfer] = sizes[key]
            siblings = self.routes.out_of[transfer.producer]
            _, microbatch, sub = transfer.producer
            word = target_word(transfer, siblings, self.names)
            self.named[_Name(self.names[chunk], microbatch, sub, word, transfer.stream)] = transfer

    def workload(self, unit: Unit) -> Workload:
        chunk = self.layout.chunks[unit.chunk]
        return self.packing.parts_of(unit.microbatch, chunk.module)[unit.sub_microbatch].workload

    def _num_bytes(self, chunk: int, workload: Workload, stream: str) -> int:
        if stream:
            return self.costs.stream_bytes(stream, workload)
        return self.costs.boundary_bytes(self.layout.chunks[chunk], workload)

    def output_bytes(self, unit: Unit, stream: str = "") -> int:
        return self._num_bytes(unit.chunk, self.workload(unit), stream)

    def takers(self, unit: Unit) -> dict[str, list[BoundaryTransfer]]:
        """Return the transfers of a unit's output and of its streams, by stream."""
        found: dict[str, list[BoundaryTransfer]] = {}
        for transfer in self.routes.out_of.get(unit, ()):
            found.setdefault(transfer.stream, []).append(transfer)
        return found

    def pass_bytes(self, unit: Unit, strategy: str) -> PassBytes:
        chunk, workload = self.layout.chunks[unit.chunk], self.workload(unit)
        key = ((chunk.module, chunk.layers), workload, strategy)
        if key not in self.known:
            self.known[key] = self.costs.pass_bytes(chunk, workload, strategy)
        return self.known[key]

    def rank_of(self, unit: Unit) -> int:
        return self.layout.chunks[unit.chunk].rank

    def sources(self, unit: Unit) -> list[tuple[BoundaryTransfer, ...]]:
        """Return the inputs of a unit, grouped by module and stream, since each group becomes one tensor."""
        groups: defaultdict[tuple[str, str], list[BoundaryTransfer]] = defaultdict(list)
        for transfer in self.routes.into.get(unit, ()):
            groups[self.layout.chunks[transfer.producer.chunk].module, transfer.stream].append(transfer)
        return [tuple(group) for group in groups.values()]


@dataclass(slots=True)
class _Storage:
    """Bytes that are freed when their last holder releases them."""

    num_bytes: int
    num_holders: int
    counted: bool = True
    """False if the bytes of a pair already include them."""
    is_joint: bool = False
    """Whether every holder has a view of the same tensor."""


class _Count:
    """Count of one rank's bytes along its list of actions."""

    def __init__(self, problem: _Problem, rank: int, static_bytes: int) -> None:
        self.problem, self.rank = problem, rank
        self.ungraded = {
            number: problem.costs.gradient_bytes(chunk)
            for number, chunk in enumerate(problem.layout.chunks)
            if chunk.rank == rank
        }
        """Bytes of gradients not yet allocated, by chunk."""
        self.now = self.peak = static_bytes - sum(self.ungraded.values()) + 2 * _NUMBER_BYTES
        self.passes: dict[Unit, PassBytes] = {}
        self.outputs: dict[tuple[Unit, str], _Storage] = {}
        """By unit and stream."""
        self.gradients: dict[BoundaryTransfer, _Storage] = {}
        self.received: dict[tuple[bool, BoundaryTransfer], int] = {}
        """Bytes of received buffers, by direction (True: gradient) and transfer."""
        self.kept: dict[Unit, list[_Storage]] = {}
        """Storages of which a unit holds a view until its backward ends."""
        self.covered: dict[Unit, list[_Storage]] = {}
        self.leaving: tuple[Unit | None, int] = None, 0
        """The last unit that was offloaded, and bytes that only its copies to the host hold."""

    def peak_bytes(self, actions: Sequence[Action]) -> int:
        """Count along the list and return the peak."""
        for action in actions:
            verb = action.verb
            if verb.is_unit:
                self._unit(verb, action)
            elif verb.is_message:
                self._message(verb, action)
        return self.peak

    def _touch(self, more: int = 0) -> None:
        """Update the peak, with ``more`` temporary bytes."""
        self.peak = max(self.peak, self.now + more)

    def _release(self, storage: _Storage) -> None:
        storage.num_holders -= 1
        if storage.num_holders == 0 and storage.counted:
            self.now -= storage.num_bytes

    def _message(self, verb: Verb, action: Action) -> None:
        if verb.is_send or verb in (Verb.WAIT_F, Verb.WAIT_B):
            return
        name = _Name(action.chunk, action.microbatch, action.sub_microbatch, action.target, action.stream)
        transfer = self.problem.named[name]
        if verb.is_receive:
            num_bytes = self.received[verb is Verb.RECV_B, transfer] = self.problem.sent[transfer]
            self.now += num_bytes
            self._touch()
        elif verb is Verb.WAIT_SEND_F:
            self._release(self.outputs[transfer.producer, transfer.stream])
        else:
            self._release(self.gradients[transfer])

    def _unit(self, verb: Verb, action: Action) -> None:
        unit = Unit(self.problem.number_of[action.chunk], action.microbatch, action.sub_microbatch)
        match verb:
            case Verb.F:
                self._forward(unit, action.strategy)
            case Verb.B | Verb.I:
                self._backward(unit, verb is Verb.I)
            case Verb.W:
                self.now += self.ungraded.pop(unit.chunk, 0)
                self._touch(self.passes[unit].second_half_bytes)
                self.now -= self.problem.held[unit][1]
                for storage in self.covered.pop(unit, ()):
                    storage.counted = True
                    self.now += storage.num_bytes if storage.num_holders else 0
            case Verb.OFFLOAD:
                used = self.passes[unit]
                # If copies run beside computation, the memory is released at the next offload.
                self.now -= self.leaving[1] + used.moved_bytes - used.leaving_bytes
                self.leaving = unit, used.leaving_bytes
            case Verb.LOAD if self.leaving[0] == unit and self.leaving[1]:
                # The tensors are still on the device.
                self.leaving = unit, 0
            case Verb.LOAD:
                self.now += self.passes[unit].moved_bytes
                self._touch()

    def _forward(self, unit: Unit, strategy: str) -> None:
        problem = self.problem
        used = self.passes[unit] = problem.pass_bytes(unit, strategy)
        groups = problem.sources(unit)
        # Pieces and the tensor into which they are concatenated exist at the same time.
        self._touch(sum(problem.sent[t] for group in groups if len(group) > 1 for t in group))
        for transfer in (t for group in groups for t in group):
            if problem.rank_of(transfer.producer) != self.rank:
                self.now -= self.received.pop((False, transfer))
            elif transfer.piece is not None:
                # The piece may be a view, which holds the whole tensor.
                self.kept.setdefault(unit, []).append(self.outputs[transfer.producer, transfer.stream])
            else:
                self._release(self.outputs[transfer.producer, transfer.stream])
        held = problem.held[unit][0] + used.moved_bytes
        self.now += held
        takers = problem.takers(unit)
        # Emitted streams exist while later layers run.
        self._touch(used.forward_bytes + sum(problem.output_bytes(unit, stream) for stream in takers if stream))
        if not problem.trained[unit.chunk]:
            self.now -= held
            self._release_views(unit)
        for stream, transfers in takers.items():
            storage = self.outputs[unit, stream] = _Storage(problem.output_bytes(unit, stream), len(transfers))
            self.now += storage.num_bytes
        if "" not in takers:
            self.now += _NUMBER_BYTES
        self._touch()

    def _backward(self, unit: Unit, halves: bool) -> None:
        problem, used = self.problem, self.passes[unit]
        takers = problem.takers(unit)
        for stream, transfers in takers.items():
            if len(transfers) > 1 or any(t.piece is not None for t in transfers):
                # Gradients of parts and their sum exist at the same time.
                self._touch(problem.output_bytes(unit, stream))
        for transfer in itertools.chain.from_iterable(takers.values()):
            if problem.rank_of(transfer.consumer) != self.rank:
                self.now -= self.received.pop((True, transfer))
            elif self.gradients[transfer].is_joint:
                # A view holds the whole tensor.
                self.kept.setdefault(unit, []).append(self.gradients[transfer])
            else:
                self._release(self.gradients[transfer])
        if halves:
            self._touch(used.first_half_bytes)
        elif self.leaving[0] == unit and used.leaving_bytes:
            # The copies to the host hold its tensors, so it frees none while it runs.
            self.now += self.ungraded.pop(unit.chunk, 0)
            self._touch(used.first_half_bytes)
        elif unit.chunk in self.ungraded:
            # Each layer allocates its gradients when the activations of later layers are free.
            self._touch(used.first_backward_bytes)
            self.now += self.ungraded.pop(unit.chunk)
        else:
            self._touch(used.backward_bytes)
        held, between = problem.held[unit]
        self.now += (between if halves else 0) - held - used.moved_bytes
        if self.leaving[0] == unit:
            self.now += used.leaving_bytes
            self.leaving = unit, used.leaving_bytes
        self._release_views(unit)
        for group in problem.sources(unit):
            if not group[0].gradient:
                continue
            storage = _Storage(sum(problem.sent[t] for t in group), len(group), not halves, len(group) > 1)
            self.gradients.update(dict.fromkeys(group, storage))
            if halves:
                # The leaf tensor holds it until W.
                self.covered.setdefault(unit, []).append(storage)
            else:
                self.now += storage.num_bytes
        self._touch()

    def _release_views(self, unit: Unit) -> None:
        for storage in self.kept.pop(unit, ()):
            self._release(storage)
