"""Lowering: turn a schedule into the actions of every rank, communication included.

All messages have one global order, by planned time. A send and its receive are appended to the lists of their two ranks
at the same time. Any two ranks therefore see their messages in the same order. NCCL requires this, because it ignores
tags and serves the messages of a pair of ranks one by one, both directions in one stream. Gloo matches messages by tag
and does not require it.

Such a plan cannot deadlock. In the global order, a computation waits only for earlier messages, and a message waits
only for its producer and for earlier messages between the same two ranks. The first item that never ends would
therefore have nothing to wait for. A receive is posted before the computation that is planned to run when the message
leaves (AdaPtis section 4.4, "overlap"), but never before another message between the same two ranks, so the argument
still holds. It assumes that posting does not block. With NCCL, this requires existing communicators, which the runtime
creates before the first plan.

If one communicator serves all peers of a rank, one message at a time, a message also waits for the earlier messages of
both its ranks. These are earlier in the global order too, unless a receive is posted before another message of its
rank. ``single_communicator`` prevents this.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import Action, ExecutionPlan, Verb, promised_verbs
from pipeloom.plan.routes import BoundaryTransfer, Shapes, Unit, collective_order, make_routes, transferred_workload
from pipeloom.spec import Layout, strategy_word
from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, KIND_NAMES, NO_TASK, TaskGraph
from pipeloom.timeline import Schedule, Timeline

_MESSAGE, _COMPUTE = 0, 1
_VERB_OF_KIND = tuple(map(Verb, KIND_NAMES))
_OTHER_VERBS = {send: (send.other_end, send.other_end.wait, send.wait) for send in Verb if send.is_send}
"""For each send: its receive, the wait for the receive, and the wait for the send."""


def lower(
    graph: TaskGraph,
    schedule: Schedule,
    timeline: Timeline,
    layout: Layout,
    packing: Packing,
    shapes: Shapes,
    *,
    single_communicator: bool = False,
    serial: bool = False,
) -> ExecutionPlan:
    """Turn a schedule into an execution plan.

    Parameters
    ----------
    graph : TaskGraph
        Built from ``layout`` and ``packing``, so that it has ``labels``.
    timeline : Timeline
        Planned times, which define the global order of messages. The plan is valid for any times.
    shapes : callable
        Shape and dtype of a chunk's output or stream for a workload; see `boundary_shapes`.
    single_communicator : bool
        Never post a receive before another message of its rank. Required for a backend with a single communicator,
        which serves the messages of a rank one by one for all peers; see `BACKENDS`.
    serial : bool
        Deprecated name of ``single_communicator``.

    Raises
    ------
    InputError
        Graph, layout and packing do not belong together.
    PlanError
        The schedule runs a task before one that it depends on.
    """
    if graph.labels is None:
        raise InputError("graph.labels", "is null", "lower a graph that was built from a layout and a packing")
    if graph.num_ranks != layout.num_ranks:
        raise InputError("graph.num_ranks", f"is {graph.num_ranks}, but the layout has {layout.num_ranks} ranks")
    unit_of_pair = [Unit(*label[:3]) for label in graph.labels]
    routes = make_routes(layout, packing, unit_of_pair)
    _check_pairs(graph, layout, unit_of_pair)
    lowering = _Lowering(graph, schedule, timeline, layout, unit_of_pair, single_communicator or serial)
    for transfer in routes.transfers:
        workload = transferred_workload(transfer, layout, packing)
        shape, dtype = shapes(transfer.producer.chunk, workload, transfer.stream)
        lowering.transfer(transfer, routes.target(transfer, lowering.names), shape, dtype)
    return lowering.run(packing.batch.iteration)


def _check_pairs(graph: TaskGraph, layout: Layout, unit_of_pair: list[Unit]) -> None:
    chunk_of = np.array([unit.chunk for unit in unit_of_pair], np.int64)
    rank = graph.rank[graph.forward_of]
    elsewhere = rank != np.array([chunk.rank for chunk in layout.chunks], np.int64)[chunk_of]
    trained = np.array([layout.has_backward(chunk.module) for chunk in layout.chunks], np.bool_)[chunk_of]
    for pair in np.flatnonzero(elsewhere | ((graph.backward_of != NO_TASK) != trained))[:1].tolist():
        chunk = layout.chunks[unit_of_pair[pair].chunk]
        if elsewhere[pair]:
            raise InputError(f"pair {pair}", f"is on rank {rank[pair]}, but its chunk is on rank {chunk.rank}")
        raise InputError(
            f"pair {pair}",
            f"{'has no' if trained[pair] else 'has a'} backward, unlike in the layout",
            "a chunk has a backward if its module, or a module before it, is trained",
        )


class _Message(NamedTuple):
    """A message between ranks with the activation of a boundary transfer, or its gradient."""

    send: Verb
    """SEND_F for the activation, SEND_B for its gradient."""
    sender: int
    receiver: int
    consuming_task: int
    name: tuple[str, int, int]
    """Chunk, microbatch and sub-microbatch of the producer of the activation."""
    target: str
    shape: tuple[int, ...]
    dtype: str
    stream: str

    def posted(self, verb: Verb, peer: int) -> Action:
        """Return the send or the receive."""
        return Action(verb, *self.name, peer, self.target, self.shape, self.dtype, "", self.stream)

    def awaited(self, verb: Verb) -> Action:
        """Return the wait for the send or the receive."""
        return Action(verb, *self.name, None, self.target, None, "", "", self.stream)


@dataclass
class _RankList:
    """Actions of one rank so far, and the positions that are needed to post a receive early."""

    actions: list[Action] = field(default_factory=list)
    last_post: dict[int, int] = field(default_factory=dict)
    """Position of the last message posted with each peer."""
    compute_at: int = 0
    """Position at which the last computation, with its waits, begins."""
    compute_end_ns: int = -1
    last_unit: Unit | None = None
    to_offload: Unit | None = None
    """Unit to offload after its sends, so that other ranks do not wait for the offload."""

    def insert(self, action: Action, position: int) -> None:
        """Insert an action and shift the stored positions."""
        for other, place in self.last_post.items():
            if place >= position:
                self.last_post[other] = place + 1
        if position <= self.compute_at:
            self.compute_at += 1
        self.actions.insert(position, action)

    def post(self, action: Action, peer: int, at: int | None = None) -> None:
        """Insert a send or receive at a position; None: the end."""
        if at is None:
            self.last_post[peer] = len(self.actions)
            self.compute_at += self.compute_at == len(self.actions)
            self.actions.append(action)
        else:
            self.insert(action, at)
            self.last_post[peer] = at

    def early_place(self, peer: int | None, time_ns: int) -> int | None:
        """Return the position for a receive before the computation that runs at ``time_ns``; None: the end.

        The position is never before another message with the peer, or of the rank if ``peer`` is None.
        """
        if self.compute_end_ns <= time_ns:
            return None
        last = max(self.last_post.values(), default=-1) if peer is None else self.last_post.get(peer, -1)
        return max(self.compute_at, last + 1)


class _TaskLists(NamedTuple):
    """Columns of tasks and pairs as lists, whose elements are faster to read than those of arrays."""

    rank: list[int]
    pair: list[int]
    kind: list[int]
    forward_of: list[int]
    backward_of: list[int]
    start_ns: list[int]
    end_ns: list[int]


class _Dependencies:
    """Dependencies of tasks on tasks of their rank and on messages."""

    def __init__(self, num_tasks: int) -> None:
        self.waiting = [0] * num_tasks
        """Number of unfinished dependencies of every task."""
        self.followers: defaultdict[int, list[int]] = defaultdict(list)
        """Tasks on the same rank that wait for each task."""
        self.sends: defaultdict[int, list[int]] = defaultdict(list)
        self.receives: defaultdict[int, list[int]] = defaultdict(list)

    def follow(self, before: int, after: int) -> None:
        self.followers[before].append(after)
        self.waiting[after] += 1

    def send(self, message: int, source: int, sink: int) -> None:
        self.sends[source].append(message)
        self.receives[sink].append(message)
        self.waiting[sink] += 1


class _Lowering:
    def __init__(
        self,
        graph: TaskGraph,
        schedule: Schedule,
        timeline: Timeline,
        layout: Layout,
        unit_of_pair: list[Unit],
        single_communicator: bool,
    ) -> None:
        self.graph, self.schedule, self.layout, self.single_communicator = graph, schedule, layout, single_communicator
        self.names, self.unit_of_pair = layout.chunk_names, unit_of_pair
        self.pair_of_unit = {unit: pair for pair, unit in enumerate(unit_of_pair)}
        columns = (graph.rank, graph.pair, graph.kind, graph.forward_of, graph.backward_of)
        self.tasks = _TaskLists(*(column.tolist() for column in (*columns, timeline.start_ns, timeline.end_ns)))
        self.strategies = self._strategies()
        self.ranks = [_RankList() for _ in range(layout.num_ranks)]
        self.messages: list[_Message] = []
        self.dependencies = _Dependencies(graph.num_tasks)
        self._connect()

    def _connect(self) -> None:
        """Add the dependencies of every task within its rank: on the previous task, and within its pair."""
        graph, tasks, follow = self.graph, self.tasks, self.dependencies.follow
        seen = [False] * graph.num_tasks
        for rank, order in enumerate(self.schedule.order):
            listed = order.tolist()
            for task in listed:
                if not 0 <= task < graph.num_tasks or seen[task] or tasks.rank[task] != rank:
                    raise PlanError(f"order[{rank}]: task {task} is unknown, repeated, or of another rank")
                seen[task] = True
            for before, after in itertools.pairwise(listed):
                follow(before, after)
        if not all(seen):
            raise PlanError(f"order: {graph.describe(seen.index(False))} is missing")
        weight_of = graph.weight_of.tolist()
        for forward, backward, weight in zip(tasks.forward_of, tasks.backward_of, weight_of, strict=True):
            if backward != NO_TASK:
                follow(forward, backward)
            if weight != NO_TASK:
                follow(backward, weight)

    def transfer(self, transfer: BoundaryTransfer, target: str, shape: tuple[int, ...], dtype: str) -> None:
        """Let the consumer's forward wait for the producer's and, with a gradient, the producer's backward for the
        consumer's.
        """
        tasks = self.tasks
        producer, consumer = self.pair_of_unit[transfer.producer], self.pair_of_unit[transfer.consumer]
        directions = [(Verb.SEND_F, tasks.forward_of[producer], tasks.forward_of[consumer])]
        if transfer.gradient:
            directions.append((Verb.SEND_B, tasks.backward_of[consumer], tasks.backward_of[producer]))
        chunk, microbatch, sub_microbatch = transfer.producer
        name = (self.names[chunk], microbatch, sub_microbatch)
        for send, source, sink in directions:
            sender, receiver = tasks.rank[source], tasks.rank[sink]
            if sender == receiver:
                self.dependencies.follow(source, sink)
                continue
            self.dependencies.send(len(self.messages), source, sink)
            self.messages.append(_Message(send, sender, receiver, sink, name, target, shape, dtype, transfer.stream))

    def run(self, iteration: int) -> ExecutionPlan:
        """Visit tasks and messages in planned time and append each to the lists of its ranks."""
        start_ns, end_ns, waiting = self.tasks.start_ns, self.tasks.end_ns, self.dependencies.waiting
        heap = [(start_ns[t], _COMPUTE, t) for t, n in enumerate(waiting) if n == 0]
        heapq.heapify(heap)
        num_done = 0
        while heap:
            time_ns, what, number = heapq.heappop(heap)
            if what == _COMPUTE:
                num_done += 1
                self._append_compute(number)
                for message in self.dependencies.sends.get(number, ()):
                    heapq.heappush(heap, (end_ns[number], _MESSAGE, message))
                ready = self.dependencies.followers.get(number, [])
            else:
                self._append_message(self.messages[number], time_ns)
                ready = [self.messages[number].consuming_task]
            for task in ready:
                waiting[task] -= 1
                if waiting[task] == 0:
                    heapq.heappush(heap, (start_ns[task], _COMPUTE, task))
        if num_done < self.graph.num_tasks:
            stuck = next(t for t, n in enumerate(waiting) if n > 0)
            raise PlanError(f"the schedule deadlocks: {self.graph.describe(stuck)} waits for a later task")
        self._append_ends()
        return ExecutionPlan(
            num_ranks=self.layout.num_ranks,
            iteration=iteration,
            layout=self.layout.digest,
            ranks=tuple(tuple(rank.actions) for rank in self.ranks),
            format="pipeloom.plan/3" if any(message.stream for message in self.messages) else "pipeloom.plan/2",
        )

    def _append_compute(self, task: int) -> None:
        tasks = self.tasks
        pair, kind, here = tasks.pair[task], tasks.kind[task], self.ranks[tasks.rank[task]]
        unit, strategy = self.unit_of_pair[pair], self.strategies[pair]
        actions, promised, backward = here.actions, promised_verbs(strategy), kind in (BACKWARD, INPUT_GRADIENT)
        if here.to_offload is not None:
            actions.append(self._unit_action(Verb.OFFLOAD, here.to_offload))
            here.to_offload = None
        if backward and Verb.LOAD in promised:
            # Load one computation ahead, but never before the forward of the same unit.
            place = len(actions) if here.last_unit == unit else here.compute_at
            here.insert(self._unit_action(Verb.LOAD, unit), place)
        here.compute_at, here.compute_end_ns, here.last_unit = len(actions), tasks.end_ns[task], unit
        if backward and Verb.RECOMPUTE in promised:
            # Recompute before the wait, while this rank is idle.
            actions.append(self._unit_action(Verb.RECOMPUTE, unit))
        for number in self.dependencies.receives.get(task, ()):
            message = self.messages[number]
            _, arrived, sent = _OTHER_VERBS[message.send]
            actions.append(message.awaited(arrived))
            # The message has arrived, so the wait for its send returns at once and frees its memory.
            self.ranks[message.sender].actions.append(message.awaited(sent))
        actions.append(self._unit_action(_VERB_OF_KIND[kind], unit, strategy if kind == FORWARD else ""))
        if kind == FORWARD and Verb.OFFLOAD in promised and tasks.backward_of[pair] != NO_TASK:
            here.to_offload = unit

    def _unit_action(self, verb: Verb, unit: Unit, strategy: str = "") -> Action:
        """Return an action on a unit."""
        return Action(verb, self.names[unit.chunk], unit.microbatch, unit.sub_microbatch, None, "", None, "", strategy)

    def _append_message(self, message: _Message, time_ns: int) -> None:
        sender, receiver = self.ranks[message.sender], self.ranks[message.receiver]
        sender.post(message.posted(message.send, message.receiver), message.receiver)
        place = receiver.early_place(None if self.single_communicator else message.sender, time_ns)
        receiver.post(message.posted(_OTHER_VERBS[message.send][0], message.sender), message.sender, place)

    def _append_ends(self) -> None:
        """Add UNSHARD first, each REDUCE_GRAD once its gradients are complete, and the optimizer step."""
        for rank, here in enumerate(self.ranks):
            order = collective_order(self.layout, rank)
            here.actions[:0] = [Action(verb=Verb.UNSHARD, chunk=self.names[chunk]) for chunk in order.unshard]
            ends = {}
            for step, action in enumerate(here.actions if order.reduce else ()):
                if action.verb.is_compute and action.verb is not Verb.F:
                    ends[action.chunk] = step
            place = len(order.unshard)
            for chunk in order.reduce:
                # Keep the order of reductions, which all replicas share.
                place = max(place, ends.get(self.names[chunk], -1) + 1)
                while place < len(here.actions) and here.actions[place].verb.is_send:
                    # Other ranks wait for these sends.
                    place += 1
                here.actions.insert(place, Action(verb=Verb.REDUCE_GRAD, chunk=self.names[chunk]))
                ends = {name: step + (step >= place) for name, step in ends.items()}
                place += 1
            here.actions.append(Action(verb=Verb.OPTIMIZER_STEP))

    def _strategies(self) -> list[str]:
        """Return the strategy of every pair, as plans write it."""
        graph = self.graph
        assert graph.labels is not None
        if graph.candidates is None:
            return [label.strategy for label in graph.labels]
        choice = [0] * graph.num_pairs if self.schedule.candidate is None else self.schedule.candidate.tolist()
        words: dict[int, str] = {}
        found = []
        for row, number in zip(graph.candidates, choice, strict=True):
            chosen = row[number]
            word = words.get(id(chosen))
            if word is None:
                word = words[id(chosen)] = strategy_word(chosen.strategy, chosen.layers)
            found.append(word)
        return found
