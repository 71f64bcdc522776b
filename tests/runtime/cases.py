"""Random models with real layers for the random iterations of `tests.plan.cases`, and ranks as threads."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pipeloom.plan import ExecutionPlan, RankPlan, rank_plan
from pipeloom.runtime import ExecutionOptions, Executor
from pipeloom.runtime.execute.result import StepResult
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.transport import MatchOrder, ThreadHub, greet_peers
from pipeloom.runtime.measure.reference import run_undivided
from pipeloom.runtime.model.model import Emit, Model, Module, Part
from pipeloom.spec import Batch, ModelSpec, ModuleSpec, TensorShape
from pipeloom.spec.batch import audio_frames
from tests.plan.cases import WIDTH, Case, random_case, random_model, with_streams
from tests.threads import on_threads


@dataclass(frozen=True)
class Document:
    """A sample: features of every text token, every token of every image, and every frame of every recording."""

    text: Tensor
    images: tuple[Tensor, ...]
    recordings: tuple[Tensor, ...] = ()

    @property
    def sequence(self) -> Tensor:
        """Text first, then the places of the images, empty, then those of the recordings: one for two frames."""
        heard = [recording[::2] for recording in self.recordings]
        return torch.cat([self.text, *(torch.zeros_like(empty) for empty in (*self.images, *heard))])

    def instances(self, reads: str) -> tuple[Tensor, ...]:
        """What goes through a module one by one."""
        parts = {"images": self.images, "audio": self.recordings, "text": (self.text,)}
        return parts.get(reads) or ((self.sequence,) if reads == "sequence" else ())

    def places(self, source: str) -> list[int]:
        """Where in the sequence every row of an upstream output belongs."""
        begin = len(self.text)
        if source == "images":
            return list(range(begin, begin + sum(map(len, self.images))))
        if source == "audio":
            begin += sum(map(len, self.images))
            found = []
            for recording in self.recordings:
                found += [begin + frame // 2 for frame in range(len(recording))]
                begin = found[-1] + 1
            return found
        return list(range(len(self.text if source == "text" else self.sequence)))


class Merge(nn.Module):
    """Layer 0: adds each upstream output, through a weight of its own, at its places."""

    def __init__(self, num_upstream: int, has_inputs: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH) if has_inputs else None
        self.take = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_upstream))

    def forward(self, *args: Tensor, scale: Tensor, owner: Tensor) -> Tensor:
        if self.embed is None:
            (upstream,) = args
            return self.take[0](upstream) * scale
        x, places, upstream = args[0], args[1 : 1 + len(self.take)], args[1 + len(self.take) :]
        x = torch.tanh(self.embed(x)) * scale
        for (targets, rows), given, take in zip(places, upstream, self.take, strict=True):
            x = x.index_add(0, targets, take(given)[rows])
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor, owner: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * scale


class Mean(nn.Module):
    """Mixes the tokens of one instance, never those of two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor, owner: Tensor) -> Tensor:
        total = torch.zeros_like(x).index_add(0, owner, self.inner(x))
        return x + torch.sigmoid(total)[owner]


