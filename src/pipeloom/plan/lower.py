"""Lowering: from a schedule to what every rank does, with communication.

All messages stand in one global order, that of planned time; each send and its receive enter both ranks' lists
together. So between any two ranks both see the same order of messages, which is all that NCCL asks for (it
ignores tags and serves the messages of a pair of ranks one after the other, both directions in one stream);
gloo, which matches by tag, asks for less. Why no such plan can deadlock: in the global order a computation waits
only for messages before it, and a message only for its producer and for messages of its pair of ranks before
it; the first that never ends would have nothing left to wait for. Receives are posted before the computation
that is planned to run when the message leaves (AdaPtis section 4.4, "overlap"), never before another message of
the same pair of ranks, so the argument holds unchanged. It rests on posting that blocks nobody: with NCCL only once
its communicators are made, which the runtime sees to before the first plan.

Where one communicator serves all peers of a rank, one message after the other, a message also waits for those that
its two ranks posted before it. Those are before it in the global order too, as long as a receive is posted early only
as far as no other message of its rank is passed: that is what ``serial`` asks for.
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
"""By what sends: what receives, and what waits for the one and for the other."""


def lower(
    graph: TaskGraph,
    schedule: Schedule,
    timeline: Timeline,
    layout: Layout,
    packing: Packing,
    shapes: Shapes,
    *,
    serial: bool = False,
) -> ExecutionPlan:
    """Turn a schedule into an execution plan.

    Parameters
    ----------
    graph : TaskGraph
        With ``labels``, i.e. built from ``layout`` and ``packing``.
    timeline : Timeline
        Planned times; they give the global order of messages. Any times give a legal plan.
    shapes : callable
        Shape and dtype of a chunk's output or stream for a workload; see `boundary_shapes`.
    serial : bool
        For a backend that serves a rank's messages one after the other, whoever the peers are (see `BACKENDS`): a
        receive is posted no earlier than any other message of its rank.

    Returns
    -------
    ExecutionPlan

    Raises
    ------
    InputError
        When graph, layout and packing do not belong together.
    PlanError
        When the schedule runs a task before what it waits for.
    """
    if graph.labels is None:
        raise InputError("graph.labels", "is null", "lower a graph that was built from a layout and a packing")
    if graph.num_ranks != layout.num_ranks:
        raise InputError("graph.num_ranks", f"{graph.num_ranks}, the layout has {layout.num_ranks}")
    unit_of_pair = [Unit(*label[:3]) for label in graph.labels]
    routes = make_routes(layout, packing, unit_of_pair)
    _check_pairs(graph, layout, unit_of_pair)
    lowering = _Lowering(graph, schedule, timeline, layout, unit_of_pair, serial)
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
            raise InputError(f"pair {pair}", f"is on rank {rank[pair]}, its chunk on rank {chunk.rank}")
        raise InputError(
            f"pair {pair}",
            f"{'has no' if trained[pair] else 'has a'} backward, against the layout",
            "a chunk has a backward where its module, or one before it, is trained",
        )


class _Message(NamedTuple):
    """The activation of a boundary transfer, or its gradient, on its way to another rank."""

    send: Verb
    """SEND_F for the activation, SEND_B for its gradient."""
    sender: int
    receiver: int
    consuming_task: int
    name: tuple[str, int, int]
    """Chunk, microbatch and sub-microbatch of the unit that made the activation."""
    target: str
    shape: tuple[int, ...]
    dtype: str
    stream: str

    def posted(self, verb: Verb, peer: int) -> Action:
        """A send or receive, with what is sent."""
        return Action(verb, *self.name, peer, self.target, self.shape, self.dtype, "", self.stream)

    def awaited(self, verb: Verb) -> Action:
        """The wait for one of them."""
        return Action(verb, *self.name, None, self.target, None, "", "", self.stream)


class _Work(NamedTuple):
    """What is done with a pair's unit."""

    unit: Unit
    strategy: str
    recomputes: bool
    loads: bool
    offloads: bool


