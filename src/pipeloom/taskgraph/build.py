"""Build the TaskGraph of one iteration from layout, packing and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from pipeloom.cost import CostModel, StrategyCost, link_table, slowness_of
from pipeloom.cost.dealt import laid_out
from pipeloom.packing import Packing, SubMicrobatch, pieces
from pipeloom.spec import Chunk, Layout, StreamEnd, Workload, strategy_word
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.columns import Edges, IntArray, PairLabel, Pairs, Tasks
from pipeloom.taskgraph.graph import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, TaskGraph, make_graph
from pipeloom.taskgraph.totals import summable, to_ns

BackwardForm = Literal["whole", "split", "either"]
"""How backwards are made: in one task, in two, or either, as the schedule chooses."""


def build_graph(
    layout: Layout,
    packing: Packing,
    costs: CostModel,
    *,
    name: str = "iteration",
    capacity_bytes: int | None = None,
    backward: BackwardForm = "whole",
    hold_outputs: bool = False,
) -> TaskGraph:
    """Make the tasks, pairs and edges of one iteration.

    Within a module each sub-microbatch passes its chunks in order, forward and back. At a module boundary
    a part comes after all parts of the feeding module that hold rows of it (`pipeloom.packing.pieces`). A module
    that has nothing in a microbatch (text only) has no tasks there.

    Parameters
    ----------
    layout : Layout
    packing : Packing
    costs : CostModel
    name : str
    capacity_bytes : int or None
        Memory of each rank; None: no limit.
    backward : str
        ``split``: backwards are I and W where the costs know the parts; ``either``: and every strategy of a split pair
        is offered with a whole backward too, that is a W that takes no time and holds nothing.
    hold_outputs : bool
        Count a module's output where the module that reads it is on the same rank: held from the end of the one to
        the end of the other, as with embeddings computed ahead.

    Returns
    -------
    TaskGraph
        With ``labels``, so that schedules of it can be lowered.

    Replicated modules run each sub-microbatch on one rank: on the one that has least to do so far, what the
    pipelined modules give it included. `build_assignable` is for those who can assign better.

    Raises
    ------
    InputError
        For module boundaries whose parts do not match, and for times and sizes too large to be summed.
    """
    costs, holds = laid_out(costs, layout), hold_outputs or _holds_streams(layout, capacity_bytes)
    builder = _Builder(layout, packing, _memoised(costs, layout), costs, backward, hold_outputs, holds)
    return builder.build().finish(name, capacity_bytes)


def build_assignable(
    layout: Layout,
    packing: Packing,
    costs: CostModel,
    *,
    name: str = "iteration",
    capacity_bytes: int | None = None,
    backward: BackwardForm = "whole",
) -> Assignable:
    """Make the graph of `build_graph`, and what is needed to assign the parts of replicated modules anew."""
    costs, holds = laid_out(costs, layout), _holds_streams(layout, capacity_bytes)
    builder = _Builder(layout, packing, _memoised(costs, layout), costs, backward, False, holds)
    graph = builder.build().finish(name, capacity_bytes)
    homes = tuple(
        tuple(sorted(layout.chunks_of(module.name), key=lambda c: layout.chunks[c].rank))
        if module.on_ranks == "replicated"
        else ()
        for module in layout.modules
    )
    options = tuple(builder.options) if any(builder.options) else ()
    slowness = np.array([slowness_of(costs, rank) for rank in range(layout.num_ranks)])
    crossing = np.array(builder.crossing, dtype=np.int64).reshape(-1, builder.num_links)
    return Assignable(graph, homes, crossing, builder.link, slowness, options)


def _holds_streams(layout: Layout, capacity_bytes: int | None) -> bool:
    return capacity_bytes is not None and all(module.on_ranks == "pipelined" for module in layout.modules)


def _memoised(costs: CostModel, layout: Layout) -> Callable[[int, Workload], tuple[StrategyCost, ...]]:
    """Ask the cost model once per chunk shape and workload: equal chunks recur on every microbatch."""
    known: dict[tuple[str, tuple[int, int], float, Workload], tuple[StrategyCost, ...]] = {}

    def chunk_costs(chunk: int, workload: Workload) -> tuple[StrategyCost, ...]:
        here = layout.chunks[chunk]
        key = (here.module, here.layers, slowness_of(costs, here.rank), workload)
        if key not in known:
            known[key] = costs.chunk_costs(here, workload)
        return known[key]

    return chunk_costs


@dataclass
class _Passage:
    """The pairs that one part of one module passes, chunk by chunk."""

    chunks: tuple[int, ...]
    pairs: list[int]
    workload: Workload


class _Ends(NamedTuple):
    """What is joined: a module's chunk that gives (-1: the last), and one that takes, each by its place; and what."""

    source: str
    give: int
    module: str
    take: int
    stream: str = ""


