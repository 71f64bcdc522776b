"""What the tests run in processes with a simulated device each."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard, distribute_tensor

from pipeloom.integrations.pipelining import PlannedSchedule, Planning
from pipeloom.integrations.steps import control, running
from pipeloom.runtime import TorchTransport, make_mesh
from pipeloom.runtime.model.encoder_dp import InstanceShare, TensorRanks
from pipeloom.spec import Parallelism
from pipeloom.timeline.schedule import random_schedule
from tests.integrations.pipelining.on_ranks import WIDTH, loss, modules, random_ranks, undivided
from tests.plan.cases import random_layout
from tests.runtime import test_trainer_device
from tests.runtime.cases import random_run
from tests.runtime.on_mesh import Shape, run_on_mesh

from . import collectives
from . import device as sim
from .clocks import RaceError


def simulated(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and check what it has done with memory, streams and groups."""
    sim.install()
    # Each process has one device.
    sim.reset()
    with sim.watching():
        result = function(*args)
    collectives.check_order()
    return result


def run_planned_schedule(seed: int, backward: Any, without_host: bool) -> float:
    """Run steps of unequal microbatches in random orders; return the largest error of this rank's gradients.

    ``without_host``: control messages are on the device, and shapes in another group, as with a group of NCCL alone.
    """
    if without_host:
        for module in (control, running):
            module.message_device = lambda group, device: torch.device(device)
    rng, size, worst = random.Random(seed), dist.get_world_size(), 0.0
    here, plain, whole = dist.get_rank(), modules(2 * size), modules(2 * size)
    ranks = random_ranks(rng, len(whole), size)
    device = torch.device(sim.KIND, 0)
    stages = [
        PipelineStage(module.to(device), number, len(whole), device)
        for number, module in enumerate(whole)
        if ranks[number] == here
    ]
    orders = random.Random(seed)
    planning = Planning(order=lambda graph: random_schedule(orders, graph), backward=backward)
    schedule = PlannedSchedule(stages, planning, loss)
    for step in range(3):
        torch.manual_seed(step)
        lengths = [rng.randint(1, 8) for _ in range(rng.randint(2, 5))]
        batches = [(torch.randn(2, n, WIDTH).double(), torch.randn(2, n, WIDTH).double()) for n in lengths]
        wanted, _ = undivided(plain, batches)
        schedule.step(
            arg_mbs=[(x.to(device),) for x, _ in batches] if ranks[0] == here else None,
            target_mbs=[y.to(device) for _, y in batches] if ranks[-1] == here else None,
        )
        owners = [ranks[number] for number, module in enumerate(whole) for _ in module.parameters()]
        found = [parameter for module in whole for parameter in module.parameters()]
        for owner, mine, gradient in zip(owners, found, wanted, strict=True):
            if owner == here:
                worst = max(worst, float((mine.grad.cpu() - gradient).abs().max()))  # type: ignore[union-attr, operator]
                mine.grad = None
    schedule.close()
    return worst


