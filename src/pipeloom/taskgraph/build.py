"""Build the TaskGraph of one iteration from layout, packing and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeloom.cost import CostModel, rank_static_bytes, slowness_of
from pipeloom.cost.encoder_dp import costs_under_layout
from pipeloom.limits import MAX_TASKS
from pipeloom.packing import Packing, SubMicrobatch, pieces
from pipeloom.spec import Layout, StreamEnd, Workload
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.chunk_costs import BackwardForm, ChunkCosts
from pipeloom.taskgraph.columns import Edges, IntArray, PairLabel, Pairs, Tasks
from pipeloom.taskgraph.graph import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, TaskGraph, make_graph
from pipeloom.totals import check_work, summable

Capacity = int | IntArray | None


def build_graph(
    layout: Layout,
    packing: Packing,
    costs: CostModel,
    *,
    name: str = "iteration",
    capacity_bytes: Capacity = None,
    backward: BackwardForm = "whole",
    hold_outputs: bool = False,
) -> TaskGraph:
    """Make the tasks, pairs and edges of one iteration.

    Within a module, each sub-microbatch passes its chunks in order, forward and back. At a module boundary, a
    sub-microbatch depends on all sub-microbatches of the source module that hold rows of it
    (`pipeloom.packing.pieces`). A module without input in a microbatch (text only) has no tasks there.

    Replicated modules run each sub-microbatch on one rank: of the ranks that can hold its activations, the one with the
    least work so far, pipelined modules included. `build_assignable` makes a graph for searches that improve this
    assignment.

    Parameters
    ----------
    capacity_bytes : int, array of shape (num_ranks,), or None
        Memory of each rank; None: no limit.
    backward : str
        ``split`` makes I and W of each backward for which the costs have separate times. ``either`` also offers every
        strategy of a split pair with a whole backward, that is, with a W that takes no time and holds nothing.
    hold_outputs : bool
        Count the memory of a module's output where a module that reads it is on the same rank. It is held from the
        end of the producer to the end of the consumer, as with embeddings computed ahead.

    Returns
    -------
    TaskGraph
        With ``labels``, so that schedules of it can be lowered.

    Raises
    ------
    InputError
        Sub-microbatches do not match at a module boundary, or times or sizes are too large to be summed.
    """
    chunk_costs = ChunkCosts(layout, costs_under_layout(costs, layout), backward)
    return _Builder(layout, packing, chunk_costs, capacity_bytes, hold_outputs).build(name)


def build_assignable(
    layout: Layout,
    packing: Packing,
    costs: CostModel,
    *,
    name: str = "iteration",
    capacity_bytes: Capacity = None,
    backward: BackwardForm = "whole",
) -> Assignable:
    """Make the graph of `build_graph` with the data that another assignment of replicated modules needs."""
    chunk_costs = ChunkCosts(layout, costs_under_layout(costs, layout), backward)
    builder = _Builder(layout, packing, chunk_costs, capacity_bytes, hold_outputs=False)
    graph = builder.build(name)
    homes = tuple(
        tuple(sorted(layout.chunks_of(module.name), key=lambda c: layout.chunks[c].rank))
        if module.on_ranks == "replicated"
        else ()
        for module in layout.modules
    )
    options = tuple(builder.pairs.options) if any(builder.pairs.options) else ()
    slowness = np.array([slowness_of(chunk_costs.costs, rank) for rank in range(layout.num_ranks)])
    crossing = np.array(builder.edges.crossing, dtype=np.int64).reshape(-1, chunk_costs.num_links)
    return Assignable(graph, homes, crossing, chunk_costs.link, slowness, options)


class _PassTemplate(NamedTuple):
    """Columns shared by all passes through the same chunks with the same split backwards.

    Tasks, pairs and segments are numbered from the first of the pass. Edges alternate between forward and backward.
    """

    kind: list[int]
    rank: list[int]
    pair: list[int]
    pass_id: list[int]
    forward: list[int]
    backward: list[int]
    """Backward task of every pair; empty without backwards."""
    source: list[int]
    target: list[int]
    num_passes: int


class _Pass(NamedTuple):
    """Pairs of one sub-microbatch of one module, one per chunk, numbered from ``pair``."""

    chunks: tuple[int, ...]
    pair: int
    workload: Workload


class _Ends(NamedTuple):
    """Two connected chunks, each by its module and its index among that module's chunks (-1: the last)."""

    source: str
    give: int
    module: str
    take: int
    stream: str = ""


