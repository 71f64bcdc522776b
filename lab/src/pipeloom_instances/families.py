"""Families of realistic problems, made from a seed: the models of DIP, uniform pipelines.

Costs are rough counts of operations and bytes, so that proportions are right: two operations per parameter
and token forward, twice that backward, a quadratic part for attention; activations in proportion to tokens,
width and layers. Times are those of an accelerator that does 330 Tflop/s, split over the tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import numpy as np

from pipeloom.cost.mixtures import LayerOption
from pipeloom.errors import InputError
from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Candidate,
    Edges,
    IntArray,
    PairLabel,
    Pairs,
    TaskGraph,
    Tasks,
    make_graph,
)
from pipeloom_instances.candidates import pair_candidates

FLOP_PER_S = 330e12
ACTIVATION_BYTES = 18
"""Per token, width and layer, with flash attention and sequence parallelism."""
RECOMPUTED_BYTES = 4
"""The same where only a layer's input and its attention's output are kept, and the rest is recomputed."""
LAYER_STRATEGIES = (
    LayerOption("keep", 0, 0, 1800),
    LayerOption("selective", 0, 10, 1200),
    LayerOption("recompute but attention", 0, 70, 400),
    LayerOption("recompute", 0, 100, 200),
)
"""What one layer may do: hundredths of its forward that its backward repeats, of a byte per token and width held."""


@dataclass(frozen=True, slots=True)
class Network:
    """One module's size: layers, width, parameters."""

    name: str
    layers: int
    width: int
    parameters: float

    def forward_flops(self, tokens: float, context: float) -> float:
        """Operations of all layers on ``tokens`` that each see ``context`` others."""
        return 2 * self.parameters * tokens + 4 * self.layers * self.width * tokens * context

    def activation_bytes(self, tokens: float, each: int = ACTIVATION_BYTES) -> float:
        """Bytes that all layers hold for their backward."""
        return each * self.width * self.layers * tokens


