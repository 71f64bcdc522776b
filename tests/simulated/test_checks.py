"""The simulated accelerator finds the faults that it is there for, in plain torch, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeloom.errors import ExecutionError
from pipeloom.runtime.launch.accelerator import synchronize
from pipeloom.runtime.launch.transport import MatchOrder, ThreadHub
from tests.threads import on_threads

from . import device as sim
from .clocks import RaceError
from .messages import SimTransport

SIM = torch.device("sim", 0)
accelerator = torch.get_device_module("sim")


def on_sim(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(SIM)


def test_gradients_and_updates_equal_those_of_the_cpu():
    torch.manual_seed(0)
    here, there = (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(2))
    there.load_state_dict(here.state_dict())
    there.to(SIM)
    x = torch.randn(3, 4)
    for model, given in ((here, x), (there, x.to(SIM))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        model(given).square().sum().backward()
        optimizer.step()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert other.device == SIM
        assert torch.equal(one, other.cpu())
        assert torch.equal(one.grad, other.grad.cpu())


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_an_operation_on_two_devices_raises(other):
    with pytest.raises(RuntimeError, match=r"one device"):
        torch.add(on_sim(3), torch.randn(3).to(other))


def test_an_unordered_read_in_another_stream_is_a_race():
    x, side = on_sim(3), accelerator.Stream(SIM)
    x.mul_(2)
    with accelerator.stream(side), pytest.raises(RaceError, match=r"reads memory that aten\.mul_\.Tensor in stream"):
        x + 1


@pytest.mark.parametrize("order", ["stream", "event", "synchronize"])
def test_an_ordered_read_in_another_stream_is_none(order):
    x, side = on_sim(3), accelerator.Stream(SIM)
    x.mul_(2)
    if order == "stream":
        side.wait_stream(accelerator.current_stream(SIM))
    elif order == "event":
        side.wait_event(accelerator.current_stream(SIM).record_event())
    else:
        synchronize(SIM)
    with accelerator.stream(side):
        y = x + 1
    y.record_stream(accelerator.current_stream(SIM))
    accelerator.synchronize(SIM)
    assert y.cpu().shape == (3,)


def test_a_write_while_another_stream_reads_is_a_race():
    x, side = on_sim(3), accelerator.Stream(SIM)
    side.wait_stream(accelerator.current_stream(SIM))
    with accelerator.stream(side):
        y = x + 1
    with pytest.raises(RaceError, match=r"writes memory that aten\.add\.Tensor"):
        x.zero_()
    accelerator.current_stream(SIM).wait_stream(side)
    x.zero_()
    del y


def test_memory_that_another_stream_uses_may_not_be_freed():
    side = accelerator.Stream(SIM)
    x = on_sim(3)
    side.wait_stream(accelerator.current_stream(SIM))
    with accelerator.stream(side):
        y = x + 1
    del x
    with pytest.raises(RaceError, match=r"is freed while aten\.add\.Tensor in stream"), sim.watching():
        pass
    del y


@pytest.mark.parametrize("way", ["record_stream", "wait"])
def test_memory_that_another_stream_has_used_may_be_freed(way):
    side = accelerator.Stream(SIM)
    x = on_sim(3)
    side.wait_stream(accelerator.current_stream(SIM))
    with accelerator.stream(side):
        y = x + 1
    if way == "record_stream":
        x.record_stream(side)
    else:
        accelerator.current_stream(SIM).wait_stream(side)
    del x
    with sim.watching():
        pass
    del y


def test_the_host_may_not_read_pinned_memory_before_the_copy_is_done():
    with sim.watching():
        x, host = on_sim(3), sim.pin(torch.zeros(3))
        host.copy_(x, non_blocking=True)
        with pytest.raises(RaceError, match=r"the host's aten\.add\.Tensor reads memory that aten\.copy_"):
            host + 1
        accelerator.synchronize(SIM)
        host + 1


def test_the_host_may_not_reuse_pinned_memory_in_flight():
    with sim.watching():
        host = sim.pin(torch.ones(3))
        x = host.to(SIM, non_blocking=True)
        with pytest.raises(RaceError, match=r"the host's aten\.zero_\.default writes"):
            host.zero_()
        accelerator.synchronize(SIM)
        host.zero_()
        assert x.cpu().tolist() == [1, 1, 1]


def test_pageable_memory_and_items_wait():
    with sim.watching():
        x = on_sim(3)
        host = torch.zeros(3)
        host.copy_(x, non_blocking=True)
        assert host.sum() == pytest.approx(x.sum().item())


def test_memory_is_counted_for_each_device():
    world = sim.world()
    x, y = torch.zeros(1000, device="sim:0"), torch.zeros(10, device="sim:1")
    z = x.view(10, 100)
    assert (world.live[0], world.live[1]) == (4000, 40)
    w = z + 1
    del x, z
    assert (world.live[0], world.peak[0]) == (4000, 8000)
    del w, y
    assert (world.live[0], world.live[1], world.peak[0]) == (0, 0, 8000)


def ring(order: MatchOrder) -> list[float]:
    """Three ranks pass a number around. The first posts its receive from the last before its send to the second."""
    hub = ThreadHub(order, timeout_s=0.5)

    def work(rank: int) -> float:
        accelerator.set_device(rank)
        transport, x, y = SimTransport(hub, rank), on_sim(3), torch.zeros(3, device=SIM)
        received = transport.receive(y, (rank - 1) % 3, 0)
        if rank:
            received.wait()
        sent = transport.send(x, (rank + 1) % 3, 0)
        for each in (sent,) if rank else (received, sent):
            each.wait()
        return float(y.sum())

    return on_threads(hub, 3, work)


def test_a_receive_ahead_of_a_send_that_is_ready_blocks_it():
    """As in pytorch#188833: messages of a single communicator are served one by one, for all peers."""
    assert len(ring("in order")) == 3
    with pytest.raises(ExecutionError, match=r"no answer of rank|another rank failed"):
        ring("serial")


def test_a_message_that_is_longer_than_its_buffer_is_reported():
    """As in Automodel#2676: buffers have the shapes of the first batch, and a later one is longer."""
    hub = ThreadHub("in order", timeout_s=5.0)

    def work(rank: int) -> None:
        accelerator.set_device(rank)
        transport = SimTransport(hub, rank)
        for length in (4, 5):
            tensor = torch.zeros(4 if rank else length, device=SIM)
            (transport.receive if rank else transport.send)(tensor, 1 - rank, 0).wait()

    with pytest.raises(ExecutionError, match=r"messages do not match"):
        on_threads(hub, 2, work)
