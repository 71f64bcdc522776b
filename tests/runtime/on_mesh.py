"""Pipeline x data x tensor parallel iterations, run inside launched processes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.runtime import (
    ExecutionOptions,
    Executor,
    Mesh,
    Model,
    TorchTransport,
    clip_gradients,
    global_targets,
    load_checkpoint,
    make_mesh,
    mesh_gradients,
    save_checkpoint,
    shard_layers,
)
from pipeloom.spec import Batch, Layout, Parallelism
from tests.plan.cases import (
    Case,
    RandomCosts,
    assigned_units,
    earliest,
    graph_of_units,
    random_batch,
    random_layout,
    random_schedule,
)

from .cases import (
    Gradients,
    Mean,
    Merge,
    Residual,
    Run,
    assert_equal_gradients,
    copied,
    expected,
    random_documents,
    random_run,
)

CLIP = 0.01


@dataclass(frozen=True)
class Shape:
    """Degrees of parallelism, and whether replicas hold shards (FSDP2) or everything.

    Where it is dealt, instances of most encoders are, to the tensor-parallel ranks.
    """

    pipeline: int
    data: int
    tensor: int
    sharded: bool = False
    encoder_dp: bool = False


def layout_of(seed: int, drawn: Layout, shape: Shape) -> Layout:
    """The drawn one with the shape's degrees, some of its encoders dealt."""
    rng, modules = random.Random(f"dealt {seed}"), list(drawn.modules)
    for i, module in enumerate(modules[:-1]):
        if shape.encoder_dp and rng.random() < 0.8:
            modules[i] = msgspec.structs.replace(module, on_tensor_ranks="dealt")
    return Layout(shape.pipeline, tuple(modules), drawn.chunks, Parallelism(shape.tensor, shape.data))


def replica_of(seed: int, number: int, shape: Shape) -> Run:
    """One of several replicas: the same model and chunks, another batch."""
    first = random_run(seed, shape.pipeline, replicate=seed % 2 == 0)
    layout = layout_of(seed, first.case.layout, shape)
    rng = random.Random(f"replica {seed} {number}")
    batch = random_batch(rng)
    packing = pack(batch, first.case.model, layout, PackingSpec(rng.choice((15, 25, 60))))
    costs = RandomCosts(seed, rng.random() < 0.5)
    graph = graph_of_units(layout, packing, assigned_units(rng, layout, packing), costs)
    schedule = random_schedule(rng, graph)
    case = Case(first.case.model, layout, packing, graph, schedule, earliest(graph, schedule))
    return Run(case, first.model, random_documents(rng, batch))


def expected_of_all(runs: list[Run]) -> tuple[float, Gradients]:
    """Loss and gradients of the undivided model on the batches of all replicas together."""
    total = sum(sum(map(run.model.num_targets, run.documents)) for run in runs)
    value, wanted = 0.0, dict[str, Any]()
    for run in runs:
        loss, gradients = expected(replace(run, model=runs[0].model))
        share = sum(map(run.model.num_targets, run.documents)) / total
        value += share * loss
        for name, gradient in gradients.items():
            if gradient is not None:
                wanted[name] = wanted.get(name, 0.0) + gradient * share
    return value, wanted


def plan_of(run: Run, seed: int) -> ExecutionPlan:
    """Its plan, verified, with one memory strategy for all pairs."""
    case = run.case
    strategy = random.Random(f"strategy {seed}").choice(("keep", "recompute", "selective", "offload"))
    shapes = boundary_shapes(case.model, case.layout)
    graph = replace(case.graph, labels=tuple(label._replace(strategy=strategy) for label in case.graph.labels or ()))
    plan = lower(graph, case.schedule, case.timeline, case.layout, case.packing, shapes)
    verify(plan, case.layout, case.packing)
    return plan


def tensor_parallel(model: Model, layout: Layout, mesh: Mesh) -> None:
    """Divide what can be divided: as a user would, layer by layer."""
    for module in model.modules:
        for layer in () if layout.uses_encoder_dp(module.name) else module.layers:
            plan: dict[str, Any] = {}
            if isinstance(layer, Residual):
                plan = {"inner": ColwiseParallel(output_layouts=Replicate())}
            elif isinstance(layer, Mean):
                plan = {"inner": RowwiseParallel(input_layouts=Replicate())}
            elif isinstance(layer, Merge) and layer.embed is not None:
                plan = {"embed": ColwiseParallel(output_layouts=Replicate())}
            if plan:
                parallelize_module(layer, mesh.device_mesh["tp"], plan)


