"""The executor on the simulated accelerator: exact, without races, and a race for each wait that is left out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import ExecutionError
from pipeloom.plan import ExecutionPlan
from pipeloom.runtime.checkpoint.resume import PendingCheckpoint
from pipeloom.runtime.execute.blocks import ChunkActivation, backward_region
from pipeloom.runtime.execute.memory import OffloadedTensors
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.device import AcceleratorQueues, DeviceQueues
from tests.plan.cases import EVERY_STRATEGY
from tests.runtime.cases import assert_equal_gradients, expected, random_run, run_threads, take_gradients, total_loss
from tests.runtime.one_rank import Sizes, run

from . import device as sim
from .clocks import RaceError
from .messages import SimTransport, _Message

SMALL = Sizes(8, 32, 16)
STRATEGIES = ("keep", "recompute", "selective", "offload", "keep,recompute")


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("backward", [("B",), ("I", "W")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_the_cpu_and_nothing_races(strategy, backward, pinned):
    wanted, _ = run("keep", ("B",), "cpu", sizes=SMALL)
    with sim.watching():
        found, _ = run(strategy, backward, "sim", sizes=SMALL, pinned=pinned)
    assert_equal_gradients(found, wanted, 1e-6)


def test_recomputation_and_offload_lower_the_counted_peak():
    peaks = {}
    for strategy in ("keep", "recompute", "offload"):
        sim.reset()
        run(strategy, ("B",), "sim", sizes=SMALL)
        peaks[strategy] = sim.world().peak[0]
    kept = 4 * 4 * SMALL.length * SMALL.inner * 4
    assert peaks["keep"] - peaks["recompute"] >= kept / 2
    assert peaks["keep"] - peaks["offload"] >= kept / 2


def _copies_that_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    def enqueued_beside(stream: Any) -> Any:
        return nullcontext() if stream is None else accelerator.enqueued_in(stream)

    patch.setattr(accelerator, "enqueued_beside", enqueued_beside)


def _loads_that_nobody_awaits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffloadedTensors, "arrive", lambda self: None)


def _offloads_that_nobody_awaits(patch: pytest.MonkeyPatch) -> None:
    def release(self: OffloadedTensors) -> None:
        for storage in self._away:
            storage.here = None

    patch.setattr(OffloadedTensors, "release", release)


def _memory_that_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim.SimTensor, "record_stream", lambda self, stream: None)


def _inputs_that_nobody_awaits(patch: pytest.MonkeyPatch) -> None:
    def take_in(self: AcceleratorQueues, tensor: torch.Tensor) -> Any:
        with accelerator.enqueued_in(self.inputs):
            return accelerator.pinned(tensor).to(self.device, non_blocking=True)

    patch.setattr(AcceleratorQueues, "_take_in", take_in)


@pytest.mark.parametrize(
    "fault",
    [
        _copies_that_do_not_wait,
        _loads_that_nobody_awaits,
        _offloads_that_nobody_awaits,
        _memory_that_is_not_recorded,
        _inputs_that_nobody_awaits,
    ],
)
def test_each_wait_that_is_left_out_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    fault(monkeypatch)
    with pytest.raises((RaceError, ExecutionError), match=r"may still use"), sim.watching():
        run("offload", ("B",), "sim", sizes=SMALL, pinned=True)


def _saved(tensors: OffloadedTensors) -> torch.Tensor:
    """Compute a tensor, and let it be saved."""
    tensor = torch.ones(4, device="sim") * 3
    tensors._pack(tensor)
    return tensor


def test_copies_wait_for_nothing_in_the_other_direction():
    computing, there, back = sim.current(), sim.PublicStream(), sim.PublicStream()
    first, second = OffloadedTensors([]), OffloadedTensors([])
    _saved(first)
    first.offload(there)
    first.release()
    _saved(second)
    second.offload(there)
    first.load(back)
    first.arrive()
    # Each knows the first copy to the host, and does not wait for the second.
    assert (there.clock.counts[there.id], back.clock.counts[there.id], computing.clock.counts[there.id]) == (2, 1, 1)
    second.release()
    assert computing.clock.counts[there.id] == 2


def test_tensors_that_have_not_been_released_are_not_copied_back():
    there, back = sim.PublicStream(), sim.PublicStream()
    tensors = OffloadedTensors([])
    packed = tensors._pack(torch.ones(4, device="sim") * 3)
    tensors.offload(there)
    tensors.load(back)
    tensors.arrive()
    assert back.id not in back.clock.counts
    assert tensors._unpack(packed).tolist() == [3] * 4
    # The backward frees them, and the copy to the host may still read them.
    del packed
    tensors.release()
    with sim.watching():
        pass


def test_memory_of_offloads_is_reused_without_a_look_at_the_host():
    """Recorded streams would hold the memory until the host sees that they have ended."""
    run("offload", ("B",), "sim", sizes=SMALL)
    assert not sim.world().recorded_bytes


def test_nothing_that_was_offloaded_lives_at_the_optimizer_step():
    lived = []
    for strategy in ("keep", "offload"):
        sim.reset()
        run(strategy, ("B",), "sim", sizes=SMALL, optimizer_step=lambda: lived.append(sim.world().live[0]))
    assert lived[0] == lived[1] > 0


def test_copies_end_before_memory_is_freed_after_an_error(monkeypatch):
    _fail_in_a_backward(monkeypatch)
    gc.collect()
    with sim.watching():
        pass


def _fail_in_a_backward(patch: pytest.MonkeyPatch) -> None:
    """Fail once tensors have been loaded, with copies in both directions."""
    calls, usual = [], ChunkActivation.backward

    def backward(self: ChunkActivation, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise ValueError("no")
        usual(self, *args)

    patch.setattr(ChunkActivation, "backward", backward)
    with pytest.raises(ExecutionError, match="no"):
        run("offload", ("B",), "sim", sizes=SMALL)
    calls.clear()


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**9), st.booleans(), st.booleans())
def test_any_plan_on_several_devices_is_exact_and_nothing_races(seed, replicate, streams):
    sim.reset()
    case = random_run(seed, strategies=EVERY_STRATEGY, replicate=replicate, streams=streams)
    loss, wanted = expected(case)
    with sim.watching():
        results = run_threads(case, order="in order", device="sim", transport_of=SimTransport)
    assert abs(total_loss(results) - loss) < 1e-10 * (1 + abs(loss))
    assert_equal_gradients(take_gradients(case.model), wanted)


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10**9), st.booleans())
def test_any_plan_over_one_communicator_is_exact_and_nothing_races(seed, joined):
    sim.reset()
    case = random_run(seed, strategies=EVERY_STRATEGY)
    _, wanted = expected(case)
    with sim.watching():
        run_threads(case, case.case.serial_plan, "serial", joined, device="sim", transport_of=SimTransport)
    assert_equal_gradients(take_gradients(case.model), wanted)


@pytest.mark.soak
def test_five_hundred_plans_raise_no_alarm():
    """No plan of the executor is taken for one with a fault."""
    _run_plans(range(1000, 1500))


def _messages_that_nobody_awaits(patch: pytest.MonkeyPatch) -> None:
    def wait(self: _Message) -> None:
        self._inner.wait()
        if self._arrived is not None:
            with torch.no_grad():
                sim.contents(self._tensor).copy_(self._arrived)

    patch.setattr(_Message, "wait", wait)


def _sends_before_the_computation(patch: pytest.MonkeyPatch) -> None:
    def send(self: AcceleratorQueues, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        with accelerator.enqueued_in(self.towards(peer)):
            return self.transport.send(tensor, peer, tag)

    patch.setattr(AcceleratorQueues, "send", send)


def _received_memory_that_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AcceleratorQueues, "arrived", lambda self, handle, tensor: handle.wait())


@pytest.mark.parametrize(
    "fault", [_messages_that_nobody_awaits, _sends_before_the_computation, _received_memory_that_is_not_recorded]
)
def test_each_wait_for_a_message_that_is_left_out_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((RaceError, ExecutionError), match=r"may still use"):
        _run_plans(range(8))


def _swapped(plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return a plan with two neighboring receives from one rank in the other order; None if there are none."""
    for rank, actions in enumerate(plan.ranks):
        for place, (one, other) in enumerate(pairwise(actions)):
            # An output that several chunks take is sent to each of them.
            same = (one.chunk, one.microbatch, one.sub_microbatch) == (
                other.chunk,
                other.microbatch,
                other.sub_microbatch,
            )
            if one.verb.is_receive and other.verb.is_receive and one.peer == other.peer and not same:
                changed = [*actions[:place], other, one, *actions[place + 2 :]]
                ranks = [*plan.ranks[:rank], tuple(changed), *plan.ranks[rank + 1 :]]
                return msgspec.structs.replace(plan, ranks=tuple(ranks))
    return None