class Tied(nn.Module):
    """Uses one weight twice in a row, has one that is never used, and ends in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.idle = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, *, scale: Tensor, owner: Tensor) -> Tensor:
        return (torch.tanh(x @ self.weight) @ self.weight).t().t().view(-1, WIDTH)


class Plain(nn.Module):
    """No parameters."""

    def forward(self, x: Tensor, *, scale: Tensor, owner: Tensor) -> Tensor:
        return torch.sin(x)


class Streaming(nn.Module):
    """A layer that takes streams, emits some, and a loss: of its output, of weights alone, or its input or output."""

    def __init__(self, rng: random.Random, inner: nn.Module, takes: Sequence[str], emits: Sequence[str]) -> None:
        super().__init__()
        self.inner, self.has_loss = inner, rng.random() < 0.3
        self.take = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in takes})
        self.emit = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in emits})
        ways = ("linear", "linear", "output", "weights") + (() if isinstance(inner, Merge) else ("input",))
        self.ways = {name: rng.choice(ways) for name in emits}

    def forward(self, *args: Tensor, where: dict[str, Tensor], scale: Tensor, owner: Tensor, **streams: Tensor) -> Any:
        x = self.inner(*args, scale=scale, owner=owner)
        for name, take in self.take.items():
            targets, rows = where[name]
            x = x.index_add(0, targets, torch.tanh(take(streams.pop(name)))[rows])
        assert not streams
        found = {}
        for name, emit in self.emit.items():
            way = self.ways[name]
            found[name] = emit(x) if way == "linear" else args[0] if way == "input" else x
            if way == "weights":
                found[name] = torch.tanh(emit.weight).sum(0).expand(len(x), WIDTH)
        loss = x.square().sum() * 0.1 if self.has_loss else None
        return Emit(x, found, loss) if found or self.has_loss else x


MIDDLE: tuple[Callable[[], nn.Module], ...] = (Residual, Residual, Mean, Tied, Plain)


def real_model(rng: random.Random, spec: ModelSpec, tied: tuple[str, ...] = ()) -> Model:
    """Layers for a spec, with random weights in double precision; some layers of the ``tied`` modules share weights."""
    torch.manual_seed(rng.randrange(10**9))
    modules = tuple(_module(rng, spec, module) for module in spec.modules)
    tie(rng, [layer for module in modules if module.name in tied for layer in module.layers])
    reads = spec.modules[-1].reads

    def loss(output: Tensor, part: Part) -> Tensor:
        """A sum over tokens that weighs each of them differently."""
        return (output * features(part, reads).cos().to(output.device)).sin().square().sum()

    return Model(modules, loss, lambda document: float(len(document.sequence)), name=spec.name)


def tie(rng: random.Random, layers: Sequence[nn.Module]) -> None:
    """Let every second layer of those with a square weight take that of another one."""
    owners = [
        (inner, name)
        for layer in layers
        for inner in layer.modules()
        for name, parameter in inner.named_parameters(recurse=False)
        if parameter.shape == (WIDTH, WIDTH)
    ]
    rng.shuffle(owners)
    for (one, name), (other, other_name) in zip(owners[::2], owners[1::2], strict=False):
        setattr(other, other_name, getattr(one, name))


def _module(rng: random.Random, spec: ModelSpec, module: ModuleSpec) -> Module:
    # A module that reads the same parts as the one before it may live on its output alone.
    alone = len(module.after) == 1 and module.reads == spec.module(module.after[0]).reads and rng.random() < 0.5
    layers = [Merge(len(module.after), not alone).double()]
    layers += [rng.choice(MIDDLE)().double() for _ in range(len(module.flat_layers) - 1)]
    sources = [spec.module(name).reads for name in module.after]

    def inputs(part: Part) -> tuple[Tensor, ...]:
        return features(part, module.reads), *(places(part, module.reads, source) for source in sources)

    emits = {i: {e.stream: e.output for e in module.emits if e.layer == i} for i in range(len(layers))}
    takes = {i: [end.stream for end in module.takes if end.layer == i] for i in range(len(layers))}
    origin = {end.stream: other.reads for other in spec.modules for end in other.emits}
    if origin:
        layers = [Streaming(rng, layer, takes[i], list(emits[i])).double() for i, layer in enumerate(layers)]

    def given(part: Part) -> dict[str, Any]:
        found = context(part, module.reads)
        where = {end.stream: places(part, module.reads, origin[end.stream]) for end in module.takes}
        return found | {"where": where} if origin else found

    shape = TensorShape(("tokens", WIDTH), "float64")
    return Module(
        module.name,
        layers,
        reads=module.reads,
        hidden=shape,
        output=shape,
        inputs=None if alone else inputs,
        context=given,
        after=module.after,
        frozen=module.frozen,
        emits={i: streams for i, streams in emits.items() if streams},
        takes={i: names for i, names in takes.items() if names},
    )


def features(part: Part, reads: str) -> Tensor:
    """What the instances of a part look like to a module."""
    return torch.cat([part.samples[sample].instances(reads)[index] for sample, index in part.instances])


def places(part: Part, reads: str, source: str) -> Tensor:
    """Where rows of an upstream output belong: target row and upstream row of every pair, as two rows."""
    if reads == source:
        return torch.arange(len(features(part, reads))).repeat(2, 1)
    begins, num_rows = {}, 0
    for sample in part.span:
        begins[sample] = num_rows
        num_rows += _length(part.samples[sample], source)
    targets, rows, begin = [], [], 0
    for sample, index in part.instances:
        document = part.samples[sample]
        num_given = _length(document, source)
        if reads == "sequence":
            targets += [begin + place for place in document.places(source)]
            rows += range(begins[sample], begins[sample] + num_given)
            begin += len(document.sequence)
        else:
            length = len(document.instances(reads)[index])
            # Every image looks at its own document, and at no other; what is not there gives nothing.
            targets += range(begin, begin + length) if num_given else ()
            rows += [begins[sample] + (index + row) % num_given for row in range(length)] if num_given else []
            begin += length
    return torch.tensor([targets, rows], dtype=torch.int64)


def _length(document: Document, reads: str) -> int:
    return sum(map(len, document.instances(reads)))


def context(part: Part, reads: str) -> dict[str, Any]:
    """A factor for every token, and which instance it belongs to."""
    x = features(part, reads)
    lengths = [len(part.samples[sample].instances(reads)[index]) for sample, index in part.instances]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {"scale": 1.0 + 0.1 * x.sum(1, keepdim=True).cos(), "owner": owner}


def random_documents(rng: random.Random, batch: Batch) -> list[Document]:
    """Samples that fit the metadata."""
    generator = torch.Generator().manual_seed(rng.randrange(10**9))

    def features(count: int) -> Tensor:
        return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    return [
        Document(features(s.text_tokens), tuple(map(features, s.image_tokens)), tuple(map(features, audio_frames(s))))
        for s in batch.samples
    ]


@dataclass(frozen=True)
class Run:
    """A random iteration with everything to run it."""

    case: Case
    model: Model
    documents: list[Document]


def random_run(
    seed: int,
    num_ranks: int | None = None,
    *,
    replicate: bool = False,
    tied: bool = False,
    streams: bool = False,
    **options: Any,
) -> Run:
    """Everything from a seed; where asked, half of the encoders lie whole on every rank, or layers share weights.

    Or layers emit and take streams.
    """
    rng = random.Random(f"run {seed}")
    spec = random_model(rng)
    if streams:
        spec = with_streams(rng, spec)
    if replicate:
        options["replicated"] = tuple(m.name for m in spec.modules[:-1] if rng.random() < 0.5)
    case = random_case(seed, num_ranks, model=spec, **options)
    sharing = [m.name for m in spec.modules if not m.frozen and m.name not in options.get("replicated", ())]
    model = real_model(rng, spec, tuple(sharing) if tied else ())
    return Run(case, model, random_documents(rng, case.packing.batch))


Gradients = dict[str, Tensor | None]


def expected(run: Run) -> tuple[float, Gradients]:
    """Loss and gradients of the undivided model; the model's own are left empty."""
    value = run_undivided(run.model, run.case.packing.batch, run.documents)
    return value, take_gradients(run.model)


