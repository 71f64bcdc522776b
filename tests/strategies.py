"""Random scheduling problems for property tests, and a plain, slow simulator to compare with.

`random_graph` makes one problem from a seed; `graphs()` is the hypothesis strategy over its options.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    NO_TASK,
    WEIGHT_GRADIENT,
    Candidate,
    Edges,
    PairLabel,
    Pairs,
    TaskGraph,
    Tasks,
    make_graph,
)
from pipeloom.timeline import Schedule


@dataclass(frozen=True)
class Shape:
    """What kind of problem `random_graph` makes."""

    num_ranks: int = 2
    num_microbatches: int = 2
    num_modules: int = 1
    max_segments: int = 1
    max_parts: int = 1
    split: str = "no"  # "no", "all" or "some"
    frozen: bool = False
    jitter: bool = False
    delays: bool = False
    edge_bytes: bool = False
    num_candidates: int = 0
    memory: float | None = None  # capacity: this times what the fullest microbatch needs; None: unlimited
    longest_ns: int = 9


@dataclass
class _Columns:
    kind: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    pair: list[int] = field(default_factory=list)
    pass_id: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int, int]] = field(default_factory=list)
    activation: list[int] = field(default_factory=list)
    gradient: list[int] = field(default_factory=list)
    labels: list[PairLabel] = field(default_factory=list)

    def add(self, kind: int, rank: int, duration: int, pair: int, pass_id: int, microbatch: int, module: int) -> int:
        for column, value in zip(
            (self.kind, self.rank, self.duration, self.pair, self.pass_id, self.microbatch, self.module),
            (kind, rank, duration, pair, pass_id, microbatch, module),
            strict=True,
        ):
            column.append(value)
        return len(self.kind) - 1


def random_graph(seed: int, shape: Shape) -> TaskGraph:
    """One problem: modules in a DAG, each a chain of segments over all ranks, or one rank per part."""
    rng = np.random.default_rng(seed)
    ranks = shape.num_ranks
    after = [
        sorted({int(rng.integers(0, m)) for _ in range(int(rng.integers(1, 3)))}) if m else []
        for m in range(shape.num_modules)
    ]
    frozen: list[bool] = []
    for m in range(shape.num_modules):
        may = shape.frozen and m + 1 < shape.num_modules and all(frozen[a] for a in after[m])
        frozen.append(bool(may and rng.random() < 0.6))
    segments = [int(rng.integers(1, shape.max_segments + 1)) for _ in range(shape.num_modules)]
    replicated = [bool(shape.num_modules > 1 and rng.random() < 0.15) for _ in range(shape.num_modules)]
    columns = _Columns()
    next_segment = 0

    def time() -> int:
        return int(rng.integers(0 if rng.random() < 0.05 else 1, shape.longest_ns + 1))

    def delay() -> int:
        return int(rng.integers(0, 4)) if shape.delays else 0

    for microbatch in range(shape.num_microbatches):
        ends: list[list[int]] = []
        chains: list[list[list[int]]] = []
        for m in range(shape.num_modules):
            least = 0 if shape.max_parts > 1 and m + 1 < shape.num_modules else 1
            num_parts = int(rng.integers(least, shape.max_parts + 1))
            sources = [t for a in after[m] for t in ends[a]]
            module_ends, module_chains = [], []
            for part in range(num_parts):
                home = int(rng.integers(0, ranks))
                places = (
                    [(k, home) for k in range(segments[m])]
                    if replicated[m]
                    else [(k, r) for k in range(segments[m]) for r in range(ranks)]
                )
                base = time()
                chain: list[int] = []
                for position, (k, r) in enumerate(places):
                    if r == 0 or replicated[m]:
                        next_segment += 1
                    duration = time() if shape.jitter else base
                    pair = len(columns.activation)
                    columns.activation.append(int(rng.integers(0 if rng.random() < 0.1 else 1, 10)))
                    columns.gradient.append(int(rng.integers(0, 10)))
                    columns.labels.append(PairLabel(m * 100 + k * ranks + r, microbatch, part))
                    task = columns.add(FORWARD, r, duration, pair, next_segment - 1, microbatch, m)
                    for source in sources if position == 0 else chain[-1:]:
                        columns.edges.append((source, task, delay(), 0))
                    chain.append(task)
                module_chains.append(chain)
                module_ends.append(chain[-1])
            # A module without parts in this microbatch passes its sources on.
            ends.append(module_ends or sources)
            chains.append(module_chains)
        done: list[list[int]] = [[] for _ in range(shape.num_modules)]
        for m in reversed(range(shape.num_modules)):
            followers = [t for n in range(m + 1, shape.num_modules) if m in after[n] for t in done[n]]
            if frozen[m]:
                continue
            split_module = shape.split == "all" or (shape.split == "some" and rng.random() < 0.5)
            module_done = []
            for chain in chains[m]:
                base_input, base_weight = time(), time()
                previous: list[int] = followers
                last_key: tuple[int, int] | None = None
                weights: list[int] = []
                numbers: dict[int, int] = {}
                for forward in reversed(chain):
                    key = (columns.pass_id[forward], 0)
                    if key != last_key:
                        next_segment += 1
                        last_key = key
                    numbers[forward] = next_segment - 1
                    duration = time() if shape.jitter else base_input
                    kind = INPUT_GRADIENT if split_module else BACKWARD
                    r, pair = columns.rank[forward], columns.pair[forward]
                    task = columns.add(kind, r, duration, pair, numbers[forward], microbatch, m)
                    for source in previous:
                        columns.edges.append((source, task, delay(), 0))
                    previous = [task]
                    if split_module:
                        weights.append(pair)
                if split_module:
                    by_segment: dict[int, int] = {}
                    for forward in reversed(chain):
                        key_segment = columns.pass_id[forward]
                        if key_segment not in by_segment:
                            next_segment += 1
                            by_segment[key_segment] = next_segment - 1
                        columns.add(
                            WEIGHT_GRADIENT,
                            columns.rank[forward],
                            time() if shape.jitter else base_weight,
                            columns.pair[forward],
                            by_segment[key_segment],
                            microbatch,
                            m,
                        )
                module_done.append(previous[0])
            done[m] = module_done or followers
    if shape.edge_bytes:
        _hold_across(rng, columns)
    static = rng.integers(0, 5, ranks)
    capacity = None
    candidates = _candidates(rng, columns, shape) if shape.num_candidates else None
    if shape.memory is not None:
        need: dict[tuple[int, int], int] = defaultdict(int)
        for task, kind in enumerate(columns.kind):
            pair = columns.pair[task]
            if kind == FORWARD:
                need[columns.microbatch[task], columns.rank[task]] += max(
                    columns.activation[pair], columns.gradient[pair]
                )
        for source, _, _, held in columns.edges:
            need[columns.microbatch[source], columns.rank[source]] += held
        fullest = [max((n for (_, r), n in need.items() if r == rank), default=0) for rank in range(ranks)]
        capacity = static + np.ceil(shape.memory * np.array(fullest)).astype(np.int64)
    sources, targets, delays, held = (
        (list(c) for c in zip(*columns.edges, strict=True)) if columns.edges else ([], [], [], [])
    )
    return make_graph(
        name=f"random-{seed}",
        num_ranks=ranks,
        tasks=Tasks(
            kind=columns.kind,
            rank=columns.rank,
            duration_ns=columns.duration,
            pair=columns.pair,
            pass_id=columns.pass_id,
            microbatch=columns.microbatch,
            module=columns.module,
            module_names=tuple(f"m{i}" for i in range(shape.num_modules)),
        ),
        pairs=Pairs(
            activation_bytes=columns.activation,
            weight_gradient_bytes=columns.gradient,
            candidates=candidates,
            labels=tuple(columns.labels),
        ),
        edges=Edges(source=sources, target=targets, delay_ns=delays, bytes=held),
        static_bytes=static,
        capacity_bytes=capacity,
    )


def _hold_across(rng: np.random.Generator, columns: _Columns) -> None:
    """Edges inside a rank that hold bytes, between forwards of one microbatch in the order they were made."""
    forwards = [t for t, kind in enumerate(columns.kind) if kind == FORWARD]
    for task in forwards:
        later = [
            t
            for t in forwards
            if t > task and columns.rank[t] == columns.rank[task] and columns.microbatch[t] == columns.microbatch[task]
        ]
        if later and rng.random() < 0.3:
            columns.edges.append((task, later[int(rng.integers(0, len(later)))], 0, int(rng.integers(1, 5))))


def _candidates(rng: np.random.Generator, columns: _Columns, shape: Shape) -> tuple[tuple[Candidate, ...], ...]:
    """The base, and leaner and slower ones."""
    parts: dict[int, dict[int, int]] = defaultdict(dict)
    for task, (kind, pair) in enumerate(zip(columns.kind, columns.pair, strict=True)):
        parts[pair][kind] = task
    answer = []
    for pair, tasks in sorted(parts.items()):
        duration: dict[int, int] = {kind: columns.duration[task] for kind, task in tasks.items()}
        options = [
            Candidate(
                "keep",
                duration[FORWARD],
                duration.get(BACKWARD, duration.get(INPUT_GRADIENT, 0)),
                duration.get(WEIGHT_GRADIENT, 0),
                columns.activation[pair],
                columns.gradient[pair],
            )
        ]
        for _ in range(int(rng.integers(0, shape.num_candidates))):
            last = options[-1]
            options.append(
                last._replace(
                    strategy="recompute",
                    backward_ns=last.backward_ns + int(rng.integers(0, 4)),
                    activation_bytes=int(rng.integers(0, last.activation_bytes + 1)),
                    weight_gradient_bytes=int(rng.integers(0, last.weight_gradient_bytes + 1)),
                )
            )
        answer.append(tuple(options))
    return tuple(answer)


@st.composite
def graphs(draw: st.DrawFn, **fixed: Any) -> TaskGraph:
    """Problems of any shape, or with some of `Shape`'s fields fixed."""
    drawn: dict[str, Any] = {
        "num_ranks": draw(st.integers(1, 4)),
        "num_microbatches": draw(st.integers(1, 4)),
        "num_modules": draw(st.integers(1, 3)),
        "max_segments": draw(st.integers(1, 2)),
        "max_parts": draw(st.integers(1, 3)),
        "split": draw(st.sampled_from(["no", "no", "some", "all"])),
        "frozen": draw(st.booleans()),
        "jitter": draw(st.booleans()),
        "delays": draw(st.booleans()),
        "edge_bytes": draw(st.booleans()),
        "num_candidates": draw(st.sampled_from([0, 0, 3])),
        "memory": draw(st.sampled_from([None, 1.0, 1.3, 2.5])),
        "longest_ns": draw(st.sampled_from([3, 9, 1000])),
    }
    return random_graph(draw(st.integers(0, 2**31)), replace(Shape(**drawn), **fixed))