def train_equal_chunks() -> list[float]:
    """Train two chunks of equal layers, which two replicas shard; return the loss and the norm of each iteration."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [test_trainer_device.Layer() for _ in range(4)]
    device = torch.device(sim.KIND if dist.get_world_size() > 1 else "cpu")
    trainer = test_trainer_device.trainer_of(layers, device, None, replicas=dist.get_world_size())
    return [x for report in trainer.run(test_trainer_device.batches()) for x in (report.loss, report.gradient_norm)]


def sum_shared_rows() -> list[list[float]]:
    """Sum gradients of rows of which two ranks have one in common, and one nobody has; twice."""
    ranks = TensorRanks.of(dist.group.WORLD)  # type: ignore[arg-type]
    share = InstanceShare(ranks, (0, 1), ((0, 1), (1, 1)), (((0, 2), (1, 2)),), [4])
    given = [torch.full((2, 1), float(number + ranks.rank), device=sim.KIND) for number in (1, 10)]
    return [share.whole_gradient(0, gradient).flatten().tolist() for gradient in given]


class Awaited:
    """A message that counts those that nobody has awaited."""

    num_open = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        Awaited.num_open += 1

    def wait(self) -> None:
        self._inner.wait()
        Awaited.num_open -= 1


def run_many_microbatches() -> int:
    """Run steps of many microbatches on the CPU; return how many messages were sent and not awaited."""
    here, whole, ranks = dist.get_rank(), modules(2), [0, 1]
    stages = [PipelineStage(whole[here], here, 2, torch.device("cpu"))]
    schedule = PlannedSchedule(stages, Planning(order=partial(random_schedule, random.Random(0))), loss)
    usual = schedule._transport.send
    schedule._transport.send = lambda *args: Awaited(usual(*args))  # type: ignore[method-assign]
    batches = [(torch.randn(2, 3, WIDTH).double(), torch.randn(2, 3, WIDTH).double()) for _ in range(24)]
    for _ in range(2):
        schedule.step(
            arg_mbs=[(x,) for x, _ in batches] if ranks[0] == here else None,
            target_mbs=[y for _, y in batches] if ranks[-1] == here else None,
        )
    schedule.close()
    return Awaited.num_open


def run_planned_forward_backward(vpp: int | None, backward: Any) -> float:
    """Run Megatron's model chunks in random orders; return the largest error of this rank's gradients."""
    from megatron.core import parallel_state, utils

    from tests.integrations.megatron import on_core

    # It sets the data of a tensor, which a tensor of the simulated device does not notice.
    utils._kernel_make_viewless_tensor = lambda tensor, grad: tensor.detach().requires_grad_(grad)
    case = on_core.Case(pp=2, vpp=vpp, config={"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"})
    on_core.set_up(case)
    plain, chunks = on_core.chunks_of(case), [chunk.to(sim.KIND) for chunk in on_core.chunks_of(case)]
    orders, worst = random.Random(0), 0.0
    order = partial(random_schedule, orders)
    for seed in range(3):
        items = on_core.batches(case, seed, [8, 5, 8, 12])
        losses_wanted, wanted = on_core.theirs(case, items, plain)
        # Its tensors are on the host now.
        parallel_state.get_global_memory_buffer().buffer.clear()
        here = [{name: value.to(sim.KIND) for name, value in item.items()} for item in items]
        with (
            patch.object(torch.cuda, "current_device", lambda: torch.device(sim.KIND, 0)),
            on_core.planned(planner=Planning(order=order, backward=backward)),
        ):
            losses, found = on_core.ours(case, here, chunks)
        found = {name: gradient.cpu() for name, gradient in found.items()}
        losses = [{name: value.cpu() for name, value in loss.items()} for loss in losses]
        parallel_state.get_global_memory_buffer().buffer.clear()
        worst = max(worst, on_core.difference(found, wanted), on_core.losses_differ(losses, losses_wanted))
    return worst


def draw_on_one_stage() -> float:
    """Draw random numbers for a DTensor on the first pipeline rank alone; return the sum of all of its shards."""
    layout = random_layout(random.Random(0), random_run(0).case.model, 2)
    mesh = make_mesh(msgspec.structs.replace(layout, parallelism=Parallelism(tensor=2)), sim.KIND)
    if mesh.pipeline_rank:
        return 0.0
    x = distribute_tensor(torch.ones(4, 8, device=sim.KIND), mesh.device_mesh["tp"], [Shard(0)], src_data_rank=None)
    return float(torch.nn.functional.dropout(x, 0.5).full_tensor().sum())


def run_with_averages(shape: Shape) -> None:
    """Average gradients over ranks that should sum them."""
    usual = dist.all_reduce

    def averaging(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.dim():
            tensor /= dist.get_world_size(options.get("group"))
        return usual(tensor, *args, **options)

    with patch.object(dist, "all_reduce", averaging):
        run_on_mesh([shape], list(range(4)), sim.KIND)


def faults() -> list[str]:
    """Make faults in plain PyTorch, and return what is said of each."""
    sim.install()
    here, others = dist.get_rank(), [dist.new_group(), dist.new_group()]
    said = []

    def tell(call: Callable[[], Any]) -> None:
        try:
            call()
        except (RaceError, AssertionError) as error:
            said.append(str(error))
        else:
            said.append("")

    before = sim.world().num_waits
    TorchTransport(others[0]).connect(sim.KIND)
    # Connections exist when it returns.
    assert sim.world().num_waits > before
    others[0] = dist.new_group()
    x = torch.ones(3, device=sim.KIND)
    work = dist.all_reduce(x, async_op=True)
    tell(lambda: x + 1)
    work.wait()  # type: ignore[union-attr]
    tell(lambda: x + 1)
    several = [torch.zeros(3, device=sim.KIND) for _ in others]
    # The second one is the first of its group.
    begin = [
        dist.isend(y, 1, group) if here == 0 else dist.irecv(y, 0, group)
        for y, group in zip(several, others, strict=True)
    ]
    tell(lambda: x + 1)
    for message in begin:
        message.wait()  # type: ignore[union-attr]
    tell(collectives.check_order)
    in_turn = list(zip(several, others, strict=True))
    sums = [dist.all_reduce(y, group=group, async_op=True) for y, group in (in_turn if here else in_turn[::-1])]
    for each in sums:
        each.wait()  # type: ignore[union-attr]
    tell(collectives.check_order)
    return said
