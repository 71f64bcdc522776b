"""The digits example trained by `Trainer` over replicas and with divided layers, for launched ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.layout.layouts import with_encoder_dp
from pipeloom.packing import PackingSpec, cost_loads
from pipeloom.plan import backend_of
from pipeloom.planner import Planner, PlanningProblem
from pipeloom.planner.forwards import forward_problem, plan_forwards
from pipeloom.runtime import Checkpoints, ExecutionOptions, Mesh, Saving, TcpPlanStore, Trainer, load_weights
from pipeloom.runtime.data.dataset import LazySample
from pipeloom.runtime.data.prefetch import DescribedBatch
from pipeloom.runtime.model.sharding import Sharding
from pipeloom.runtime.train.divide import layers_with_tied
from pipeloom.spec import Parallelism, batch_from_dicts

from .training import CLIP, check_report, data, drawn, invented_problem, model, optimizer, prefetched, task

DOCUMENTS = 6
"""Of a batch: enough that replicas have different numbers of microbatches."""
SHORT = (1, 4)
"""Batches with fewer samples than there are replicas: one each under replicas and under shards."""


class Degrees(NamedTuple):
    """Of parallelism, how replicas hold their layers, and whether images are dealt to tensor-parallel ranks."""

    pipeline: int
    data: int
    tensor: int
    shard: Sharding | None = None
    with_encoder_dp: bool = False


class Asked(NamedTuple):
    """Of a document, as `Dataset.load` is."""

    document: str
    module: str
    instances: tuple[int, ...]
    loss: bool


class Found(NamedTuple):
    """Of one rank's training."""

    losses: list[float]
    norms: list[float]
    counts: list[int]
    """Microbatches of every iteration's plan."""
    all_fresh: bool
    held: int
    """Elements of parameters on this process."""
    digest: float
    """Of all weights, as every rank has gathered them after training."""
    evaluated: tuple[float, float]
    """Losses on other documents after the last iteration: of the weights, and of their average."""
    wanted: tuple[float, float]
    """The same by one process."""
    asked: list[Asked]
    """What this process has loaded of the documents that were trained on."""
    asked_to_evaluate: list[Asked]
    """Likewise of one evaluation."""


class Unjudged(data.Document):
    """A document without what the loss alone takes."""

    @property
    def targets(self) -> tuple[int, ...]:
        raise AssertionError("the loss is taken elsewhere")


class Counted(pl.Dataset):
    """Batches of documents, of which nothing is there that was not asked for; it keeps what was."""

    def __init__(self, batches: Iterable[Sequence[data.Document]]) -> None:
        self.batches = [list(batch) for batch in batches]
        self.documents = [document for batch in self.batches for document in batch]
        self.asked: list[Asked] = []

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[DescribedBatch]:
        for batch in self.batches:
            places = [self.documents.index(document) for document in batch]
            found = DescribedBatch(LazySample(self, i, len(self.documents[i].targets)) for i in places)
            found.metadata = batch_from_dicts([self.sizes(i) for i in places]).samples
            yield found

    def sizes(self, i: int) -> Mapping[str, Any]:
        return task.describe(self.documents[i])

    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool) -> data.Document:
        found = self.documents[i]
        self.asked.append(Asked(found.identifier, module, instances, loss))
        images: Any = [image if k in instances else None for k, image in enumerate(found.images)]
        kind = data.Document if loss else Unjudged
        return kind(
            found.identifier, found.prompt, found.prompt_lines, images if module == "vision" else (), found.digits
        )