def take_gradients(model: Model) -> Gradients:
    """Gradients by name; the model is left without."""
    parameters = {
        f"{module.name}.{i}.{name}": parameter
        for module in model.modules
        for i, layer in enumerate(module.layers)
        for name, parameter in layer.named_parameters()
    }
    found = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def run_threads(
    run: Run,
    plan: ExecutionPlan | None = None,
    order: MatchOrder = "tags",
    batches_p2p: bool = False,
    timeout_s: float = 20.0,
    *,
    lazy: bool = False,
    greets: bool = False,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    transport_of: Callable[[ThreadHub, int], Any] = ThreadHub.transport,
) -> list[StepResult]:
    """Run an iteration with a thread per rank, each with a copy of the model; gradients are summed up in it.

    On an accelerator, each rank has the device with its number.
    """
    case = run.case
    hub = ThreadHub(order, timeout_s, batches_p2p, lazy)
    models = [replace(run.model, modules=copied(run.model)) for _ in range(case.layout.num_ranks)]

    def work(rank: int) -> StepResult:
        if device != "cpu":
            accelerator.select(torch.device(device, rank))
        if greets:
            greet_peers(hub.transport(rank), rank, case.layout.num_ranks, "cpu")
        executor = Executor(
            models[rank],
            case.layout,
            rank,
            transport_of(hub, rank),
            options=ExecutionOptions(autocast=autocast, device=device),
            reduce_gradients=lambda *_: None,
        )
        # As in training: a rank has its own actions, and they have travelled.
        mine = rank_plan(plan or case.plan, case.layout, rank, batches_p2p=batches_p2p)
        traveled = msgspec.msgpack.decode(msgspec.msgpack.encode(mine), type=RankPlan)
        return executor.run(traveled, case.packing, run.documents)

    results = on_threads(hub, case.layout.num_ranks, work)
    for model in models:
        for name, gradient in take_gradients(model).items():
            add_gradient(run.model, name, None if gradient is None else gradient.cpu())
    return results


def copied(model: Model) -> tuple[Module, ...]:
    """The modules with layers of their own."""
    return tuple(replace(m, layers=[copy.deepcopy(layer) for layer in m.layers]) for m in model.modules)


def add_gradient(model: Model, name: str, gradient: Tensor | None) -> None:
    """Add to the gradient of a parameter named as by `take_gradients`."""
    module, layer, parameter = name.split(".", 2)
    here = model.module(module).layers[int(layer)].get_parameter(parameter)
    if gradient is not None:
        here.grad = gradient if here.grad is None else here.grad + gradient


def assert_equal_gradients(found: Gradients, wanted: Gradients, tolerance: float = 1e-10) -> None:
    """Compare by name; an absent gradient equals an absent or zero one."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        have = found[name]
        if want is None or have is None:
            other = have if want is None else want
            assert other is None or not other.any(), f"{name}: {have} against {want}"
        else:
            error = (have - want).abs().max() / (1.0 + want.abs().max())
            assert error < tolerance, f"{name}: differs by {error:.3g}"


def total_loss(results: Sequence[StepResult]) -> float:
    return sum(result.loss_sum for result in results) / results[0].normalizer