@dataclass
class _Builder:
    layout: Layout
    packing: Packing
    chunk_costs: Callable[[int, Workload], tuple[StrategyCost, ...]]
    costs: CostModel
    form: BackwardForm
    hold_outputs: bool
    holds_streams: bool
    """Streams are held until all that take them have run; where memory is limited, and parts stay on their ranks."""
    kind: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    pair: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)
    activation: list[int] = field(default_factory=list)
    weight_gradient: list[int] = field(default_factory=list)
    candidates: list[tuple[Candidate, ...]] = field(default_factory=list)
    options: list[tuple[tuple[Candidate, ...], ...]] = field(default_factory=list)
    """Per pair that could be on any rank, its candidates on each; nothing where it could not, or ranks are alike."""
    labels: list[PairLabel] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    delay: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    crossing: list[tuple[int, ...]] = field(default_factory=list)
    """Per edge, the delay that it has over each link where its ends are on different ranks, if they ever are."""
    link: IntArray = field(init=False)
    """Of any two ranks."""
    num_links: int = field(init=False)
    known_ns: dict[int, tuple[int, ...]] = field(default_factory=dict)
    converted: dict[tuple[int, bool], tuple[tuple[Candidate, ...], str]] = field(default_factory=dict)
    """Answers of the cost model as candidates, with the word for the first of them."""
    num_segments: int = 0
    load_s: list[float] = field(default_factory=list)
    """Per rank: seconds of the pipelined modules in all, and of what replicated ones have been assigned to it."""

    emitted: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By stream, the module and the layer that emits it."""

    def __post_init__(self) -> None:
        """Number the links."""
        self.link = link_table(self.costs, self.layout.num_ranks)
        self.num_links = int(self.link.max()) + 1

    def build(self) -> _Builder:
        """Add everything."""
        self.emitted = {end.stream: (m.name, end.layer) for m in self.layout.modules for end in m.emits}
        self.weigh_ranks()
        for microbatch in range(len(self.packing.microbatches)):
            self.add_microbatch(microbatch)
        return self

    def weigh_ranks(self) -> None:
        """Count what the pipelined modules give every rank; only replicated modules ask."""
        self.load_s = [0.0] * self.layout.num_ranks
        if all(module.on_ranks == "pipelined" for module in self.layout.modules):
            return
        for m, module in enumerate(self.layout.modules):
            if module.on_ranks == "replicated":
                continue
            for microbatch in self.packing.microbatches:
                for part in microbatch.parts[m]:
                    for chunk in self.layout.chunks_of(module.name):
                        self.load_s[self.layout.chunks[chunk].rank] += self._seconds(chunk, part.workload)

    def _seconds(self, chunk: int, workload: Workload) -> float:
        base = self.chunk_costs(chunk, workload)[0]
        return base.forward_s + base.backward_s

    def _chunks(self, m: int, workload: Workload) -> tuple[int, ...]:
        """Chunks that a part passes: all of a pipelined module, one of a replicated one."""
        module = self.layout.modules[m]
        chunks = self.layout.chunks_of(module.name)
        if module.on_ranks == "pipelined":
            return chunks
        own = {c: self._seconds(c, workload) if self.costs.slowness else 0.0 for c in chunks}
        chunk = min(chunks, key=lambda c: self.load_s[self.layout.chunks[c].rank] + own[c])
        self.load_s[self.layout.chunks[chunk].rank] += self._seconds(chunk, workload)
        return (chunk,)

    def add_microbatch(self, microbatch: int) -> None:
        """Add all modules of a microbatch, in topological order."""
        passages: dict[str, list[_Passage]] = {}
        for m, module in enumerate(self.layout.modules):
            parts = self.packing.microbatches[microbatch].parts[m]
            passages[module.name] = [self._pass(microbatch, m, sub, part) for sub, part in enumerate(parts)]
            for source in module.after:
                ends = _Ends(source, -1, module.name, 0)
                self._join(passages[source], passages[module.name], microbatch, ends)
            for end in module.takes:
                self._add_stream(passages, microbatch, module.name, end)

    def _pass(self, microbatch: int, m: int, sub: int, part: SubMicrobatch) -> _Passage:
        name = self.layout.modules[m].name
        chunks = self._chunks(m, part.workload)
        trained = self.layout.has_backward(name)
        passage = _Passage(chunks, [], part.workload)
        ranks = [self.layout.chunks[c].rank for c in chunks]
        runs = number_runs(ranks)
        base = self.num_segments
        # Forward segments of this part come first, then its backward ones, then its weight gradients.
        per_kind = runs[-1] + 1
        self.num_segments += per_kind * (1 + (2 if self.form != "whole" else 1) * trained)
        for position, chunk in enumerate(chunks):
            label = PairLabel(chunk, microbatch, sub)
            segments = tuple(base + k * per_kind + runs[position] for k in range(3))
            passage.pairs.append(self._add_pair(label, m, ranks[position], segments, part.workload, trained))
        for before, after in zip(range(len(chunks)), range(1, len(chunks)), strict=False):
            self._edge(passage, before, passage, after, part.workload)
        return passage

    def _add_pair(
        self, label: PairLabel, module: int, rank: int, segments: tuple[int, ...], workload: Workload, trained: bool
    ) -> int:
        pair = len(self.activation)
        base = self.chunk_costs(label.chunk, workload)[0]
        split = trained and self.form != "whole" and base.backward_weight_s is not None
        candidates, word = self._candidates(label, workload, split)
        elsewhere: tuple[tuple[Candidate, ...], ...] = ()
        if self.costs.slowness and self._moves(self.layout.chunks[label.chunk]):
            chunks = sorted(
                self.layout.chunks_of(self.layout.modules[module].name), key=lambda c: self.layout.chunks[c].rank
            )
            elsewhere = tuple(self._candidates(label._replace(chunk=c), workload, split)[0] for c in chunks)
        self.options.append(elsewhere)
        first = candidates[0]
        self.forward.append(self._add_task(FORWARD, rank, first.forward_ns, pair, segments[0], label, module))
        self.backward.append(-1)
        if trained:
            kind = INPUT_GRADIENT if split else BACKWARD
            self.backward[pair] = self._add_task(kind, rank, first.backward_ns, pair, segments[1], label, module)
            if split:
                self._add_task(WEIGHT_GRADIENT, rank, first.weight_ns, pair, segments[2], label, module)
        self.activation.append(first.activation_bytes)
        self.weight_gradient.append(first.weight_gradient_bytes)
        self.candidates.append(candidates)
        self.labels.append(PairLabel(label.chunk, label.microbatch, label.sub_microbatch, word))
        return pair

    def _candidates(self, label: PairLabel, workload: Workload, split: bool) -> tuple[tuple[Candidate, ...], str]:
        """What a chunk may do with a workload, with the word for the first of that."""
        options = self.chunk_costs(label.chunk, workload)
        # The same answer of the cost model is one object, and kept by `_memoised`.
        known = self.converted.get((id(options), split))
        if known is None:
            forms = (True, False) if split and self.form == "either" else (split,)
            name = f"{self.layout.chunks[label.chunk].module}, chunk {label.chunk}, microbatch {label.microbatch}"
            made = tuple(_candidate(option, split, form, name) for option in options for form in forms)
            known = self.converted[id(options), split] = made, strategy_word(made[0].strategy, made[0].layers)
        return known

    def _add_task(
        self, kind: int, rank: int, duration: int, pair: int, segment: int, label: PairLabel, module: int
    ) -> int:
        self.kind.append(kind)
        self.rank.append(rank)
        self.duration.append(duration)
        self.pair.append(pair)
        self.segment.append(segment)
        self.microbatch.append(label.microbatch)
        self.module.append(module)
        return len(self.kind) - 1

    def _add_stream(self, passages: dict[str, list[_Passage]], microbatch: int, module: str, end: StreamEnd) -> None:
        """Connect every part's chunk that emits a stream with those that take it, where they are not one."""
        source, layer = self.emitted[end.stream]
        takers = (each.layer for each in self.layout.module(module).takes if each.stream == end.stream)
        if any(
            self._chunk_at(module, each) == self._chunk_at(module, end.layer) for each in takers if each < end.layer
        ):
            # What the chunk has taken for an earlier layer.
            return
        ends = _Ends(source, self._chunk_at(source, layer), module, self._chunk_at(module, end.layer), end.stream)
        if (ends.source, ends.give) != (ends.module, ends.take):
            self._join(passages[source], passages[module], microbatch, ends)

    def _chunk_at(self, module: str, layer: int) -> int:
        """Which of a part's chunks has a layer: of a replicated module there is one."""
        if self.layout.module(module).on_ranks == "replicated":
            return 0
        chunks = self.layout.chunks_of(module)
        return next(i for i, c in enumerate(chunks) if layer <= self.layout.chunks[c].layers[1])

    def _join(self, above: list[_Passage], below: list[_Passage], microbatch: int, ends: _Ends) -> None:
        """Connect the parts on both sides of a module boundary, or at both ends of a stream."""
        number = self.packing.modules.index
        for piece in pieces(self.packing, microbatch, number(ends.source), number(ends.module)):
            up = above[piece.above]
            lengths = up.workload.lengths[piece.first : piece.first + piece.count]
            workload = up.workload if piece.whole else Workload(lengths)
            give = len(up.chunks) - 1 if ends.give < 0 else ends.give
            self._edge(up, give, below[piece.below], ends.take, workload, ends.stream)

    def _edge(self, above: _Passage, i: int, below: _Passage, j: int, workload: Workload, stream: str = "") -> None:
        """Connect two pairs: activation forward, gradient back, each after its transfer between ranks."""
        source, target = above.pairs[i], below.pairs[j]
        upper, lower = self.layout.chunks[above.chunks[i]], self.layout.chunks[below.chunks[j]]
        delay = held = 0
        crossing = (0,) * self.num_links
        apart = upper.rank != lower.rank
        if apart or self._moves(upper) or self._moves(lower):
            num_bytes = self._num_bytes(upper, workload, stream)
            crossing = self._crossing(num_bytes)
        if not apart and (self.holds_streams if stream else self.hold_outputs and above is not below):
            held = self._num_bytes(upper, workload, stream)
        if apart:
            delay = crossing[self.link[upper.rank, lower.rank]]
        self._add_edge(self.forward[source], self.forward[target], delay, held, crossing)
        if self.backward[source] >= 0 and self.backward[target] >= 0:
            self._add_edge(self.backward[target], self.backward[source], delay, held if stream else 0, crossing)

    def _crossing(self, num_bytes: int) -> tuple[int, ...]:
        """Nanoseconds of a message over each link."""
        if num_bytes not in self.known_ns:
            name = f"a message of {num_bytes} bytes"
            every = range(self.num_links)
            self.known_ns[num_bytes] = tuple(to_ns(self.costs.transfer_s(num_bytes, link), name) for link in every)
        return self.known_ns[num_bytes]

    def _num_bytes(self, chunk: Chunk, workload: Workload, stream: str) -> int:
        return self.costs.stream_bytes(stream, workload) if stream else self.costs.boundary_bytes(chunk, workload)

    def _moves(self, chunk: Chunk) -> bool:
        """Whether a part that is worked on here could be worked on elsewhere."""
        return self.layout.module(chunk.module).on_ranks == "replicated"

    def _add_edge(self, source: int, target: int, delay: int, held: int, crossing: tuple[int, ...]) -> None:
        self.source.append(source)
        self.target.append(target)
        self.delay.append(delay)
        self.held.append(held)
        self.crossing.append(crossing)

    def finish(self, name: str, capacity_bytes: int | None) -> TaskGraph:
        """Close the lists into a graph."""
        ranks = self.layout.num_ranks
        static = np.zeros(ranks, dtype=np.int64)
        for chunk in self.layout.chunks:
            static[chunk.rank] += self.costs.static_bytes(chunk)
        several = any(len(options) > 1 for options in self.candidates)
        # Segment numbers may have gaps (W segments of parts that are not split); close them.
        # Parts that are assigned to other ranks have these delays instead.
        summable("edges.delay_s", [max(each) for each in self.crossing])
        segment = np.unique(np.array(self.segment, dtype=np.int64), return_inverse=True)[1]
        return make_graph(
            name=name,
            num_ranks=ranks,
            tasks=Tasks(
                kind=self.kind,
                rank=self.rank,
                duration_ns=self.duration,
                pair=self.pair,
                segment=segment,
                microbatch=self.microbatch,
                module=self.module,
                module_names=tuple(m.name for m in self.layout.modules),
            ),
            pairs=Pairs(
                activation_bytes=self.activation,
                weight_gradient_bytes=self.weight_gradient,
                candidates=tuple(self.candidates) if several else None,
                labels=tuple(self.labels),
            ),
            edges=Edges(
                source=self.source, target=self.target, delay_ns=self.delay, bytes=self.held if any(self.held) else None
            ),
            static_bytes=static,
            capacity_bytes=None if capacity_bytes is None else np.full(ranks, capacity_bytes, dtype=np.int64),
        )