def test_two_receives_in_the_other_order_are_found():
    tried = 0
    for seed in range(12):
        case = random_run(seed)
        plan = _swapped(case.case.plan)
        if plan is None:
            continue
        tried += 1
        sim.reset()
        _, wanted = expected(case)
        try:
            run_threads(case, plan, "in order", timeout_s=5.0, device="sim", transport_of=SimTransport)
        except ExecutionError:
            continue
        with pytest.raises(AssertionError, match="differs by"):
            assert_equal_gradients(take_gradients(case.model), wanted)
    assert tried >= 3


def test_values_move_from_any_device_to_that_of_the_queues():
    first = torch.device("sim", 0)
    for value in (torch.ones(2), torch.ones(2, device="sim")):
        assert AcceleratorQueues(cast(Any, None), first).take_in(value).device.type == "sim"
        assert DeviceQueues(cast(Any, None), torch.device("cpu")).take_in(value).device.type == "cpu"
    # Simulated tensors all name the first device, so one of another device is a stand-in.
    elsewhere = cast(Any, SimpleNamespace(device=torch.device("sim", 1), to=lambda device: device))
    assert AcceleratorQueues(cast(Any, None), first)._take_in(elsewhere) == first


def _run_plans(seeds: Iterable[int]) -> None:
    for seed in seeds:
        sim.reset()
        case = random_run(seed, strategies=EVERY_STRATEGY)
        with sim.watching():
            run_threads(case, order="in order", device="sim", transport_of=SimTransport)


def test_the_thread_of_a_checkpoint_selects_the_device_of_its_rank():
    """Threads start with the first device, and PyTorch's writer of checkpoints uses the current one."""

    def write() -> Path:
        return Path(str(sim._HERE.device))

    pending = PendingCheckpoint(1, write, asynchronous=True, device=torch.device("sim", 3))
    assert pending.wait() == Path("3")


@pytest.mark.parametrize("held", [False, True])
def test_autocast_regions_within_a_backward_do_not_drop_the_casts_of_weights(held):
    device, layer, rows = torch.device("sim"), torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    probe = torch.zeros((), device=device, requires_grad=True)

    def enter(_):
        with torch.autocast("cpu", torch.bfloat16):
            pass

    probe.register_hook(enter)
    with torch.autocast("cpu", torch.bfloat16), backward_region(device) if held else nullcontext():
        casts = []
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: casts.append(t) or t, lambda t: t):
                layer(rows)
            probe.backward()
    halves = {t.data_ptr() for t in casts if t.shape == (4, 4) and t.dtype == torch.bfloat16}
    assert len(halves) == (1 if held else 2)