@dataclass
class _TaskColumns:
    kind: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    pair: list[int] = field(default_factory=list)
    pass_id: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)
    num_passes: int = 0


@dataclass
class _PairColumns:
    activation: list[int] = field(default_factory=list)
    weight_gradient: list[int] = field(default_factory=list)
    candidates: list[tuple[Candidate, ...]] = field(default_factory=list)
    options: list[tuple[tuple[Candidate, ...], ...]] = field(default_factory=list)
    """Candidates by rank; see `ChunkCosts.options_by_rank`."""
    labels: list[PairLabel] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


@dataclass
class _EdgeColumns:
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    delay: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    crossing: list[tuple[int, ...]] = field(default_factory=list)
    """Delay over each link, for ends on different ranks."""

    def add(self, source: int, target: int, delay: int, held: int, crossing: tuple[int, ...]) -> None:
        self.source.append(source)
        self.target.append(target)
        self.delay.append(delay)
        self.held.append(held)
        self.crossing.append(crossing)


class _Builder:
    """Columns of one iteration, filled microbatch by microbatch."""

    def __init__(
        self, layout: Layout, packing: Packing, costs: ChunkCosts, capacity_bytes: Capacity, hold_outputs: bool
    ) -> None:
        self.layout, self.packing, self.costs, self.hold_outputs = layout, packing, costs, hold_outputs
        # Streams are held until the last consumer has run, if memory is limited and chunks stay on their ranks.
        stay = all(module.on_ranks == "pipelined" for module in layout.modules)
        self.hold_streams = hold_outputs or (capacity_bytes is not None and stay)
        self.capacity_bytes = None if capacity_bytes is None else np.full(layout.num_ranks, capacity_bytes, np.int64)
        self.static_bytes = rank_static_bytes(costs.costs, layout)
        self.tasks, self.pairs, self.edges = _TaskColumns(), _PairColumns(), _EdgeColumns()
        self.templates: dict[tuple[tuple[int, ...], tuple[bool, ...]], _PassTemplate] = {}
        self.load_s = [0.0] * layout.num_ranks
        """Work of every rank: all of the pipelined modules, and the replicated work assigned so far."""

    @cached_property
    def emitters(self) -> dict[str, tuple[str, int]]:
        """Module and layer that emit each stream."""
        return {end.stream: (m.name, end.layer) for m in self.layout.modules for end in m.emits}

    def build(self, name: str) -> TaskGraph:
        """Add all microbatches and make the graph."""
        modules = self.layout.modules
        chunks = [len(self.layout.chunks_of(m.name)) if m.on_ranks == "pipelined" else 1 for m in modules]
        every = ((n, parts) for one in self.packing.microbatches for n, parts in zip(chunks, one.parts, strict=True))
        tasks = 2 * sum(n * len(parts) for n, parts in every)
        check_work("packing", tasks, "tasks", MAX_TASKS, "give smaller batches, or a layout of fewer chunks")
        if any(module.on_ranks == "replicated" for module in modules):
            self._add_pipelined_load()
        for microbatch in range(len(self.packing.microbatches)):
            self._add_microbatch(microbatch)
        return self._make_graph(name)

    def _add_pipelined_load(self) -> None:
        for m, module in enumerate(self.layout.modules):
            if module.on_ranks == "replicated":
                continue
            for microbatch in self.packing.microbatches:
                for part in microbatch.parts[m]:
                    for chunk in self.layout.chunks_of(module.name):
                        self.load_s[self.layout.chunks[chunk].rank] += self.costs.seconds(chunk, part.workload)

    def _chunks(self, m: int, workload: Workload) -> tuple[int, ...]:
        """Return all chunks of a pipelined module, or the chunk of a replicated one on the least loaded rank.

        Ranks that cannot hold the activations under any strategy are skipped, unless no rank can.
        """
        module = self.layout.modules[m]
        chunks = self.layout.chunks_of(module.name)
        if module.on_ranks == "pipelined":
            return chunks
        if self.capacity_bytes is not None:
            least = min(each.activation_bytes for each in self.costs.chunk_costs(chunks[0], workload))
            holds = self.capacity_bytes - self.static_bytes >= least
            chunks = tuple(c for c in chunks if holds[self.layout.chunks[c].rank]) or chunks
        own = {c: self.costs.seconds(c, workload) if self.costs.costs.slowness else 0.0 for c in chunks}
        chunk = min(chunks, key=lambda c: self.load_s[self.layout.chunks[c].rank] + own[c])
        self.load_s[self.layout.chunks[chunk].rank] += self.costs.seconds(chunk, workload)
        return (chunk,)

    def _add_microbatch(self, microbatch: int) -> None:
        """Add all modules of a microbatch, in topological order."""
        passes: dict[str, list[_Pass]] = {}
        for m, module in enumerate(self.layout.modules):
            parts = self.packing.microbatches[microbatch].parts[m]
            passes[module.name] = [self._add_pass(microbatch, m, sub, part) for sub, part in enumerate(parts)]
            for source in module.after:
                ends = _Ends(source, -1, module.name, 0)
                self._connect(passes[source], passes[module.name], microbatch, ends)
            for end in module.takes:
                self._add_stream(passes, microbatch, module.name, end)

    def _add_pass(self, microbatch: int, m: int, sub: int, part: SubMicrobatch) -> _Pass:
        chunks, workload = self._chunks(m, part.workload), part.workload
        trained = self.layout.has_backward(self.layout.modules[m].name)
        costs = self.costs.pair_costs(chunks, microbatch, workload, trained)
        template = self._template(chunks, tuple(each.split for each in costs), trained)
        tasks, pairs = self.tasks, self.pairs
        pair, task, pass_id = len(pairs.activation), len(tasks.kind), tasks.num_passes
        tasks.num_passes += template.num_passes
        tasks.kind += template.kind
        tasks.rank += template.rank
        tasks.pair += [pair + each for each in template.pair]
        tasks.pass_id += [pass_id + each for each in template.pass_id]
        tasks.microbatch += [microbatch] * len(template.kind)
        tasks.module += [m] * len(template.kind)
        pairs.forward += [task + each for each in template.forward]
        pairs.backward += [task + each for each in template.backward] or [-1] * len(chunks)
        for chunk, each in zip(chunks, costs, strict=True):
            first = each.candidates[0]
            tasks.duration.append(first.forward_ns)
            if trained:
                tasks.duration.append(first.backward_ns)
            if trained and each.split:
                tasks.duration.append(first.weight_ns)
            pairs.activation.append(first.activation_bytes)
            pairs.weight_gradient.append(first.weight_gradient_bytes)
            pairs.candidates.append(each.candidates)
            pairs.labels.append(PairLabel(chunk, microbatch, sub, each.word))
            pairs.options.append(self.costs.options_by_rank(chunk, workload, each.split))
        self.edges.source += [task + each for each in template.source]
        self.edges.target += [task + each for each in template.target]
        self.edges.held += [0] * len(template.source)
        for i in range(len(chunks) - 1):
            delay, crossing = self.costs.delay_ns(chunks[i], chunks[i + 1], workload)
            self.edges.delay += [delay] * (1 + trained)
            self.edges.crossing += [crossing] * (1 + trained)
        return _Pass(chunks, pair, workload)

    def _template(self, chunks: tuple[int, ...], splits: tuple[bool, ...], trained: bool) -> _PassTemplate:
        if (chunks, splits) in self.templates:
            return self.templates[chunks, splits]
        ranks = [self.layout.chunks[c].rank for c in chunks]
        runs = number_runs(ranks)
        # Forward segments come first, then those of backwards, then those of weight gradients.
        per_kind = runs[-1] + 1
        num_passes = per_kind * (1 + (2 if self.costs.form != "whole" else 1) * trained)
        template = self.templates[chunks, splits] = _PassTemplate([], [], [], [], [], [], [], [], num_passes)
        for position, (rank, split) in enumerate(zip(ranks, splits, strict=True)):
            kinds = [FORWARD]
            if trained:
                kinds += [INPUT_GRADIENT, WEIGHT_GRADIENT] if split else [BACKWARD]
                template.backward.append(len(template.kind) + 1)
            template.forward.append(len(template.kind))
            template.kind.extend(kinds)
            template.rank.extend([rank] * len(kinds))
            template.pair.extend([position] * len(kinds))
            template.pass_id.extend(k * per_kind + runs[position] for k in range(len(kinds)))
        for i in range(len(chunks) - 1):
            template.source.append(template.forward[i])
            template.target.append(template.forward[i + 1])
            if trained:
                template.source.append(template.backward[i + 1])
                template.target.append(template.backward[i])
        return template

    def _add_stream(self, passes: dict[str, list[_Pass]], microbatch: int, module: str, end: StreamEnd) -> None:
        """Connect the chunk that emits a stream with a chunk that takes it, unless both are the same."""
        source, layer = self.emitters[end.stream]
        chunk = self._chunk_index(module, end.layer)
        earlier = (each.layer for each in self.layout.module(module).takes if each.stream == end.stream)
        if any(self._chunk_index(module, each) == chunk for each in earlier if each < end.layer):
            # The chunk already takes the stream for an earlier layer.
            return
        ends = _Ends(source, self._chunk_index(source, layer), module, chunk, end.stream)
        if (ends.source, ends.give) != (ends.module, ends.take):
            self._connect(passes[source], passes[module], microbatch, ends)

    def _chunk_index(self, module: str, layer: int) -> int:
        """Return the index of the chunk with a layer within its pass; 0 in a replicated module."""
        if self.layout.module(module).on_ranks == "replicated":
            return 0
        chunks = self.layout.chunks_of(module)
        return next(i for i, c in enumerate(chunks) if layer <= self.layout.chunks[c].layers[1])

    def _connect(self, above: list[_Pass], below: list[_Pass], microbatch: int, ends: _Ends) -> None:
        """Connect the passes on both sides of a module boundary, or at both ends of a stream."""
        number = self.packing.modules.index
        for piece in pieces(self.packing, microbatch, number(ends.source), number(ends.module)):
            up = above[piece.above]
            lengths = up.workload.lengths[piece.first : piece.first + piece.count]
            workload = up.workload if piece.whole else Workload(lengths)
            give = len(up.chunks) - 1 if ends.give < 0 else ends.give
            self._add_edges(up, give, below[piece.below], ends.take, workload, ends.stream)

    def _add_edges(self, above: _Pass, i: int, below: _Pass, j: int, workload: Workload, stream: str) -> None:
        """Connect two pairs: activation forward, gradient back, each after its transfer between ranks."""
        source, target = above.pair + i, below.pair + j
        upper, lower = above.chunks[i], below.chunks[j]
        delay, crossing = self.costs.delay_ns(upper, lower, workload, stream)
        held = 0
        same_rank = self.layout.chunks[upper].rank == self.layout.chunks[lower].rank
        if same_rank and (self.hold_streams if stream else self.hold_outputs and above is not below):
            held = self.costs.num_bytes(upper, workload, stream)
        forward, backward = self.pairs.forward, self.pairs.backward
        self.edges.add(forward[source], forward[target], delay, held, crossing)
        if backward[source] >= 0 and backward[target] >= 0:
            self.edges.add(backward[target], backward[source], delay, held if stream else 0, crossing)

    def _make_graph(self, name: str) -> TaskGraph:
        tasks, pairs, edges, num_ranks = self.tasks, self.pairs, self.edges, self.layout.num_ranks
        # Another assignment of replicated modules may use any of these delays, so all must be summable.
        summable("edges.delay_s", [max(each) for each in edges.crossing])
        # Close the gaps in segment numbers, which W segments of whole backwards leave.
        pass_id = np.unique(np.array(tasks.pass_id, dtype=np.int64), return_inverse=True)[1]
        # Only candidates have the bytes that a strategy holds on the host.
        choices = any(len(options) > 1 or options[0].host_bytes for options in pairs.candidates)
        return make_graph(
            name=name,
            num_ranks=num_ranks,
            tasks=Tasks(
                kind=tasks.kind,
                rank=tasks.rank,
                duration_ns=tasks.duration,
                pair=tasks.pair,
                pass_id=pass_id,
                microbatch=tasks.microbatch,
                module=tasks.module,
                module_names=tuple(m.name for m in self.layout.modules),
            ),
            pairs=Pairs(
                activation_bytes=pairs.activation,
                weight_gradient_bytes=pairs.weight_gradient,
                candidates=tuple(pairs.candidates) if choices else None,
                labels=tuple(pairs.labels),
            ),
            edges=Edges(
                source=edges.source,
                target=edges.target,
                delay_ns=edges.delay,
                bytes=edges.held if any(edges.held) else None,
            ),
            static_bytes=self.static_bytes,
            capacity_bytes=self.capacity_bytes,
        )


def number_runs(ranks: Sequence[int]) -> list[int]:
    """Number the maximal runs of consecutive chunks in which no rank occurs twice: the segments of a pass."""
    numbers, seen, run = [], set[int](), 0
    for rank in ranks:
        if rank in seen:
            run += 1
            seen = set()
        seen.add(rank)
        numbers.append(run)
    return numbers