def executor_on(run: Run, mesh: Mesh, shape: Shape, kind: type[TorchTransport] = TorchTransport) -> Executor:
    """An executor on this process's part of a copy of the model, on the device of the mesh."""
    layout = run.case.layout
    model = replace(run.model, modules=copied(run.model))
    for module in model.modules:
        for layer in module.layers:
            layer.to(mesh.device_mesh.device_type)
    if shape.tensor > 1:
        tensor_parallel(model, layout, mesh)
    if shape.sharded:
        shard_layers(model, layout, mesh)
    transport = kind(mesh.pipeline)
    if mesh.device_mesh.device_type != "cpu":
        transport.connect(mesh.device_mesh.device_type)
    return Executor(
        model,
        layout,
        mesh.pipeline_rank,
        transport,
        reduce_gradients=mesh_gradients(layout, mesh),
        tensor_group=mesh.device_mesh.get_group("tp"),
        options=ExecutionOptions(device=mesh.device_mesh.device_type),  # type: ignore[arg-type]
    )


def run_on_mesh(
    shapes: list[Shape], seeds: list[int], device: str = "cpu", kind: type[TorchTransport] = TorchTransport
) -> int:
    """Run random iterations under every shape; raise for the first that is not exact. Returns their number."""
    count = 0
    for shape in shapes:
        mesh = make_mesh(replica_of(0, 0, shape).case.layout, device)
        for seed in seeds:
            try:
                run_once(shape, mesh, seed, kind)
            except AssertionError as error:
                raise AssertionError(f"{shape}, seed {seed}: {error}") from error
            count += 1
    return count


def run_once(shape: Shape, mesh: Mesh, seed: int, kind: type[TorchTransport]) -> None:
    runs = [replica_of(seed, n, shape) for n in range(shape.data)]
    loss, wanted = expected_of_all(runs)
    run = replace(runs[mesh.data_rank], model=runs[0].model)
    executor = executor_on(run, mesh, shape, kind)
    targets = global_targets(sum(map(run.model.num_targets, run.documents)), mesh)
    result = executor.run(plan_of(run, seed), run.case.packing, run.documents, normalizer=targets)
    total = torch.tensor(result.loss_sum / result.normalizer, dtype=torch.float64)
    dist.all_reduce(total)
    assert abs(float(total) / shape.tensor - loss) < 1e-10 * (1 + abs(loss))
    mine = dict(executor.named_parameters())
    check_gradients(mine, wanted)
    norm = torch.sqrt(sum((g.square().sum() for g in wanted.values()), torch.tensor(0.0)))
    found = clip_gradients(executor.named_parameters(), run.case.layout, mesh, CLIP)
    assert abs(found.cpu() - norm) < 1e-10 * (1 + norm), f"norm {found} against {norm}"
    check_gradients(mine, {name: g * min(1.0, CLIP / float(norm)) for name, g in wanted.items()})


def check_gradients(mine: dict[str, torch.nn.Parameter], wanted: Gradients) -> None:
    found: Gradients = {}
    for name, parameter in mine.items():
        gradient: Tensor | None = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = None if whole is None else whole.cpu()
    assert_equal_gradients(found, {name: wanted.get(name) for name in mine})


def share_of(seed: int, shape: Shape, replica: int) -> Run:
    """A replica's share of a global batch that, like the model, depends on the seed alone."""
    first = random_run(seed, 2)
    rng = random.Random(f"{seed} {shape}")
    layout = layout_of(seed, random_layout(rng, first.case.model, shape.pipeline), shape)
    samples = first.case.packing.batch.samples
    mine = list(range(len(samples)))[replica :: shape.data]
    packing = pack(Batch(tuple(samples[i] for i in mine)), first.case.model, layout, PackingSpec(60))
    graph = graph_of_units(layout, packing, assigned_units(rng, layout, packing), RandomCosts(seed, True))
    schedule = random_schedule(rng, graph)
    case = Case(first.case.model, layout, packing, graph, schedule, earliest(graph, schedule))
    return Run(case, first.model, [first.documents[i] for i in mine])


def train_through(shapes: list[Shape], seed: int, folder: str) -> list[list[float]]:
    """Three iterations in each shape, each going on from the checkpoint of the one before; their losses.

    The first of all runs six, so that the others have something to be compared with.
    """
    losses: list[list[float]] = []
    for number, shape in enumerate(shapes):
        mesh = make_mesh(share_of(seed, shape, 0).case.layout)
        run = share_of(seed, shape, mesh.data_rank)
        executor = executor_on(run, mesh, shape)
        parameters = executor.parameters()
        # Divided and undivided parameters may not go through one fused call.
        optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=False) if parameters else None
        first = 0 if number == 0 else load_checkpoint(Path(folder) / str(number - 1), executor, optimizer)
        plan = plan_of(run, seed)
        targets = global_targets(sum(map(run.model.num_targets, run.documents)), mesh)
        losses.append([])
        for iteration in range(first, 6 if number == 0 else min(6, first + 2)):
            if iteration == 3 + number:
                save_checkpoint(Path(folder) / str(number), executor, optimizer, iteration)
            result = executor.run(plan, run.case.packing, run.documents, normalizer=targets)
            total = torch.tensor(result.loss_sum / result.normalizer, dtype=torch.float64)
            dist.all_reduce(total)
            losses[-1].append(float(total) / shape.tensor)
            clip_gradients(executor.named_parameters(), run.case.layout, mesh, 1.0)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return losses