def random_order(graph: TaskGraph, rng: np.random.Generator) -> Schedule:
    """An order that respects all edges, memory aside: tasks of a random topological order, rank by rank."""
    waiting = np.diff(graph.predecessor_start).tolist()
    ready = [t for t, n in enumerate(waiting) if n == 0]
    order: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    while ready:
        task = ready.pop(int(rng.integers(0, len(ready))))
        order[graph.rank[task]].append(task)
        for e in range(graph.successor_start[task], graph.successor_start[task + 1]):
            waiting[graph.successor[e]] -= 1
            if waiting[graph.successor[e]] == 0:
                ready.append(int(graph.successor[e]))
    candidate = None
    if graph.candidates is not None:
        candidate = np.array([int(rng.integers(0, len(options))) for options in graph.candidates])
    return Schedule(tuple(np.array(tasks, np.int64) for tasks in order), candidate, "random")


def reference_simulation(graph: TaskGraph, schedule: Schedule) -> tuple[list[int], list[int]] | None:
    """Starts by plain fixed-point iteration, and peaks by summing every span at every moment; None: deadlock.

    Peaks are those of half-open spans, so tasks that last no time do not show.
    """
    chosen = graph.with_candidates(schedule.candidate)
    needs: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for s, t, d in zip(graph.edge_source, graph.edge_target, graph.edge_delay_ns, strict=True):
        needs[int(t)].append((int(s), int(d)))
    for f, b, w in zip(graph.forward_of, graph.backward_of, graph.weight_of, strict=True):
        if b != NO_TASK:
            needs[int(b)].append((int(f), 0))
        if w != NO_TASK:
            needs[int(w)].append((int(b), 0))
    for tasks in schedule.order:
        for a, b in pairwise(tasks.tolist()):
            needs[int(b)].append((int(a), 0))
    length = chosen.duration_ns.tolist()
    start = [0] * graph.num_tasks
    for _ in range(graph.num_tasks + 1):
        new = [max((start[s] + length[s] + d for s, d in needs[t]), default=0) for t in range(graph.num_tasks)]
        if new == start:
            break
        start = new
    else:
        return None
    if not _acyclic(needs, graph.num_tasks):
        return None
    end = [a + b for a, b in zip(start, length, strict=True)]
    peaks = []
    for rank in range(graph.num_ranks):
        spans = []
        for pair in range(graph.num_pairs):
            f, b, w = (int(x[pair]) for x in (graph.forward_of, graph.backward_of, graph.weight_of))
            if graph.rank[f] != rank:
                continue
            spans.append((start[f], end[b] if b != NO_TASK else end[f], int(chosen.activation_bytes[pair])))
            if w != NO_TASK:
                spans.append((end[b], end[w], int(chosen.weight_gradient_bytes[pair])))
        for s, t, held in zip(graph.edge_source, graph.edge_target, graph.edge_bytes, strict=True):
            if graph.rank[s] == rank:
                spans.append((end[s], end[t], int(held)))
        moments = {a for a, _, _ in spans}
        static = int(graph.static_bytes[rank])
        peaks.append(static + max((sum(n for a, b, n in spans if a <= at < b) for at in moments), default=0))
    return start, peaks


def _acyclic(needs: dict[int, list[tuple[int, int]]], num_tasks: int) -> bool:
    """Zero-length circles pass the fixed point, so they are looked for apart."""
    done: set[int] = set()
    moved = True
    while moved:
        moved = False
        for task in range(num_tasks):
            if task not in done and all(s in done for s, _ in needs[task]):
                done.add(task)
                moved = True
    return len(done) == num_tasks


def with_strategies(graph):
    """Each pair kept, half kept, or recomputed, which takes its forward once more."""
    rows = []
    for pair in range(graph.num_pairs):
        ahead = int(graph.duration_ns[graph.forward_of[pair]])
        back = int(graph.duration_ns[graph.backward_of[pair]])
        held = int(graph.activation_bytes[pair])
        rows.append(
            (
                Candidate("keep", ahead, back, 0, held, held),
                Candidate("half", ahead, back + ahead // 2, 0, held // 2, held // 2),
                Candidate("recompute", ahead, back + ahead, 0, held // 10, held // 10),
            )
        )
    return replace(graph, candidates=tuple(rows))
