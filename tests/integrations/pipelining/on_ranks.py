"""What the tests of `PlannedSchedule` run inside launched processes."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeloom.errors import ExecutionError, InputError
from pipeloom.integrations.pipelining import PlannedSchedule, Planning
from pipeloom.timeline.schedule import random_schedule

WIDTH = 5
ENOUGH = 1e-10


class Block(nn.Module):
    """A stage that mixes neighbouring rows, so that microbatches' lengths matter."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.5 * x.roll(1, dims=1)
        return x if scale is None else x * scale[:, None, None]


class Several(nn.Module):
    """A stage that takes and hands on floats of two types, numbers and truths, and folds the rows' length."""

    def __init__(self, number: int, last: int) -> None:
        super().__init__()
        self.number, self.last = number, last
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, half: Any = None, ids: Any = None, mask: Any = None) -> Any:
        if half is None:
            ids = torch.arange(x.shape[1] * x.shape[0]).view(x.shape[:2])
            mask = ids % 3 == 0
            half = x.float().mean(dim=-1)
        x = torch.tanh(self.linear(x)) + half.double()[..., None] * mask[..., None] + 0.01 * ids[..., None]
        if self.number == self.last:
            return x
        return x, half * 2, ids + 1, ~mask


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def modules(count: int, several: bool = False) -> list[nn.Module]:
    torch.manual_seed(count)
    made = [Several(i, count - 1) if several else Block(1 + i % 2) for i in range(count)]
    return [module.double() for module in made]


def my_stages(whole: list[nn.Module], ranks: list[int]) -> list[PipelineStage]:
    return [
        PipelineStage(module, number, len(whole), torch.device("cpu"))
        for number, module in enumerate(whole)
        if ranks[number] == dist.get_rank()
    ]