VIT_5B = Network("vision", 63, 1792, 5.2e9)
VIT_22B = Network("vision", 48, 6144, 21.7e9)
LLAMA_8B = Network("lm", 32, 4096, 8.0e9)
QWEN_32B = Network("lm", 64, 5120, 32e9)
QWEN_72B = Network("lm", 80, 8192, 72e9)
DIT_5B = Network("dit", 28, 3584, 5e9)
DIT_30B = Network("dit", 48, 6144, 30e9)


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters of one family of problems."""

    kind: str
    """``vlm``, ``t2v`` or ``uniform``."""
    first: Network | None
    second: Network
    """Encoder and what follows it; a uniform pipeline has only the second."""
    num_ranks: int
    num_microbatches: int
    tensor: int
    segments: int = 1
    """Passes that the second module takes over all ranks (K)."""
    memory: float | None = None
    """Capacity of every rank: the larger of its fullest microbatch and ``memory * num_ranks`` times its mean one. None:
    no limit."""
    split: bool = False
    """Backwards are input and weight gradients of equal length."""
    jitter: float = 0.0
    """Largest relative deviation of a duration between ranks."""
    delay_ns: int = 0
    """Delay in nanoseconds of every edge between two ranks."""
    recompute: bool = False
    """The first module keeps little and computes its forward once more in its backward."""
    strategies: bool = False
    """Every pair has up to ten candidates, made of what its layers may do (`LAYER_STRATEGIES`). The capacity is then
    ``memory`` times what it would be by the minimum-memory candidates."""
    split_price: float | None = None
    """Every pair may run its backward whole or, longer by this part, split (with ``split``)."""


Candidates = tuple[tuple[Candidate, ...], ...]

FAMILIES: dict[str, Family] = {
    "vlm-s": Family("vlm", VIT_5B, LLAMA_8B, 4, 64, 4),
    "vlm-m": Family("vlm", VIT_5B, QWEN_32B, 4, 64, 8),
    "vlm-l": Family("vlm", VIT_22B, QWEN_72B, 8, 128, 8, segments=2),
    "vlm-xl": Family("vlm", VIT_22B, QWEN_72B, 16, 256, 8, segments=3),
    "t2v-s": Family("t2v", LLAMA_8B, DIT_5B, 4, 64, 4),
    "t2v-l": Family("t2v", QWEN_32B, DIT_30B, 8, 128, 8),
    "uniform": Family("uniform", None, LLAMA_8B, 4, 16, 4),
}


def family(name: str, **changes: object) -> Family:
    """A family by name, with some fields changed."""
    if name not in FAMILIES:
        raise InputError("family", f"{name!r} is none of {', '.join(FAMILIES)}")
    return replace(FAMILIES[name], **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Part:
    """One sub-microbatch of a module: its forward operations and activation bytes over all layers."""

    flops: float
    activation: float


def generate(of: Family, seed: int, name: str = "") -> TaskGraph:
    """One problem of a family. The same seed gives the same problem."""
    rng = np.random.default_rng(seed)
    microbatches = [_microbatch(of, rng) for _ in range(of.num_microbatches)]
    return _build(of, rng, microbatches, name or f"{of.kind}-{seed}")


def _microbatch(of: Family, rng: np.random.Generator) -> tuple[list[_Part], list[_Part]]:
    second = of.second
    if of.kind == "uniform" or of.first is None:
        return [], [_Part(second.forward_flops(4096, 2048), second.activation_bytes(4096))]
    first = of.first
    if of.kind == "vlm":
        # Images of 728 pixels are 2704 patches, and 8192 tokens hold at most 48 of them (DIP §7.1).
        images = min(48, int(rng.exponential(11.0)))
        parts = []
        each = RECOMPUTED_BYTES if of.recompute else ACTIVATION_BYTES
        if images:
            count = -(-images // 12)
            sizes = np.diff(np.linspace(0, images, count + 1).astype(int)).tolist()
            parts = [_Part(n * first.forward_flops(2704, 2704), n * first.activation_bytes(2704, each)) for n in sizes]
        return parts, [_Part(second.forward_flops(8192, 4096), second.activation_bytes(8192))]
    # Up to 8 clips, 16 seconds together; 1536 latent tokens a second, attention inside a clip.
    seconds: list[float] = []
    while len(seconds) < 8:
        length = float(np.clip(rng.lognormal(1.1, 0.7), 0.5, 16.0))
        if sum(seconds) + length > 16:
            break
        seconds.append(length)
    seconds = seconds or [16.0]
    text = 256.0 * len(seconds)
    clips = [_Part(second.forward_flops(1536 * t, 1536 * t), second.activation_bytes(1536 * t)) for t in seconds]
    return [_Part(first.forward_flops(text, 128), first.activation_bytes(text))], clips


@dataclass
class _TaskColumns:
    """The columns of the tasks."""

    kind: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    pair: list[int] = field(default_factory=list)
    pass_id: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)


class _Columns:
    """The columns of a graph under construction: microbatch after microbatch, module after module."""

    def __init__(self, of: Family, rng: np.random.Generator) -> None:
        self.of, self.rng = of, rng
        self.tasks = _TaskColumns()
        self.activation: list[int] = []
        self.labels: list[PairLabel] = []
        self.edges: list[tuple[int, int]] = []
        self.num_modules = 1 if of.first is None else 2
        self.next_segment = 0

    def pass_over(self, which: int, m: int, seconds: float, pairs: Sequence[tuple[int, int]], kind: int) -> list[int]:
        """Add a task for each of some (rank, pair), one pass over them; return the tasks."""
        tasks = []
        for i, (place, pair) in enumerate(pairs):
            if i % self.of.num_ranks == 0:
                self.next_segment += 1
            noise = 1 + self.of.jitter * float(self.rng.uniform(-1, 1)) if self.of.jitter else 1.0
            self.tasks.kind.append(kind)
            self.tasks.rank.append(place)
            self.tasks.duration.append(round(seconds * noise * 1e9))
            self.tasks.pair.append(pair)
            self.tasks.pass_id.append(self.next_segment - 1)
            self.tasks.microbatch.append(m)
            self.tasks.module.append(which)
            tasks.append(len(self.tasks) - 1)
        return tasks

    def forwards(self, m: int, parts_of: Sequence[Sequence[_Part]]) -> list[list[tuple[list[int], float]]]:
        """Add a microbatch's forwards; return the tasks and seconds a chunk of every part, module by module."""
        of = self.of
        chains: list[list[tuple[list[int], float]]] = []
        for which, parts in enumerate(parts_of):
            passes = of.segments if which == self.num_modules - 1 else 1
            places = list(range(of.num_ranks)) * passes
            chains.append([])
            for part_number, part in enumerate(parts):
                seconds = part.flops / (len(places) * of.tensor * FLOP_PER_S)
                first = len(self.activation)
                self.activation += [round(part.activation / (len(places) * of.tensor))] * len(places)
                base = 0 if which == 0 else of.num_ranks
                self.labels += [PairLabel(base + i, m, part_number) for i in range(len(places))]
                tasks = self.pass_over(which, m, seconds, list(zip(places, count(first))), FORWARD)
                self.edges += pairwise(tasks)
                if which == 1:
                    self.edges += [(before[-1], tasks[0]) for before, _ in chains[0]]
                chains[-1].append((tasks, seconds))
        return chains

    def backwards(self, m: int, chains: Sequence[Sequence[tuple[list[int], float]]]) -> None:
        """Add the backwards of what `forwards` returned."""
        of = self.of
        ends: list[int] = []
        for which in reversed(range(self.num_modules)):
            done = []
            for tasks, seconds in chains[which]:
                pairs = [(self.tasks.rank[t], self.tasks.pair[t]) for t in reversed(tasks)]
                again = seconds if of.recompute and which == 0 and self.num_modules == 2 else 0.0
                length = again + (seconds if of.split else 2 * seconds)
                back = self.pass_over(which, m, length, pairs, INPUT_GRADIENT if of.split else BACKWARD)
                self.edges += [(tasks[-1], back[0]), *pairwise(back)]
                if which < self.num_modules - 1:
                    self.edges += [(end, back[0]) for end in ends]
                done.append(back[-1])
                if of.split:
                    self.pass_over(which, m, seconds, pairs, WEIGHT_GRADIENT)
            ends = done


