"""What only a GPU can show: streams, pinned offload, memory peaks, timing. One GPU; several NCCL ranks are untried."""

from __future__ import annotations

import warnings

import pytest
import torch

from pipeloom.runtime import ThreadHub
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.device import AcceleratorQueues

from .cases import assert_equal_gradients
from .one_rank import NUM_MICROBATCHES, Sizes, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LENGTH, INNER = Sizes().length, Sizes().inner


def reset() -> None:
    """Begin to count memory."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()


def watch() -> None:
    """From now on, raise where the host waits for the device."""
    reset()
    with warnings.catch_warnings():
        # PyTorch warns that it does not see every wait.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")


EVERY_WAY = [
    pytest.param(strategy, backward, autocast, id=f"{strategy}-{''.join(backward)}-{'bf16' if autocast else 'fp32'}")
    for strategy in ("keep", "recompute", "selective", "offload", "keep,recompute")
    for backward in (("B",), ("I", "W"))
    for autocast in (False, True)
]


@pytest.mark.parametrize(("strategy", "backward", "autocast"), EVERY_WAY)
def test_gradients_are_those_of_the_cpu(strategy: str, backward: tuple[str, ...], autocast: bool) -> None:
    wanted, _ = run("keep", ("B",), "cpu", autocast=autocast)
    for pinned in (False, True, True):
        found, _ = run(strategy, backward, "cuda", pinned=pinned, autocast=autocast)
        # Products in bfloat16 are rounded to eight bits, in another order on each device.
        assert_equal_gradients(found, wanted, 5e-2 if autocast else 1e-3)


@pytest.mark.parametrize(("strategy", "backward", "autocast"), EVERY_WAY)
def test_the_host_waits_for_nothing_until_the_end(strategy: str, backward: tuple[str, ...], autocast: bool) -> None:
    run(strategy, backward, "cuda", pinned=True, autocast=autocast)
    try:
        # Watched from the first action on; at the optimiser step no more, since the loss and the times are read then.
        run(
            strategy,
            backward,
            "cuda",
            before=watch,
            pinned=True,
            autocast=autocast,
            optimizer_step=lambda: torch.cuda.set_sync_debug_mode("default"),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_strategies_lower_the_peak_by_what_they_do_not_hold() -> None:
    peaks = {}
    for strategy in ("keep", "recompute", "offload"):
        run(strategy, ("B",), "cuda")
        _, result = run(strategy, ("B",), "cuda", before=reset)
        peaks[strategy] = torch.cuda.max_memory_allocated()
        if strategy == "offload":
            moved = result.offloaded_bytes
    held = NUM_MICROBATCHES * 4 * LENGTH * INNER * 4
    assert moved >= held
    # What is at work itself (a few layers of one microbatch) is there under every strategy.
    working = 8 * LENGTH * INNER * 4
    assert peaks["keep"] - peaks["recompute"] >= held - working
    assert peaks["keep"] - peaks["offload"] >= held - working


def test_times_are_those_of_the_device_and_not_of_launches() -> None:
    run("keep", ("B",), "cuda")
    _, result = run("keep", ("B",), "cuda")
    each = {verb: [t.end_ns - t.start_ns for t in result.compute_times if t.verb == verb] for verb in "FB"}
    ends = [t.end_ns for t in result.times]
    assert ends == sorted(ends)
    # A backward has twice the products of a forward; launching takes alike long for both.
    assert 1.2 * sum(each["F"]) < sum(each["B"])


def test_messages_and_copies_have_streams_beside_the_computation() -> None:
    queues = AcceleratorQueues(ThreadHub().transport(0), torch.device("cuda"))
    streams = {
        queues.compute.cuda_stream,
        queues.towards(1).cuda_stream,
        queues.towards(2).cuda_stream,
        queues.receiving.cuda_stream,
        queues.to_host.cuda_stream,
        queues.from_host.cuda_stream,
    }
    assert len(streams) == 6
    assert queues.towards(1) == queues.towards(1)
    with accelerator.enqueued_beside(queues.to_host):
        assert torch.cuda.current_stream() == queues.to_host
    assert torch.cuda.current_stream() == queues.compute