def given(ranks: list[int], inputs: Tensor, target: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What this rank's step takes."""
    here = dist.get_rank()
    return ((inputs,) if ranks[0] == here else ()), {"target": target if ranks[-1] == here else None}


def taken(whole: list[nn.Module], ranks: list[int] | None = None) -> list[Tensor | None]:
    """Take the gradients of all stages, or of this rank's; over all ranks where none are given."""
    found: list[Tensor | None] = []
    for number, module in enumerate(whole):
        for parameter in module.parameters():
            gradient = parameter.grad
            parameter.grad = None
            if ranks is None:
                gradient = torch.zeros_like(parameter) if gradient is None else gradient
                dist.all_reduce(gradient)
            elif ranks[number] != dist.get_rank():
                assert gradient is None
            found.append(gradient)
    return found


def error(found: list[Tensor | None], wanted: list[Tensor | None], ranks: list[int], whole: list[nn.Module]) -> float:
    """Largest difference of this rank's gradients."""
    owners = [ranks[number] for number, module in enumerate(whole) for _ in module.parameters()]
    worst = 0.0
    for owner, one, other in zip(owners, found, wanted, strict=True):
        if owner == dist.get_rank():
            assert one is not None
            assert other is not None
            worst = max(worst, float((one - other).abs().max()))
    return worst


def theirs(
    kind: str, count: int, n: int, inputs: Tensor, target: Tensor, whole: list[nn.Module]
) -> list[Tensor | None]:
    """Gradients by one of PyTorch's schedules, on the stages' places that it wants."""
    size = dist.get_world_size()
    loop = [number % size for number in range(count)]
    vee = [min(number, 2 * size - 1 - number) for number in range(count)]
    classes = {
        "1f1b": (Schedule1F1B, loop),
        "interleaved": (ScheduleInterleaved1F1B, loop),
        "zero bubble": (ScheduleInterleavedZeroBubble, loop),
        "v": (ScheduleZBVZeroBubble, vee),
    }
    schedule_class, ranks = classes[kind]
    stages = my_stages(whole, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = schedule_class(stages[0] if kind == "1f1b" else stages, n, loss_fn=loss)
        args, kwargs = given(ranks, inputs, target)
        schedule.step(*args, **kwargs)
    return taken(whole)


def against_theirs(seeds: list[int]) -> dict[str, Any]:
    """Random plans on random places, beside PyTorch's schedules; each step of several with other microbatches.

    Raises for the first whose gradients differ.
    """
    size, worst, kinds = dist.get_world_size(), 0.0, set()
    for seed in seeds:
        rng = random.Random(seed)
        kind = ("1f1b", "interleaved", "zero bubble", "v")[seed % 4]
        count = size if kind == "1f1b" else 2 * size
        whole = modules(count)
        ranks = random_ranks(rng, count, size)
        # Only one rank asks for orders, and all draw the rest alike.
        orders = random.Random(seed + 1)
        planning = Planning(
            order=lambda graph, orders=orders: random_schedule(orders, graph),  # type: ignore[misc]
            backward=("whole", "split", "either")[rng.randrange(3)],
        )
        schedule = PlannedSchedule(my_stages(whole, ranks), planning, loss)
        for step in range(2):
            # PyTorch's runtime needs one number for one schedule, at least as many as ranks, in rounds of these.
            n = size * rng.randint(1, 3)
            torch.manual_seed(seed * 7 + step)
            shape = n * rng.randint(1, 2), rng.randint(1, 4), WIDTH
            inputs, target = torch.randn(*shape).double(), torch.randn(*shape).double()
            wanted = theirs(kind, count, n, inputs, target, whole)
            args, kwargs = given(ranks, inputs, target)
            schedule.n_microbatches = n
            schedule.step(*args, **kwargs)
            off = error(taken(whole, ranks), wanted, ranks, whole)
            if off > ENOUGH:
                raise AssertionError(f"seed {seed}, step {step}, {kind}: gradients differ by {off}")
            worst = max(worst, off)
            kinds.add(kind)
    return {"plans": 2 * len(seeds), "worst": worst, "kinds": sorted(kinds)}


def random_ranks(rng: random.Random, count: int, size: int) -> list[int]:
    """Places of stages, such that every rank has one."""
    ranks = list(range(size)) + [rng.randrange(size) for _ in range(count - size)]
    rng.shuffle(ranks)
    return ranks


def undivided(whole: list[nn.Module], batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor | None], list[float]]:
    """Gradients and losses of the modules one after the other, on this process alone."""
    losses = []
    for inputs, target in batches:
        x: Any = (inputs,)
        for module in whole:
            x = module(*x) if isinstance(x, tuple) else module(x)
        value = loss(x, target)
        losses.append(value.item())
        (value / len(batches)).backward()
    found: list[Tensor | None] = []
    for module in whole:
        for parameter in module.parameters():
            found.append(parameter.grad)
            parameter.grad = None
    return found, losses


def changing(several: bool) -> dict[str, Any]:
    """Unequal microbatches, others in every step; outputs, losses, evaluation; with a planner that is given sizes."""
    rng, here = random.Random(0), dist.get_rank()
    size = dist.get_world_size()
    count = 2 * size
    whole = modules(count, several)
    ranks = random_ranks(rng, count, size)
    steps = [[rng.randint(1, 8) for _ in range(rng.randint(1, 5))] for _ in range(8)]
    schedule = PlannedSchedule(
        my_stages(whole, ranks), Planning(backward="either", budget_s=0.0), loss, sizes=[[*sizes] for sizes in steps]
    )
    unknown = []
    for number, lengths in enumerate(steps):
        torch.manual_seed(number)
        batches = [(torch.randn(2, n, WIDTH).double(), torch.randn(2, n, WIDTH).double()) for n in lengths]
        wanted, losses_wanted = undivided(whole, batches)
        losses: list[Any] = []
        mine = {
            "arg_mbs": [(x,) for x, _ in batches] if ranks[0] == here else None,
            "target_mbs": [y for _, y in batches] if ranks[-1] == here else None,
        }
        if ranks[0] != here:
            mine["arg_mbs"] = None
        outputs = schedule.step(**mine, losses=losses)
        (boundaries,) = [each for (trains, _), each in schedule._boundaries.items() if trains]
        unknown.append(sum(b.predict((2, 9, WIDTH, 8)) is None for b in boundaries.before[1:]))
        assert error(taken(whole, ranks), wanted, ranks, whole) <= ENOUGH
        if ranks[-1] == here:
            assert [float(value) for value in losses] == losses_wanted
            rows = outputs if isinstance(outputs, list) else outputs.split(2)
            assert [row.shape[1] for row in rows] == lengths
        again: list[Any] = []
        schedule.eval(**mine, losses=again)
        assert [float(value) for value in again] == ([] if ranks[-1] != here else losses_wanted)
        assert all(parameter.grad is None for module in whole for parameter in module.parameters())
    return {"steps": len(steps), "crossed": len(boundaries.crossed), "unknown": unknown[-1]}


def refused() -> list[str]:
    """What users are told."""
    here, reported = dist.get_rank(), []
    whole = modules(4)

    def tell(call: Any) -> None:
        try:
            call()
        except (InputError, ExecutionError) as problem:
            reported.append(str(problem))
        else:
            reported.append("nothing")

    cpu = torch.device("cpu")
    numbers = [0, 1] if here == 0 else [1, 2]
    tell(lambda: PlannedSchedule([PipelineStage(whole[i], i, 4, cpu) for i in numbers]))
    numbers = [0] if here == 0 else [2, 3]
    tell(lambda: PlannedSchedule([PipelineStage(whole[i], i, 4, cpu) for i in numbers]))
    tell(lambda: PlannedSchedule([PipelineStage(whole[here], here, 2 + here, cpu)]))
    tell(lambda: PlannedSchedule([whole[here]]))  # type: ignore[list-item]
    tell(lambda: PlannedSchedule([]))
    schedule = PlannedSchedule([PipelineStage(whole[here], here, 2, cpu)], Planning(budget_s=0.0), loss)
    x, y = torch.randn(2, 3, WIDTH).double(), torch.randn(2, 3, WIDTH).double()
    tell(lambda: schedule.step(*((x,) if here == 0 else ()), target=y if here else None))
    tell(lambda: schedule.step(arg_mbs=[] if here == 0 else None, target_mbs=[y] if here else None))
    sized = PlannedSchedule([PipelineStage(whole[here], here, 2, cpu)], Planning(budget_s=0.0), loss, sizes=[[3, 4]])
    tell(lambda: sized.step(arg_mbs=[(x,)] if here == 0 else None, target_mbs=[y] if here else None))
    # Known on the other rank alone: all end at once, and the next step runs.
    tell(lambda: schedule.step(arg_mbs=[(x,)] if here == 0 else None))
    tell(lambda: schedule.step(arg_mbs=[(x,)] * 2 if here == 0 else None, target_mbs=[y] if here else None))
    tell(lambda: schedule.step(arg_mbs=[(x,)] if here == 0 else None, target_mbs=[y] if here else None))
    tell(lambda: schedule.step(arg_mbs=[(x,)]) if here == 0 else schedule.eval(target_mbs=[y]))
    unsized = PlannedSchedule(schedule.stages, Planning(budget_s=0.0), loss, sizes=lambda *_: math.nan)  # type: ignore[arg-type, return-value]
    tell(lambda: unsized.step(arg_mbs=[(x,)] if here == 0 else None, target_mbs=[y] if here else None))
    with torch.no_grad():
        tell(lambda: schedule.step())
    alone = dist.new_group([here], use_local_synchronization=True)
    stages = [PipelineStage(module, number, 2, cpu, group=alone) for number, module in enumerate(whole[:2])]
    tell(lambda: PlannedSchedule(stages, Planning(budget_s=0.0), loss, n_microbatches=2).step(x))
    return reported


def traced(folder: str) -> dict[str, Any]:
    """Train three steps of unequal microbatches under torch's profiler, and write its trace."""
    here, whole, ranks = dist.get_rank(), modules(4), [0, 1, 0, 1]
    schedule = PlannedSchedule(my_stages(whole, ranks), Planning(budget_s=0.0, backward="split"), loss)
    lengths = [3, 1, 7]
    batches = [(torch.randn(2, n, WIDTH).double(), torch.randn(2, n, WIDTH).double()) for n in lengths]
    mine: dict[str, Any] = (
        {"arg_mbs": [(x,) for x, _ in batches]} if here == 0 else {"target_mbs": [y for _, y in batches]}
    )
    schedule.step(**mine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            schedule.step(**mine)
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{here}.json")
    schedule.close()
    return {}


def searched(ahead: bool) -> dict[str, Any]:
    """Train until steps run plans that the planner's process has searched; gradients stay what they were."""
    here, whole, ranks = dist.get_rank(), modules(4), [0, 1, 0, 1]
    lengths = [[3, 1, 7, 2], [5, 5, 1, 1]]
    coming = (lengths[step % 2] for step in range(10_000))
    # Longer than it ever takes, so that a plan that was asked for is the one that runs.
    planning = Planning(budget_s=0.05, deadline_s=30.0, backward="either")
    schedule = PlannedSchedule(my_stages(whole, ranks), planning, loss, sizes=coming if ahead else None)
    num_steps, done, worst = 0, torch.zeros(1), 0.0
    while not done and num_steps < 2000:
        torch.manual_seed(0)
        batches = [
            (torch.randn(1, n, WIDTH).double(), torch.randn(1, n, WIDTH).double()) for n in lengths[num_steps % 2]
        ]
        mine = {"arg_mbs": [(x,) for x, _ in batches]} if here == 0 else {"target_mbs": [y for _, y in batches]}
        schedule.step(**mine)
        worst = max(worst, error(taken(whole, ranks), undivided(whole, batches)[0], ranks, whole))
        num_steps += 1
        planner = schedule._planner
        done = torch.tensor([float(planner is not None and len(planner._searched) == len(lengths))])
        dist.broadcast(done, 0)
        time.sleep(0.05)
    schedule.close()
    return {"done": bool(done), "worst": worst}


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: float) -> Tensor:  # type: ignore[override]
        ctx.gradient = torch.full_like(weight, gradient)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient, ctx.gradient, None


class Balanced(nn.Module):
    """A module with a weight whose gradient is the same in every backward, like that of a balance loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.gradient = module, 1.0
        self.balance = nn.Parameter(torch.zeros(3).double())

    def forward(self, *inputs: Any) -> Any:
        out = self.module(*inputs)
        return _Constant.apply(out, self.balance, self.gradient)  # type: ignore[no-untyped-call]


def two_steps(ranks: list[int], replicas: bool = False) -> float:
    """Two steps add up their gradients, also of a weight of two stages and of one that adds its own gradient.

    Return the largest difference from undivided ones.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1) if replicas else (1, dist.get_world_size()))
    here, whole = mesh.get_local_rank(1), modules(4)
    if not replicas:
        whole[2].layers[0].weight = whole[0].layers[0].weight  # type: ignore[index, union-attr]
    if not replicas:
        whole[1] = Balanced(whole[1])
    alone = copy.deepcopy(whole)
    torch.manual_seed(dist.get_rank() if replicas else 0)
    batches = [(torch.randn(2, n, WIDTH).double(), torch.randn(2, n, WIDTH).double()) for n in (3, 1, 7)]
    if not replicas:
        # PyTorch's schedules divide this gradient too.
        assert isinstance(alone[1], Balanced)
        alone[1].gradient = 1 / len(batches)
    wanted = undivided(alone, batches)[0]
    if replicas:
        for module in whole:
            fully_shard(module)
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        for gradient in wanted:
            dist.all_reduce(gradient)
    stages = [
        PipelineStage(module, number, len(whole), torch.device("cpu"), group=mesh.get_group(1))
        for number, module in enumerate(whole)
        if ranks[number] == here
    ]
    schedule = PlannedSchedule(stages, Planning(budget_s=0.0), loss, together=dist.group.WORLD)
    for _ in range(2):
        schedule.step(
            arg_mbs=[(x,) for x, _ in batches] if ranks[0] == here else None,
            target_mbs=[y for _, y in batches] if ranks[-1] == here else None,
        )
    schedule.close()
    owned = [(p, ranks[number] == here) for number, module in enumerate(whole) for p in module.parameters()]
    worst = 0.0
    for (parameter, mine), gradient in zip(owned, wanted, strict=True):
        # Of a weight of two stages, the first has the gradient.
        if mine and gradient is not None:
            found: Any = parameter.grad
            if replicas:
                # FSDP averages over replicas.
                found, gradient = found.full_tensor(), gradient / dist.get_world_size()
            worst = max(worst, float((found - 2 * gradient).abs().max()))
    return worst