def number_runs(ranks: Sequence[int]) -> list[int]:
    """Number the maximal runs of consecutive chunks in which no rank comes twice: the segments of a pass."""
    numbers, seen, run = [], set[int](), 0
    for rank in ranks:
        if rank in seen:
            run += 1
            seen = set()
        seen.add(rank)
        numbers.append(run)
    return numbers


def _candidate(cost: StrategyCost, split: bool, halves: bool, name: str) -> Candidate:
    """A strategy of a pair that has I and W where ``split``; with its backward in halves, or all of it in I.

    Errors give the pair's ``name``.
    """
    weight_gradient = cost.activation_bytes if cost.weight_gradient_bytes is None else cost.weight_gradient_bytes
    inputs, weights = cost.backward_s, 0.0
    # A strategy whose parts are unknown keeps its backward whole.
    if halves and cost.backward_input_s is not None:
        inputs, weights = cost.backward_input_s, cost.backward_weight_s or 0.0
    elif split and not halves:
        weight_gradient = 0
    return Candidate(
        cost.strategy,
        to_ns(cost.forward_s, f"{name}: forward_s"),
        to_ns(inputs, f"{name}: backward_s"),
        to_ns(weights, f"{name}: backward_weight_s"),
        cost.activation_bytes,
        weight_gradient,
        cost.layers,
        cost.host_bytes,
    )
