"""Build the TaskGraph of one iteration from layout, packing and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from pipeloom.cost import CostModel, StrategyCost, link_table, rank_static_bytes, slowness_of
from pipeloom.cost.dealt import laid_out
from pipeloom.limits import MAX_TASKS
from pipeloom.packing import Packing, SubMicrobatch, pieces
from pipeloom.spec import Chunk, Layout, StreamEnd, Workload, strategy_word
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.columns import Edges, IntArray, PairLabel, Pairs, Tasks
from pipeloom.taskgraph.graph import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, TaskGraph, make_graph
from pipeloom.totals import check_work, summable, to_ns

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
    builder = _Builder(layout, packing, costs, backward, hold_outputs, holds)
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
    builder = _Builder(layout, packing, costs, backward, False, holds)
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


class _Answer(NamedTuple):
    """What the cost model says of a chunk on a workload, as it goes into the graph."""

    candidates: tuple[Candidate, ...]
    word: str
    """For the first of them."""
    split: bool
    """Whether its backward is I and W."""


class _Path(NamedTuple):
    """What all parts have in common that pass the same chunks, with the same of their backwards split.

    Tasks, pairs and segments are numbered from the part's first; edges alternate between forward and backward.
    """

    kind: list[int]
    rank: list[int]
    pair: list[int]
    segment: list[int]
    forward: list[int]
    backward: list[int]
    """Per pair its backward's task; none where it has none."""
    source: list[int]
    target: list[int]
    num_segments: int