class Dropping(nn.Linear):
    """A stage that drops the last row in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :-1] if self.training else x)


def modes() -> list[tuple[tuple[int, ...], str]]:
    """Steps and evaluations of the same inputs, with and without autocast and dropped rows; shapes of their outputs."""
    here, whole = dist.get_rank(), nn.ModuleList([Dropping(WIDTH, WIDTH), nn.Identity()])
    stage = PipelineStage(whole[here], here, 2, torch.device("cpu"))
    schedule = PlannedSchedule(
        [stage], Planning(budget_s=0.0), lambda output, target: output.float().sum() + target.sum(), n_microbatches=2
    )
    args, kwargs = given([0, 1], torch.randn(2, 8, WIDTH), torch.zeros(2))
    found = []
    for precise, run, trains in itertools.product((False, True), (schedule.step, schedule.eval), (True, False)):
        whole.train(trains)
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            output = run(*args, **kwargs)
        if here:
            found.append((tuple(output.shape), str(output.dtype)))
    schedule.close()
    return found


def replicas() -> list[list[int]]:
    """Two pipelines that run one plan, on inputs of different lengths; the lengths of their outputs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = nn.Sequential(nn.Flatten(0, 1), nn.Linear(WIDTH, WIDTH)) if number == 0 else nn.Identity()
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = PlannedSchedule([stage], Planning(budget_s=0.0), lambda y, _: y.sum(), together=dist.group.WORLD)
    found = []
    for step in range(4):
        rng = random.Random(10 * replica + step)
        lengths = [rng.randint(1, 9) for _ in range(3)]
        outputs = schedule.step(
            arg_mbs=None if number else [(torch.randn(2, length, WIDTH),) for length in lengths],
            target_mbs=[torch.zeros(1)] * 3,
        )
        if number:
            assert outputs.shape == (2 * sum(lengths), WIDTH)
            found.append(lengths)
    schedule.close()
    return found