def _build(
    of: Family, rng: np.random.Generator, microbatches: list[tuple[list[_Part], list[_Part]]], name: str
) -> TaskGraph:
    made = _Columns(of, rng)
    for m, parts in enumerate(microbatches):
        made.backwards(m, made.forwards(m, parts[-made.num_modules :]))
    tasks = made.tasks
    rank = np.array(tasks.rank)
    sources, targets = (np.array(column) for column in zip(*made.edges, strict=True))
    candidates = None
    if of.strategies:
        candidates = _candidates(of, made)
    elif of.split_price is not None:
        candidates = _split_or_whole(of.split_price, made)
    names = (of.second.name,) if of.first is None else (of.first.name, of.second.name)
    return make_graph(
        name=name,
        num_ranks=of.num_ranks,
        tasks=Tasks(
            kind=tasks.kind,
            rank=rank,
            duration_ns=tasks.duration,
            pair=tasks.pair,
            pass_id=tasks.pass_id,
            microbatch=tasks.microbatch,
            module=tasks.module,
            module_names=names,
        ),
        pairs=Pairs(
            activation_bytes=made.activation,
            weight_gradient_bytes=None,
            candidates=candidates,
            labels=tuple(made.labels),
        ),
        edges=Edges(source=sources, target=targets, delay_ns=np.where(rank[sources] != rank[targets], of.delay_ns, 0)),
        capacity_bytes=_capacity(of, made, candidates),
    )


def _capacity(of: Family, made: _Columns, candidates: Candidates | None) -> IntArray | None:
    """Of every rank: the largest microbatch's activations, or so many mean ones as ``memory`` and the ranks say."""
    if of.memory is None:
        return None
    held = np.zeros((of.num_microbatches, of.num_ranks))
    tasks = made.tasks
    forward = np.array(tasks.kind) == FORWARD
    sizes = np.array(made.activation)
    if candidates is not None:
        sizes = np.array([row[-1].activation_bytes for row in candidates])
    pairs = np.array(tasks.pair)[forward]
    np.add.at(held, (np.array(tasks.microbatch)[forward], np.array(tasks.rank)[forward]), sizes[pairs])
    capacity: IntArray = np.ceil(np.maximum(held.max(axis=0), of.memory * of.num_ranks * held.mean(axis=0))).astype(int)
    return capacity


def _candidates(of: Family, made: _Columns) -> Candidates:
    """Candidates of every pair: mixtures over its layers, scaled to its own time and bytes."""
    if of.split or of.recompute:
        raise InputError("family", "strategies with split or recompute", "strategies are of whole backwards")
    networks = (of.second,) if of.first is None else (of.first, of.second)
    shares = []
    for number, network in enumerate(networks):
        passes = of.segments if number == len(networks) - 1 else 1
        layers = max(1, round(network.layers / (of.num_ranks * passes)))
        shares.append((pair_candidates([list(LAYER_STRATEGIES)] * layers), layers))
    ahead, back, which = ([0] * len(made.activation) for _ in range(3))
    tasks = made.tasks
    for kind, owner, duration, module in zip(tasks.kind, tasks.pair, tasks.duration, tasks.module, strict=True):
        (ahead if kind == FORWARD else back)[owner] = duration
        which[owner] = module
    most = int(LAYER_STRATEGIES[0].activation_bytes)
    rows = []
    for owner, number in enumerate(which):
        options, layers = shares[number]
        rows.append(
            tuple(
                Candidate(
                    option.strategy,
                    ahead[owner],
                    back[owner] + ahead[owner] * option.backward_ns // (100 * layers),
                    0,
                    held := made.activation[owner] * option.activation_bytes // (most * layers),
                    held,
                    option.layers,
                )
                for option in options
            )
        )
    return tuple(rows)


def _split_or_whole(price: float, made: _Columns) -> Candidates:
    """Two candidates of every pair, split first."""
    parts = [[0, 0, 0] for _ in made.activation]
    order = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    for kind, owner, duration in zip(made.tasks.kind, made.tasks.pair, made.tasks.duration, strict=True):
        parts[owner][order.index(kind)] = duration
    longer = 1 + price
    return tuple(
        (
            Candidate("split", ahead, round(longer * back), round(longer * weight), held, held),
            Candidate("whole", ahead, back + weight, 0, held, 0),
        )
        for (ahead, back, weight), held in zip(parts, made.activation, strict=True)
    )