@dataclass
class _Passage:
    """The pairs that one part of one module passes, chunk by chunk, the first of them ``pair``."""

    chunks: tuple[int, ...]
    pair: int
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
    like: list[int] = field(default_factory=list)
    """Per chunk, the first that costs alike: chunks of the same layers, and ranks as fast, recur."""
    known_costs: dict[Workload, dict[int, tuple[StrategyCost, ...]]] = field(default_factory=dict)
    """By workload, so that its lengths are hashed once for all chunks, and by chunk."""
    known_answers: dict[Workload, dict[int, _Answer]] = field(default_factory=dict)
    known_bytes: dict[Workload, dict[int, int]] = field(default_factory=dict)
    converted: dict[tuple[int, bool], tuple[tuple[Candidate, ...], str]] = field(default_factory=dict)
    """Answers of the cost model as candidates, with the word for the first of them."""
    paths: dict[tuple[tuple[int, ...], tuple[bool, ...]], _Path] = field(default_factory=dict)
    num_segments: int = 0
    load_s: list[float] = field(default_factory=list)
    """Per rank: seconds of the pipelined modules in all, and of what replicated ones have been assigned to it."""

    emitted: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By stream, the module and the layer that emits it."""

    def __post_init__(self) -> None:
        """Number the links, and find chunks that cost alike."""
        self.link = link_table(self.costs, self.layout.num_ranks)
        self.num_links = int(self.link.max()) + 1
        first: dict[tuple[str, tuple[int, int], float], int] = {}
        for number, chunk in enumerate(self.layout.chunks):
            key = (chunk.module, chunk.layers, slowness_of(self.costs, chunk.rank))
            self.like.append(first.setdefault(key, number))

    def build(self) -> _Builder:
        """Add everything."""
        modules = self.layout.modules
        chunks = [len(self.layout.chunks_of(m.name)) if m.on_ranks == "pipelined" else 1 for m in modules]
        every = ((n, parts) for one in self.packing.microbatches for n, parts in zip(chunks, one.parts, strict=True))
        tasks = 2 * sum(n * len(parts) for n, parts in every)
        check_work("packing", tasks, "tasks", MAX_TASKS, "give smaller batches, or a layout of fewer chunks")
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

    def chunk_costs(self, chunk: int, workload: Workload) -> tuple[StrategyCost, ...]:
        """Ask the cost model, once for every workload and chunk that costs alike."""
        known = self.known_costs.setdefault(workload, {})
        like = self.like[chunk]
        if like not in known:
            known[like] = self.costs.chunk_costs(self.layout.chunks[chunk], workload)
        return known[like]

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
        chunks, workload = self._chunks(m, part.workload), part.workload
        answers = self._answers(m, chunks, microbatch, workload)
        path = self._path(m, chunks, tuple(answer.split for answer in answers))
        pair, task, segment = len(self.activation), len(self.kind), self.num_segments
        self.num_segments += path.num_segments
        self.kind += path.kind
        self.rank += path.rank
        self.pair += [pair + each for each in path.pair]
        self.segment += [segment + each for each in path.segment]
        self.microbatch += [microbatch] * len(path.kind)
        self.module += [m] * len(path.kind)
        self.forward += [task + each for each in path.forward]
        self.backward += [task + each for each in path.backward] or [-1] * len(chunks)
        for chunk, answer in zip(chunks, answers, strict=True):
            first = answer.candidates[0]
            self.duration.append(first.forward_ns)
            if path.backward:
                self.duration.append(first.backward_ns)
                if answer.split:
                    self.duration.append(first.weight_ns)
            self.activation.append(first.activation_bytes)
            self.weight_gradient.append(first.weight_gradient_bytes)
            self.candidates.append(answer.candidates)
            self.labels.append(PairLabel(chunk, microbatch, sub, answer.word))
            self.options.append(self._elsewhere(chunk, workload, answer.split))
        self.source += [task + each for each in path.source]
        self.target += [task + each for each in path.target]
        self.held += [0] * len(path.source)
        both = 2 if path.backward else 1
        for i in range(len(chunks) - 1):
            delay, crossing = self._delay(chunks[i], chunks[i + 1], workload)
            self.delay += [delay] * both
            self.crossing += [crossing] * both
        return _Passage(chunks, pair, workload)

    def _answers(self, m: int, chunks: Sequence[int], microbatch: int, workload: Workload) -> list[_Answer]:
        known, found = self.known_answers.setdefault(workload, {}), []
        trained = self.layout.has_backward(self.layout.modules[m].name)
        for chunk in chunks:
            like = self.like[chunk]
            if like not in known:
                base = self.chunk_costs(chunk, workload)[0]
                split = trained and self.form != "whole" and base.backward_weight_s is not None
                name = f"{self.layout.chunks[chunk].module}, chunk {chunk}, microbatch {microbatch}"
                known[like] = _Answer(*self._candidates(chunk, workload, split, name), split)
            found.append(known[like])
        return found

    def _path(self, m: int, chunks: tuple[int, ...], splits: tuple[bool, ...]) -> _Path:
        """What is the same for all parts of a module that pass these chunks."""
        known = self.paths.get((chunks, splits))
        if known is None:
            trained = self.layout.has_backward(self.layout.modules[m].name)
            known = self.paths[chunks, splits] = self._new_path(chunks, splits, trained)
        return known

    def _new_path(self, chunks: tuple[int, ...], splits: tuple[bool, ...], trained: bool) -> _Path:
        ranks = [self.layout.chunks[c].rank for c in chunks]
        runs = number_runs(ranks)
        # Forward segments of this part come first, then its backward ones, then its weight gradients.
        per_kind = runs[-1] + 1
        num_segments = per_kind * (1 + (2 if self.form != "whole" else 1) * trained)
        path = _Path([], [], [], [], [], [], [], [], num_segments)
        for position, (rank, split) in enumerate(zip(ranks, splits, strict=True)):
            kinds = [FORWARD]
            if trained:
                kinds += [INPUT_GRADIENT, WEIGHT_GRADIENT] if split else [BACKWARD]
                path.backward.append(len(path.kind) + 1)
            path.forward.append(len(path.kind))
            path.kind.extend(kinds)
            path.rank.extend([rank] * len(kinds))
            path.pair.extend([position] * len(kinds))
            path.segment.extend(k * per_kind + runs[position] for k in range(len(kinds)))
        for i in range(len(chunks) - 1):
            path.source.append(path.forward[i])
            path.target.append(path.forward[i + 1])
            if trained:
                path.source.append(path.backward[i + 1])
                path.target.append(path.backward[i])
        return path

    def _elsewhere(self, chunk: int, workload: Workload, split: bool) -> tuple[tuple[Candidate, ...], ...]:
        """Its candidates on each rank that it could be on; nothing where it could not, or ranks are alike."""
        here = self.layout.chunks[chunk]
        if not self.costs.slowness or not self._moves(here):
            return ()
        chunks = sorted(self.layout.chunks_of(here.module), key=lambda c: self.layout.chunks[c].rank)
        return tuple(self._candidates(c, workload, split, f"{here.module}, chunk {c}")[0] for c in chunks)

    def _candidates(self, chunk: int, workload: Workload, split: bool, name: str) -> tuple[tuple[Candidate, ...], str]:
        """What a chunk may do with a workload, with the word for the first of that; errors give ``name``."""
        options = self.chunk_costs(chunk, workload)
        # The same answer of the cost model is one object, and kept in `known_costs`.
        known = self.converted.get((id(options), split))
        if known is None:
            forms = (True, False) if split and self.form == "either" else (split,)
            made = tuple(_candidate(option, split, form, name) for option in options for form in forms)
            known = self.converted[id(options), split] = made, strategy_word(made[0].strategy, made[0].layers)
        return known

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
        source, target = above.pair + i, below.pair + j
        upper, lower = above.chunks[i], below.chunks[j]
        delay, crossing = self._delay(upper, lower, workload, stream)
        held = 0
        apart = self.layout.chunks[upper].rank != self.layout.chunks[lower].rank
        if not apart and (self.holds_streams if stream else self.hold_outputs and above is not below):
            held = self._num_bytes(upper, workload, stream)
        self._add_edge(self.forward[source], self.forward[target], delay, held, crossing)
        if self.backward[source] >= 0 and self.backward[target] >= 0:
            self._add_edge(self.backward[target], self.backward[source], delay, held if stream else 0, crossing)

    def _delay(self, upper: int, lower: int, workload: Workload, stream: str = "") -> tuple[int, tuple[int, ...]]:
        """Nanoseconds from one chunk to the next, and over each link, were they on other ranks, if they ever are."""
        above, below = self.layout.chunks[upper], self.layout.chunks[lower]
        apart = above.rank != below.rank
        if not apart and not self._moves(above) and not self._moves(below):
            return 0, (0,) * self.num_links
        crossing = self._crossing(self._num_bytes(upper, workload, stream))
        return (crossing[self.link[above.rank, below.rank]] if apart else 0), crossing

    def _crossing(self, num_bytes: int) -> tuple[int, ...]:
        """Nanoseconds of a message over each link."""
        if num_bytes not in self.known_ns:
            name = f"a message of {num_bytes} bytes"
            every = range(self.num_links)
            self.known_ns[num_bytes] = tuple(to_ns(self.costs.transfer_s(num_bytes, link), name) for link in every)
        return self.known_ns[num_bytes]

    def _num_bytes(self, chunk: int, workload: Workload, stream: str) -> int:
        if stream:
            return self.costs.stream_bytes(stream, workload)
        known = self.known_bytes.setdefault(workload, {})
        like = self.like[chunk]
        if like not in known:
            known[like] = self.costs.boundary_bytes(self.layout.chunks[chunk], workload)
        return known[like]

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
            static_bytes=rank_static_bytes(self.costs, self.layout),
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