def unequal_replicas() -> list[str]:
    """Two pipelines that run one plan, of which the second has fewer rows than microbatches, and then as many."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = nn.Linear(WIDTH, WIDTH) if number == 0 else nn.Identity()
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = PlannedSchedule(
        [stage], Planning(budget_s=0.0), lambda y, _: y.sum(), n_microbatches=4, together=dist.group.WORLD
    )
    found = []
    for rows in (3, 4):
        try:
            schedule.step(
                *(() if number else (torch.randn(rows if replica else 8, WIDTH),)), target_mbs=[torch.zeros(1)] * 4
            )
            found.append("nothing")
        except (InputError, ExecutionError) as problem:
            found.append(str(problem))
    schedule.close()
    return found


class Divided(nn.Module):
    """A stage that hands on a DTensor, divided over the mesh, and takes one."""

    def __init__(self, mesh: Any, number: int) -> None:
        super().__init__()
        self.mesh, self.number = mesh, number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        if self.number:
            assert isinstance(x, DTensor)
            assert x.placements == (Shard(1),)
            return self.linear(x.redistribute(placements=[Replicate()]).to_local())
        x = torch.tanh(self.linear(x))
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])


def divided() -> list[float]:
    """Two stages on two meshes of two ranks; the farthest gradient from that of the undivided model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    number = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    stages = [Divided(mesh["tp"], i).double() for i in range(2)]
    group = mesh["pp"].get_group()

    def made(**more: Any) -> PlannedSchedule:
        stage = PipelineStage(stages[number], number, 2, torch.device("cpu"), group=group, **more)
        return PlannedSchedule(
            [stage], Planning(budget_s=0.0), loss_fn=lambda y, t: ((y - t) ** 2).sum(), together=dist.group.WORLD
        )

    schedule = made(get_mesh=lambda names, _: mesh[names])
    worst = []
    for lengths in ((4, 6, 2), (8, 2, 6), (5, 7, 3)):
        inputs = [torch.randn(3, length, WIDTH, dtype=torch.float64) for length in lengths]
        schedule.n_microbatches = len(inputs)
        schedule.step(arg_mbs=[(x,) for x in inputs] if number == 0 else None, target_mbs=inputs, kwarg_mbs=[{}] * 3)
        alone = [copy.deepcopy(stage) for stage in stages]
        for stage in alone:
            stage.zero_grad()
        for x in inputs:
            y = alone[1].linear(torch.tanh(alone[0].linear(x)))
            (((y - x) ** 2).sum() / len(inputs)).backward()
        wanted, found = alone[number].linear.weight.grad, stages[number].linear.weight.grad
        assert wanted is not None
        assert found is not None
        worst.append(float((wanted - found).abs().max()))
        stages[number].zero_grad()
    schedule.close()
    return worst
