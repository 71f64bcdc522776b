"""One GPU: what the executor costs there, what memory strategies hold, and how far copies hide."""

from __future__ import annotations

import gc
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.packing import Packing, PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.report import markdown_table
from pipeloom.runtime import ExecutionOptions, Executor, Model, Module, ThreadHub
from pipeloom.runtime.launch.accelerator import synchronize
from pipeloom.runtime.launch.device import DeviceType
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, TensorShape

TITLE = "One GPU"
_STRATEGIES = ("keep", "selective", "recompute", "offload")


class Size(NamedTuple):
    """What is computed, and how often."""

    width: int = 2048
    rows: int = 4096
    layers: int = 8
    num_microbatches: int = 4
    repeats: int = 10


def available() -> bool:
    """Whether there is a GPU to run it on."""
    return torch.cuda.is_available()


def run() -> str:
    """Measure, and return the section as Markdown."""
    if not available():
        return "There is no GPU on this machine."
    return measure(Size(), "cuda")


def measure(size: Size, device: DeviceType) -> str:
    """The same of any size; on a CPU, where no memory is counted, to try it out."""
    rows = [_row(strategy, split, size, device) for strategy in _STRATEGIES for split in (False, True)]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    text = (
        f"{name}, bfloat16 autocast, {size.layers} feed-forward layers of width {size.width} in two chunks, "
        f"{size.num_microbatches} microbatches of {size.rows} tokens, all forwards before all backwards. "
        f"Medians of {size.repeats} iterations. The plain loop runs the same work without any runtime "
        "and keeps activations. Peaks are beyond weights and inputs."
    )
    header = ["strategy", "backward", "ms", "plain loop, ms", "peak, MB", "offloaded, MB", "GB/s moved", "recomputed"]
    return f"{text}\n\n{markdown_table(header, rows)}"


class _Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return output


def _row(strategy: str, split: bool, size: Size, device: DeviceType) -> list[str]:
    # Executors are in reference cycles.
    gc.collect()
    torch.manual_seed(0)
    layers = [_Feed(size.width).to(device) for _ in range(size.layers)]
    shape = (size.num_microbatches, size.rows, size.width)
    samples = list(torch.randn(shape, device=device, dtype=torch.bfloat16))
    executor, plan, packing = _case(layers, strategy, split, size, device)
    ours: list[float] = []
    plain: list[float] = []
    most = 0
    for repeat in range(2 + size.repeats):
        linked = executor.prepare(plan, packing)
        _clear(layers)
        before = allocated(device)
        forget_peak(device)
        begin = now(device)
        result = executor.run_linked(linked, samples)
        end = now(device)
        most = peak(device) - before
        _clear(layers)
        middle = now(device)
        _plain(layers, samples, device)
        last = now(device)
        if repeat >= 2:
            ours.append(end - begin)
            plain.append(last - middle)
    seconds = statistics.median(ours)
    moved = 2 * result.offloaded_bytes / seconds / 1e9
    return [
        strategy,
        "split" if split else "whole",
        f"{seconds * 1e3:.1f}",
        f"{statistics.median(plain) * 1e3:.1f}",
        f"{most / 1e6:.0f}",
        f"{result.offloaded_bytes / 1e6:.0f}",
        f"{moved:.1f}",
        str(result.num_recomputed),
    ]


def _case(
    layers: list[_Feed], strategy: str, split: bool, size: Size, device: DeviceType
) -> tuple[Executor, ExecutionPlan, Packing]:
    shape = TensorShape(("tokens", size.width), "bfloat16")
    module = Module("lm", layers, reads="sequence", hidden=shape, output=shape, inputs=lambda part: part.samples[0])
    model = Model([module], lambda output, _: output.float().square().mean(), lambda _: 1.0)
    half = size.layers // 2
    chunks = (Chunk("lm", (0, half - 1), 0), Chunk("lm", (half, size.layers - 1), 0))
    layout = Layout(1, (ModuleLayout("lm"),), chunks)
    batch = Batch(tuple(Sample(str(i), size.rows) for i in range(size.num_microbatches)))
    packing = pack(batch, model.spec, layout, PackingSpec(size.rows))
    verbs = ("I", "W") if split else ("B",)
    actions: list[Action] = []
    for m in range(size.num_microbatches):
        for c in (0, 1):
            actions.append(_act("F", c, m, strategy))
            if strategy == "offload":
                actions.append(_act(Verb.OFFLOAD, c, m))
    order = [(m, c) for m in reversed(range(size.num_microbatches)) for c in (1, 0)]
    for step, (m, c) in enumerate(order):
        if strategy == "offload":
            # One backward ahead, as lowering does it.
            ahead = order[:2] if step == 0 else order[step + 1 : step + 2]
            actions += [_act(Verb.LOAD, chunk, microbatch) for microbatch, chunk in ahead]
        actions += [_act(verb, c, m) for verb in verbs]
    plan = ExecutionPlan(1, 0, layout.digest, (tuple(actions),))
    options = ExecutionOptions(device=device, autocast=torch.bfloat16)
    executor = Executor(model, layout, 0, ThreadHub().transport(0), options=options)
    return executor, plan, packing


def _act(verb: str, chunk: int, microbatch: int, strategy: str = "") -> Action:
    return Action(verb=Verb(verb), chunk=f"lm.{chunk}", microbatch=microbatch, strategy=strategy)


def _plain(layers: list[_Feed], samples: list[Tensor], device: DeviceType) -> None:
    losses = []
    with torch.autocast(device, torch.bfloat16):
        for x in samples:
            for layer in layers:
                x = layer(x)
            losses.append(x.float().square().mean() / len(samples))
    for loss in reversed(losses):
        loss.backward()  # type: ignore[no-untyped-call]


def _clear(layers: list[_Feed]) -> None:
    for layer in layers:
        layer.zero_grad(set_to_none=True)


def now(device: DeviceType) -> float:
    """Return the time in seconds when the device has finished all enqueued work."""
    synchronize(torch.device(device))
    return time.perf_counter()


def allocated(device: DeviceType) -> int:
    """Return the bytes of tensors on a GPU; 0 on the CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak(device: DeviceType) -> int:
    """Return the most bytes of tensors on a GPU since `forget_peak`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def forget_peak(device: DeviceType) -> None:
    """Count the most bytes from now on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