@dataclass
class _RankList:
    """Actions of one rank as they grow, with what is needed to post a receive early."""

    actions: list[Action] = field(default_factory=list)
    last_post: dict[int, int] = field(default_factory=dict)
    """Position of the last message posted with each peer."""
    compute_at: int = 0
    """Where the last computation, with its waits, begins."""
    compute_end_ns: int = -1
    last_unit: Unit | None = None
    to_offload: Unit | None = None
    """Offloads after its sends, so that nobody waits for that."""

    def insert(self, action: Action, position: int) -> None:
        """Insert an action, keeping the noted places."""
        for other, place in self.last_post.items():
            if place >= position:
                self.last_post[other] = place + 1
        if position <= self.compute_at:
            self.compute_at += 1
        self.actions.insert(position, action)

    def post(self, action: Action, peer: int, at: int | None = None) -> None:
        """Insert a send or receive at a position (default: the end)."""
        if at is None:
            self.last_post[peer] = len(self.actions)
            self.compute_at += self.compute_at == len(self.actions)
            self.actions.append(action)
        else:
            self.insert(action, at)
            self.last_post[peer] = at

    def early_place(self, peer: int | None, time_ns: int) -> int | None:
        """Where to post a receive so that it stands before the computation running at ``time_ns``.

        Never before another message of the pair, or of the rank where ``peer`` is None.
        """
        if self.compute_end_ns <= time_ns:
            return None
        last = max(self.last_post.values(), default=-1) if peer is None else self.last_post.get(peer, -1)
        return max(self.compute_at, last + 1)