def divide(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Divide what can be divided by rows or columns as it is."""
    if hasattr(layer, "widen"):
        parallelize_module(layer, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    elif hasattr(layer, "position"):
        parallelize_module(layer, mesh, {"project": ColwiseParallel(output_layouts=Replicate())})


def divisible(parallelize: Callable[[nn.Module, DeviceMesh], None] | None = divide) -> pl.Model:
    """The example, its embedding tied to its head."""
    whole = model(tied=True)
    return replace(whole, modules=[replace(module, parallelize=parallelize) for module in whole.modules])


def problem_of(degrees: Degrees, device: str = "cpu") -> PlanningProblem:
    made = invented_problem(degrees.pipeline)
    layout = msgspec.structs.replace(made.layout, parallelism=Parallelism(degrees.tensor, degrees.data))
    if degrees.with_encoder_dp:
        layout = with_encoder_dp(layout, ["vision"])
    # A budget with which replicas have different numbers of microbatches.
    packing = PackingSpec(80, "first_fit_decreasing")
    return replace(made, layout=layout, packing=packing, backend=backend_of(device))


def trainer_of(
    degrees: Degrees, folder: str, trained: pl.Model | None = None, device: str = "cpu", mesh: Mesh | None = None
) -> Trainer:
    made = problem_of(degrees, device)
    planner = Planner(made, TcpPlanStore.host, deadline_s=20.0)
    return Trainer(
        trained or divisible(),
        made.layout,
        planner,
        describe=task.describe,
        optimizer=optimizer,
        loads=lambda batch: cost_loads(batch, made.model, made.layout, made.costs),
        options=ExecutionOptions(
            device=device,  # type: ignore[arg-type]
            clip_norm=CLIP,
            ema_decay=0.5,
            timeout_s=120.0,
            shard=degrees.shard,
        ),
        saving=Saving(checkpoints=Checkpoints(Path(folder))),
        mesh=mesh,
    )


def others_as_shapes(whole: pl.Model, degrees: Degrees) -> pl.Model:
    """The model with memory for this rank's own layers alone, and for tied ones."""
    layout, stage = problem_of(degrees).layout, dist.get_rank() // (degrees.data * degrees.tensor)
    kept = layers_with_tied(whole)
    for chunk in layout.chunks:
        for number in range(chunk.layers[0], chunk.layers[1] + 1):
            if chunk.rank != stage and (chunk.module, number) not in kept:
                whole.module(chunk.module).layers[number].to("meta")
    return whole


def train_divided(all_degrees: list[Degrees], until: list[int], folder: str, device: str = "cpu") -> list[Found]:
    """Train so far under every degrees, each going on from where the one before ended."""
    found: list[Found] = []
    before: dict[str, Tensor] = {}
    first, meshes = 0, dict[Degrees, Mesh | None]()
    for degrees, end in zip(all_degrees, until, strict=True):
        mesh = meshes.get(degrees)
        trainer = trainer_of(degrees, folder, others_as_shapes(divisible(), degrees), device, mesh)
        meshes[degrees] = trainer.membership.mesh
        assert trainer.resume() == first
        if first and device == "cpu":
            # Gathering moves layers to the host, where training would end.
            assert_same(before, gathered(trainer))
        counted, held_back = Counted(drawn(end, DOCUMENTS, SHORT)), Counted(held_out())
        # Read ahead: what is left out is that which was trained.
        batches = trainer.skip_trained(counted if degrees.data > 1 else prefetched(end, DOCUMENTS, SHORT), first)
        reports = []
        plan = partial(plan_forwards, forward_problem(problem_of(degrees, device)))
        for report in trainer.run(batches, first):
            reports.append(report)
            held_back.asked.clear()
            evaluated = [
                trainer.evaluate(given, plan, report.iteration + 1, averaged=averaged).loss
                for given, averaged in ((held_back, False), (held_out(), True))
            ]
            if trainer.membership.is_planner_rank:
                check_report(problem_of(degrees, device), report)
            else:
                assert report.answer is None
        held = sum(local_size(p) for _, p in trainer._executor.named_parameters())
        before, first = gathered(trainer), end
        newest = Checkpoints(Path(folder)).newest()
        assert newest is not None
        averages = divisible()
        load_weights(newest, averages, weights="ema")
        found.append(
            Found(
                [report.loss for report in reports],
                [report.gradient_norm for report in reports],
                [report.num_microbatches for report in reports],
                all(report.fresh for report in reports) or not trainer.membership.is_planner_rank,
                held,
                sum(float(tensor.double().abs().sum()) for tensor in before.values()),
                (evaluated[0], evaluated[1]),
                (loss_of(trainer.model), loss_of(averages)),
                counted.asked,
                held_back.asked,
            )
        )
    return found


def held_out() -> Iterator[Sequence[data.Document]]:
    """Batches that are not trained on; the last has fewer samples than there may be replicas."""
    first, last = data.batches(11, 2, DOCUMENTS)
    yield from (first, last[:1])


def loss_of(whole: pl.Model) -> float:
    """Of one process on these: a mean over all of their targets."""
    total = count = 0.0
    for samples in held_out():
        targets = sum(map(whole.num_targets, samples))
        batch = batch_from_dicts([task.describe(sample) for sample in samples])
        total += targets * pl.run_undivided(whole, batch, samples, backward=False)
        count += targets
    return total / count


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    """All weights, copied."""
    trainer.gather_model()
    return saved_tensors_of(trainer.model)


def assert_same(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name


def local_size(parameter: Any) -> int:
    return int(parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel())


def refusals(folder: str) -> list[str]:
    """What a trainer over two replicas and two tensor-parallel ranks says of rules that cannot be followed."""

    def uneven(layer: nn.Module, mesh: DeviceMesh) -> None:
        if hasattr(layer, "norm"):
            layer.project = nn.Linear(layer.project.in_features, 7)
            parallelize_module(layer, mesh, {"project": ColwiseParallel(output_layouts=Replicate())})

    def renaming(layer: nn.Module, mesh: DeviceMesh) -> None:
        if hasattr(layer, "widen"):
            layer.wide = layer.widen
            del layer.widen

    def raising(layer: nn.Module, mesh: DeviceMesh) -> None:
        raise RuntimeError("no idea how")

    found = []
    for parallelize in (uneven, renaming, raising, lambda layer, mesh: None, None):
        try:
            trainer_of(Degrees(1, 2, 2), folder, divisible(parallelize))
        except InputError as error:
            found.append(str(error))
    try:
        trainer_of(Degrees(2, 1, 1), folder)
    except InputError as error:
        found.append(str(error))
    return found


class Reading:
    """Weights that are read; keeps which parameters, read before, were whole here whenever some have been read."""

    origin = "a test"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.read: list[str] = []
        self.whole: list[list[str]] = []
        self._memory: dict[str, StorageWeakRef] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        # When the collector runs by itself depends on the tests before.
        gc.collect()
        self.whole.append([name for name, memory in self._memory.items() if not memory.expired()])
        for name, tensor in tensors.items():
            tensor.copy_(self.weights[name])
            self.read.append(name)
            self._memory[name] = StorageWeakRef(tensor.untyped_storage())


def read_divided(degrees: Degrees, folder: str) -> Reading:
    """A model of shapes alone, whose weights are read and divided."""
    reading = Reading(saved_tensors_of(divisible()))
    with torch.device("meta"):
        shapes = replace(divisible(), pretrained=reading)
    trainer = trainer_of(degrees, folder, shapes)
    assert_same(dict(reading.weights), gathered(trainer))
    return reading


def saved_tensors_of(whole: pl.Model) -> dict[str, Tensor]:
    return {
        f"{module.name}.{number}.{name}": tensor.clone()
        for module in whole.modules
        for number, layer in enumerate(module.layers)
        for name, tensor in layer.state_dict().items()
    }


class Tried(NamedTuple):
    """All that is tried by one start of ranks, which takes longer than running them."""

    found: list[Found]
    refused: list[str]
    read: list[tuple[list[str], list[list[str]]]]
    """What was read under each degrees, and what of it was whole at every reading."""


def train_refuse_and_read(all_degrees: list[Degrees], until: list[int], folder: str) -> Tried:
    """Train under some degrees, break their rules, and read weights under them."""
    readings = [read_divided(degrees, folder) for degrees in all_degrees]
    reads = [(reading.read, reading.whole) for reading in readings]
    return Tried(train_divided(all_degrees, until, folder), refusals(folder), reads)
