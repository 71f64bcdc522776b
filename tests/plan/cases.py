"""Random iterations: model, layout, packing, costs, graph and a random valid schedule, all from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pipeloom.cost import StrategyCost
from pipeloom.packing import Packing
from pipeloom.packing.pack import PackingSpec, pack
from pipeloom.plan import ExecutionPlan, Unit, boundary_shapes, lower, make_routes
from pipeloom.spec import (
    Batch,
    Chunk,
    EmittedStream,
    LayerSpec,
    Layout,
    ModelSpec,
    ModuleLayout,
    ModuleSpec,
    Sample,
    StreamEnd,
    TensorShape,
    Workload,
)
from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    NO_TASK,
    WEIGHT_GRADIENT,
    Edges,
    PairLabel,
    Pairs,
    TaskGraph,
    Tasks,
    build_graph,
    make_graph,
)
from pipeloom.timeline import Schedule, Timeline, random_schedule

WIDTH = 3
DTYPE = "float64"

EVERY_STRATEGY = ("keep", "recompute", "selective", "offload", "mixed")
"""``mixed`` is one of the others for every layer."""

# Name, what it reads, after which; the last is the one with the loss.
SHAPES_OF_MODELS: tuple[tuple[tuple[str, str, tuple[str, ...]], ...], ...] = (
    (("lm", "sequence", ()),),
    (("vision", "images", ()), ("lm", "sequence", ("vision",))),
    (("vision", "images", ()), ("audio", "audio", ()), ("lm", "sequence", ("vision", "audio"))),
    (("vision", "images", ()), ("adapter", "images", ("vision",)), ("lm", "sequence", ("adapter",))),
    (("vision", "images", ()), ("lm", "sequence", ("vision",)), ("decoder", "sequence", ("lm",))),
    (("vision", "images", ()), ("lm", "sequence", ("vision",)), ("decoder", "sequence", ("vision", "lm"))),
    (("text", "text", ()), ("lm", "sequence", ("text",))),
    (("vision", "images", ()), ("lm", "sequence", ("vision",)), ("painter", "images", ("lm",))),
    (("text", "text", ()), ("painter", "images", ("text",))),
)


@dataclass(frozen=True)
class RandomCosts:
    """Costs that depend on chunk and workload in no systematic way, but always in the same way."""

    seed: int
    split: bool
    strategies: tuple[str, ...] = ("keep", "recompute")
    slowness: tuple[float, ...] = ()

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        rng = random.Random(f"{self.seed} {chunk} {workload}")
        forward, inputs, weights = (rng.randint(0, 5) * 1e-3 for _ in range(3))
        return tuple(
            StrategyCost(
                strategy=strategy,
                forward_s=forward,
                backward_s=inputs + weights,
                activation_bytes=rng.randint(1, 100),
                backward_input_s=inputs if self.split else None,
                backward_weight_s=weights if self.split else None,
                layers=tuple(rng.choice(EVERY_STRATEGY[:-1]) for _ in range(chunk.num_layers))
                if strategy == "mixed"
                else (),
            )
            for strategy in self.strategies
        )

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        return 8

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        return 8

    def link_between(self, first: int, second: int) -> int:
        return 0

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        return 1e-3 * random.Random(f"{self.seed} {num_bytes}").randint(0, 2)

    def static_bytes(self, chunk: Chunk) -> int:
        return 0


@dataclass(frozen=True)
class Case:
    """One random iteration."""

    model: ModelSpec
    layout: Layout
    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline

    @property
    def plan(self) -> ExecutionPlan:
        return self.lowered()

    @property
    def serial_plan(self) -> ExecutionPlan:
        """For ranks with one communicator each."""
        return self.lowered(single_communicator=True)

    def lowered(self, *, single_communicator: bool = False) -> ExecutionPlan:
        return lower(
            self.graph,
            self.schedule,
            self.timeline,
            self.layout,
            self.packing,
            boundary_shapes(self.model, self.layout),
            single_communicator=single_communicator,
        )

    def at_any_times(self, seed: int) -> Case:
        """The same with planned times that nothing could keep to: plans must be legal whatever those say."""
        rng = np.random.default_rng(seed)
        start = rng.integers(0, 1000, len(self.timeline.start_ns))
        end = start + rng.integers(0, 300, len(start))
        return replace(self, timeline=replace(self.timeline, start_ns=start, end_ns=end))


def random_model(rng: random.Random) -> ModelSpec:
    """A DAG of one to three modules of one to five layers."""
    modules = rng.choice(SHAPES_OF_MODELS)
    frozen = {name: rng.random() < 0.25 for name, _, _ in modules[:-1]}
    return ModelSpec(
        "random",
        tuple(
            ModuleSpec(
                name=name,
                reads=reads,  # type: ignore[arg-type]
                layers=tuple(
                    LayerSpec(f"{name}{i}", TensorShape(("tokens", WIDTH), DTYPE)) for i in range(rng.randint(1, 5))
                ),
                after=after,
                frozen=frozen.get(name, False),
            )
            for name, reads, after in modules
        ),
    )


def with_streams(rng: random.Random, model: ModelSpec) -> ModelSpec:
    """The model with up to four streams, each from any layer to any later ones."""
    at = [(m, layer) for m, module in enumerate(model.modules) for layer in range(len(module.flat_layers))]
    emits: list[list[EmittedStream]] = [[] for _ in model.modules]
    takes: list[list[StreamEnd]] = [[] for _ in model.modules]
    for number in range(rng.randint(1, 4)):
        source = rng.randrange(len(at))
        later = at[source + 1 :]
        if not later:
            continue
        m, layer = at[source]
        emits[m].append(EmittedStream(f"s{number}", layer, TensorShape(("tokens", WIDTH), DTYPE)))
        for below, taking in rng.sample(later, rng.randint(1, min(3, len(later)))):
            takes[below].append(StreamEnd(f"s{number}", taking))
    modules = zip(model.modules, emits, takes, strict=True)
    return msgspec.structs.replace(
        model,
        modules=tuple(
            msgspec.structs.replace(m, emits=tuple(given), takes=tuple(taken)) for m, given, taken in modules
        ),
    )


def random_layout(rng: random.Random, model: ModelSpec, num_ranks: int, replicated: tuple[str, ...] = ()) -> Layout:
    """Cut every module anywhere and put the chunks on any ranks, or the whole module on all of them."""
    chunks: list[Chunk] = []
    for module in model.modules:
        num_layers = len(module.flat_layers)
        if module.name in replicated:
            chunks += [Chunk(module.name, (0, num_layers - 1), rank) for rank in range(num_ranks)]
            continue
        cuts = sorted(rng.sample(range(1, num_layers), rng.randint(0, num_layers - 1)))
        chunks += [
            Chunk(module.name, (begin, end - 1), rng.randrange(num_ranks))
            for begin, end in zip([0, *cuts], [*cuts, num_layers], strict=True)
        ]

    return Layout(
        num_ranks=num_ranks,
        modules=tuple(
            ModuleLayout(
                name=module.name,
                after=module.after,
                frozen=module.frozen,
                emits=tuple(StreamEnd(end.stream, end.layer) for end in module.emits),
                takes=module.takes,
                sub_microbatch=rng.choice((None, None, 1, 2, 3)) if len(model.modules) > 1 else None,
                on_ranks="replicated" if module.name in replicated else "pipelined",
            )
            for module in model.modules
        ),
        chunks=tuple(chunks),
    )


def random_batch(rng: random.Random, num_samples: int | None = None) -> Batch:
    """One to six samples; about half of them text only."""
    drawn = [
        Sample(
            id=str(i),
            text_tokens=rng.randint(1, 3),
            image_tokens=tuple(rng.randint(1, 3) for _ in range(rng.choice((0, 0, 1, 2, 4)))),
        )
        for i in range(num_samples or rng.randint(1, 6))
    ]
    return Batch(tuple(msgspec.structs.replace(s, audio_seconds=random_audio(s)) for s in drawn))


def random_audio(sample: Sample) -> tuple[float, ...]:
    """Up to three recordings of one to four frames, where the sample has few images."""
    rng = random.Random(repr(sample))
    count = rng.choice((0, 0, 1, 3)) if sum(sample.image_tokens) <= 6 else 0
    return tuple(rng.randint(1, 4) / 50 for _ in range(count))


def random_case(
    seed: int,
    num_ranks: int | None = None,
    *,
    split: bool | None = None,
    model: ModelSpec | None = None,
    strategies: tuple[str, ...] = ("keep", "recompute"),
    replicated: tuple[str, ...] = (),
) -> Case:
    """Everything of one iteration from a seed."""
    rng = random.Random(seed)
    model = model or random_model(rng)
    layout = random_layout(rng, model, num_ranks or rng.randint(1, 4), replicated)
    packing = pack(random_batch(rng), model, layout, PackingSpec(token_budget=rng.choice((15, 25, 60))))
    is_split = rng.random() < 0.5 if split is None else split
    costs = RandomCosts(seed, is_split, strategies)
    if replicated:
        graph = graph_of_units(layout, packing, assigned_units(rng, layout, packing), costs)
    else:
        graph = build_graph(layout, packing, costs, backward="split" if is_split else "whole")
    schedule = random_schedule(rng, graph)
    chosen = graph.with_candidates(schedule.candidate)
    return Case(model, layout, packing, graph, schedule, earliest(chosen, schedule))


def assigned_units(rng: random.Random, layout: Layout, packing: Packing) -> list[Unit]:
    """All units of an iteration; the parts of replicated modules are dealt out to the ranks at random."""
    units = []
    for microbatch in range(len(packing.microbatches)):
        for module in layout.modules:
            for sub in range(len(packing.parts_of(microbatch, module.name))):
                chunks = layout.chunks_of(module.name)
                if module.on_ranks == "replicated":
                    chunks = (rng.choice(chunks),)
                units += [Unit(chunk, microbatch, sub) for chunk in chunks]
    return units


def graph_of_units(layout: Layout, packing: Packing, units: list[Unit], costs: RandomCosts) -> TaskGraph:
    """A graph for any units, replicated modules too, whose tasks are segments of their own."""
    kind: list[int] = []
    pair: list[int] = []
    of_unit: dict[tuple[int, Unit], int] = {}
    for number, unit in enumerate(units):
        kinds = [FORWARD]
        if layout.has_backward(layout.chunks[unit.chunk].module):
            kinds += [INPUT_GRADIENT, WEIGHT_GRADIENT] if costs.split else [BACKWARD]
        for k in kinds:
            if k != WEIGHT_GRADIENT:
                of_unit[FORWARD if k == FORWARD else BACKWARD, unit] = len(kind)
            kind.append(k)
            pair.append(number)
    edges = []
    for transfer in make_routes(layout, packing, units).transfers:
        edges.append((of_unit[FORWARD, transfer.producer], of_unit[FORWARD, transfer.consumer]))
        if transfer.gradient:
            edges.append((of_unit[BACKWARD, transfer.consumer], of_unit[BACKWARD, transfer.producer]))
    chunk = [layout.chunks[units[p].chunk] for p in pair]
    names = tuple(module.name for module in layout.modules)
    rng = random.Random(costs.seed)
    return make_graph(
        name="replicated",
        num_ranks=layout.num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=[c.rank for c in chunk],
            duration_ns=[rng.randint(0, 5) for _ in kind],
            pair=pair,
            pass_id=range(len(kind)),
            microbatch=[units[p].microbatch for p in pair],
            module=[names.index(c.module) for c in chunk],
            module_names=names,
        ),
        pairs=Pairs(
            activation_bytes=[1] * len(units),
            weight_gradient_bytes=None,
            labels=tuple(PairLabel(*unit) for unit in units),
        ),
        edges=Edges(source=[a for a, _ in edges], target=[b for _, b in edges], delay_ns=[0] * len(edges)),
    )


def in_order(graph: TaskGraph, schedule: Schedule) -> Schedule:
    """The schedule of a chain with its microbatches renumbered, so that they reach the last chunk in order."""
    assert graph.labels is not None
    last = max(label.chunk for label in graph.labels)
    name_of = {}
    for task in map(graph.task, range(graph.num_tasks)):
        label = graph.labels[task.pair]
        name_of[task.number] = (label.chunk, label.microbatch, task.kind)
    reached = [name_of[t][1] for order in schedule.order for t in order.tolist() if name_of[t][::2] == (last, "F")]
    new = {microbatch: number for number, microbatch in enumerate(reached)}
    task_of = {name: task for task, name in name_of.items()}

    def renumbered(task: int) -> int:
        chunk, microbatch, kind = name_of[task]
        return task_of[chunk, new[microbatch], kind]

    orders = tuple(np.array([renumbered(t) for t in order.tolist()], dtype=np.int64) for order in schedule.order)
    return Schedule(orders, schedule.candidate)


def earliest(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Earliest-start times, by relaxation until nothing moves: slow and plain."""
    start = np.zeros(graph.num_tasks, dtype=np.int64)
    before = np.full(graph.num_tasks, NO_TASK)
    for order in schedule.order:
        before[order[1:]] = order[:-1]
    moved = True
    while moved:
        moved = False
        for task in range(graph.num_tasks):
            at = 0 if before[task] == NO_TASK else start[before[task]] + graph.duration_ns[before[task]]
            for i in range(graph.predecessor_start[task], graph.predecessor_start[task + 1]):
                p = graph.predecessor[i]
                at = max(at, start[p] + graph.duration_ns[p] + graph.predecessor_delay_ns[i])
            if at > start[task]:
                start[task], moved = at, True
    return Timeline(start, start + graph.duration_ns)