class _Lowering:
    def __init__(
        self,
        graph: TaskGraph,
        schedule: Schedule,
        timeline: Timeline,
        layout: Layout,
        unit_of_pair: list[Unit],
        serial: bool,
    ) -> None:
        self.graph, self.schedule, self.layout, self.serial = graph, schedule, layout, serial
        self.names, self.unit_of_pair = layout.chunk_names, unit_of_pair
        self.pair_of_unit = {unit: pair for pair, unit in enumerate(unit_of_pair)}
        # Lists, since one element of an array takes as long as all that is done with it.
        self.rank, self.pair, self.kind = graph.rank.tolist(), graph.pair.tolist(), graph.kind.tolist()
        self.forward_of, self.backward_of = graph.forward_of.tolist(), graph.backward_of.tolist()
        self.start_ns, self.end_ns = timeline.start_ns.tolist(), timeline.end_ns.tolist()
        self.work = self._work()
        self.ranks = [_RankList() for _ in range(layout.num_ranks)]
        self.messages: list[_Message] = []
        self.waiting = [0] * graph.num_tasks
        self.followers: defaultdict[int, list[int]] = defaultdict(list)
        """Tasks that wait for a task on their own rank."""
        self.sends: defaultdict[int, list[int]] = defaultdict(list)
        self.receives: defaultdict[int, list[int]] = defaultdict(list)
        self._connect()

    def _connect(self) -> None:
        """Write down what every task waits for on its own rank: the rank's order, and its own pair."""
        graph = self.graph
        seen = [False] * graph.num_tasks
        for rank, order in enumerate(self.schedule.order):
            tasks = order.tolist()
            for task in tasks:
                if not 0 <= task < graph.num_tasks or seen[task] or self.rank[task] != rank:
                    raise PlanError(f"order[{rank}]: task {task} is unknown, doubled or of another rank")
                seen[task] = True
            for before, after in itertools.pairwise(tasks):
                self._follow(before, after)
        if not all(seen):
            raise PlanError(f"order: {graph.describe(seen.index(False))} is missing")
        for forward, backward, weight in zip(self.forward_of, self.backward_of, graph.weight_of.tolist(), strict=True):
            if backward != NO_TASK:
                self._follow(forward, backward)
            if weight != NO_TASK:
                self._follow(backward, weight)

    def _follow(self, before: int, after: int) -> None:
        self.followers[before].append(after)
        self.waiting[after] += 1

    def transfer(self, transfer: BoundaryTransfer, target: str, shape: tuple[int, ...], dtype: str) -> None:
        """Let a consumer wait for its producer, and where a gradient comes back, the producer's backward for that."""
        producer, consumer = self.pair_of_unit[transfer.producer], self.pair_of_unit[transfer.consumer]
        directions = [(Verb.SEND_F, self.forward_of[producer], self.forward_of[consumer])]
        if transfer.gradient:
            directions.append((Verb.SEND_B, self.backward_of[consumer], self.backward_of[producer]))
        chunk, microbatch, sub_microbatch = transfer.producer
        name = (self.names[chunk], microbatch, sub_microbatch)
        for send, source, sink in directions:
            sender, receiver = self.rank[source], self.rank[sink]
            if sender == receiver:
                self._follow(source, sink)
                continue
            number = len(self.messages)
            self.messages.append(_Message(send, sender, receiver, sink, name, target, shape, dtype, transfer.stream))
            self.sends[source].append(number)
            self.receives[sink].append(number)
            self.waiting[sink] += 1

    def run(self, iteration: int) -> ExecutionPlan:
        """Walk tasks and messages in planned time, appending each to the lists of its ranks."""
        heap = [(self.start_ns[t], _COMPUTE, t) for t, n in enumerate(self.waiting) if n == 0]
        heapq.heapify(heap)
        num_done = 0
        while heap:
            time_ns, what, number = heapq.heappop(heap)
            if what == _COMPUTE:
                num_done += 1
                self._append_compute(number)
                for message in self.sends.get(number, ()):
                    heapq.heappush(heap, (self.end_ns[number], _MESSAGE, message))
                ready = self.followers.get(number, [])
            else:
                self._append_message(self.messages[number], time_ns)
                ready = [self.messages[number].consuming_task]
            for task in ready:
                self.waiting[task] -= 1
                if self.waiting[task] == 0:
                    heapq.heappush(heap, (self.start_ns[task], _COMPUTE, task))
        if num_done < self.graph.num_tasks:
            stuck = next(t for t, n in enumerate(self.waiting) if n > 0)
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
        work, kind, here = self.work[self.pair[task]], self.kind[task], self.ranks[self.rank[task]]
        unit, actions, backward = work.unit, here.actions, kind in (BACKWARD, INPUT_GRADIENT)
        if here.to_offload is not None:
            actions.append(self._unit_action(Verb.OFFLOAD, here.to_offload))
            here.to_offload = None
        if backward and work.loads:
            # One computation ahead, so that it is back in time; never before its own forward.
            place = len(actions) if here.last_unit == unit else here.compute_at
            here.insert(self._unit_action(Verb.LOAD, unit), place)
        here.compute_at, here.compute_end_ns, here.last_unit = len(actions), self.end_ns[task], unit
        if backward and work.recomputes:
            # Before the wait: nothing else runs on this rank until the gradient is here.
            actions.append(self._unit_action(Verb.RECOMPUTE, unit))
        for number in self.receives.get(task, ()):
            message = self.messages[number]
            _, arrived, sent = _OTHER_VERBS[message.send]
            actions.append(message.awaited(arrived))
            # By now the message was consumed, so waiting for its send costs nothing and frees its memory.
            self.ranks[message.sender].actions.append(message.awaited(sent))
        actions.append(self._unit_action(_VERB_OF_KIND[kind], unit, work.strategy if kind == FORWARD else ""))
        if kind == FORWARD and work.offloads:
            here.to_offload = unit

    def _unit_action(self, verb: Verb, unit: Unit, strategy: str = "") -> Action:
        """What is done with a unit."""
        return Action(verb, self.names[unit.chunk], unit.microbatch, unit.sub_microbatch, None, "", None, "", strategy)

    def _append_message(self, message: _Message, time_ns: int) -> None:
        sender, receiver = self.ranks[message.sender], self.ranks[message.receiver]
        sender.post(message.posted(message.send, message.receiver), message.receiver)
        place = receiver.early_place(None if self.serial else message.sender, time_ns)
        receiver.post(message.posted(_OTHER_VERBS[message.send][0], message.sender), message.sender, place)

    def _append_ends(self) -> None:
        """Gather parameters first, reduce gradients as soon as they are whole, and step."""
        for rank, here in enumerate(self.ranks):
            order = collective_order(self.layout, rank)
            here.actions[:0] = [Action(verb=Verb.UNSHARD, chunk=self.names[chunk]) for chunk in order.unshard]
            ends = {}
            for step, action in enumerate(here.actions if order.reduce else ()):
                if action.verb.is_compute and action.verb is not Verb.F:
                    ends[action.chunk] = step
            place = len(order.unshard)
            for chunk in order.reduce:
                # Never before the reductions that all replicas do first, whatever their plans.
                place = max(place, ends.get(self.names[chunk], -1) + 1)
                while place < len(here.actions) and here.actions[place].verb.is_send:
                    # Another rank waits for these.
                    place += 1
                here.actions.insert(place, Action(verb=Verb.REDUCE_GRAD, chunk=self.names[chunk]))
                ends = {name: step + (step >= place) for name, step in ends.items()}
                place += 1
            here.actions.append(Action(verb=Verb.OPTIMIZER_STEP))

    def _work(self) -> list[_Work]:
        """What is done with the unit of every pair."""
        found = []
        for unit, strategy, backward in zip(self.unit_of_pair, self._strategies(), self.backward_of, strict=True):
            promised = promised_verbs(strategy)
            offloads = Verb.OFFLOAD in promised and backward != NO_TASK
            found.append(_Work(unit, strategy, Verb.RECOMPUTE in promised, Verb.LOAD in promised, offloads))
        return found

    def _strategies(self) -> list[str]:
        """Strategy of every pair, as plans write it."""
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
