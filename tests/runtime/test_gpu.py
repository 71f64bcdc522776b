"""What only a GPU can show: streams, pinned offload, memory peaks, timing. One GPU; several NCCL ranks are untried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.runtime import ExecutionOptions, Executor, Model, Module, StepResult, ThreadHub
from pipeloom.runtime.launch.device import AcceleratorQueues
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, TensorShape

from .cases import Gradients, assert_equal_gradients, take_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

WIDTH, INNER, LENGTH, NUM_MICROBATCHES = 256, 4096, 2048, 4


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def run(
    strategy: str,
    backward: tuple[str, ...],
    device: str,
    *,
    watch: bool = False,
    pinned: bool = False,
    autocast: bool = False,
    **options: Any,
) -> tuple[Gradients, StepResult]:
    """Two chunks of two layers, all forwards before all backwards; inputs on the device, or in pinned memory."""
    torch.manual_seed(0)
    samples = [torch.randn(LENGTH, WIDTH) for _ in range(NUM_MICROBATCHES)]
    samples = [sample.pin_memory() if pinned else sample.to(device) for sample in samples]
    # The sum of a float32 input and a layer's output is float32 under autocast too.
    shape = TensorShape(("tokens", WIDTH), "float32")
    module = Module(
        "lm",
        [Feed() for _ in range(4)],
        reads="sequence",
        hidden=shape,
        output=shape,
        inputs=lambda part: part.samples[0],
    )
    model = Model([module], lambda output, part: output.sin().sum(), lambda sample: 1.0)
    layout = Layout(1, (ModuleLayout("lm"),), tuple(Chunk("lm", (2 * c, 2 * c + 1), 0) for c in (0, 1)))
    batch = Batch(tuple(Sample(str(i), LENGTH) for i in range(NUM_MICROBATCHES)))
    packing = pack(batch, model.spec, layout, PackingSpec(LENGTH))

    def act(verb: str, chunk: int, microbatch: int, word: str = "") -> Action:
        return Action(verb=Verb(verb), chunk=f"lm.{chunk}", microbatch=microbatch, strategy=word)

    actions: list[Action] = []
    for m in range(NUM_MICROBATCHES):
        for c in (0, 1):
            actions.append(act("F", c, m, strategy))
            actions += [act(Verb.OFFLOAD, c, m)] * (strategy == "offload")
    for m in reversed(range(NUM_MICROBATCHES)):
        for c in (1, 0):
            actions += [act(Verb.LOAD, c, m)] * (strategy == "offload")
            actions += [act(Verb.RECOMPUTE, c, m)] * (strategy in ("recompute", "selective"))
            actions += [act(verb, c, m) for verb in backward]
    actions.append(Action(verb=Verb.OPTIMIZER_STEP))
    plan = ExecutionPlan(1, 0, layout.digest, (tuple(actions),))
    dtype = torch.bfloat16 if autocast else None
    options = ExecutionOptions(device=device, autocast=dtype)
    executor = Executor(model, layout, 0, ThreadHub().transport(0), options=options)
    linked = executor.prepare(plan, packing)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if watch else "default")
    result = executor.run_linked(linked, samples, normalizer=1.0, **options)
    gradients = {name: None if g is None else g.cpu() for name, g in take_gradients(model).items()}
    return gradients, result


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
            watch=True,
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
        _, result = run(strategy, ("B",), "cuda")
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


def test_folder_replicas_run_beside_the_computation() -> None:
    queues = AcceleratorQueues(ThreadHub().transport(0), torch.device("cuda"))
    streams = {
        queues.compute.cuda_stream,
        queues.towards(1).cuda_stream,
        queues.towards(2).cuda_stream,
        queues.receiving.cuda_stream,
        queues.copies.cuda_stream,
    }
    assert len(streams) == 5
    assert queues.towards(1) == queues.towards(1)
    with queues.copying():
        assert torch.cuda.current_stream() == queues.copies
    assert torch.cuda.current_stream() == queues.compute
