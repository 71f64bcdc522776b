"""One GPU: what the executor costs there, what memory strategies hold, and how far copies hide."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from pipeloom.packing import Packing, PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.report import markdown_table
from pipeloom.runtime import Executor, ExecutorOptions, Model, Module, ThreadHub
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, TensorShape

TITLE = "One GPU"
_WIDTH, _ROWS, _LAYERS, _NUM_MICROBATCHES, _REPEATS = 2048, 4096, 8, 4, 10
_STRATEGIES = ("keep", "selective", "recompute", "offload")


def available() -> bool:
    """Whether there is a GPU to run it on."""
    return torch.cuda.is_available()


def run() -> str:
    """Measure, and return the section as Markdown."""
    if not available():
        return "There is no GPU on this machine."
    rows = [_row(strategy, split) for strategy in _STRATEGIES for split in (False, True)]
    name = torch.cuda.get_device_name()
    text = (
        f"{name}, bfloat16 autocast, {_LAYERS} feed-forward layers {_WIDTH} wide in two chunks, {_NUM_MICROBATCHES} "
        f"microbatches of {_ROWS} tokens, all forwards before all backwards: medians of {_REPEATS} iterations. The "
        "plain loop is the same without any runtime, activations kept."
    )
    header = ["strategy", "backward", "ms", "plain loop, ms", "peak, MB", "offloaded, MB", "GB/s moved", "recomputed"]
    return f"{text}\n\n{markdown_table(header, rows)}"


class _Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return output


def _row(strategy: str, split: bool) -> list[str]:
    torch.manual_seed(0)
    layers = [_Feed().cuda() for _ in range(_LAYERS)]
    samples = [torch.randn(_ROWS, _WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(_NUM_MICROBATCHES)]
    executor, plan, packing = _case(layers, strategy, split)
    ours: list[float] = []
    plain: list[float] = []
    peak = 0
    for repeat in range(2 + _REPEATS):
        linked = executor.prepare(plan, packing)
        _clear(layers)
        torch.cuda.reset_peak_memory_stats()
        begin = _now()
        result = executor.run_linked(linked, samples)
        end = _now()
        peak = torch.cuda.max_memory_allocated()
        _clear(layers)
        middle = _now()
        _plain(layers, samples)
        last = _now()
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
        f"{peak / 1e6:.0f}",
        f"{result.offloaded_bytes / 1e6:.0f}",
        f"{moved:.1f}",
        str(result.num_recomputed),
    ]


def _case(layers: list[_Feed], strategy: str, split: bool) -> tuple[Executor, ExecutionPlan, Packing]:
    shape = TensorShape(("tokens", _WIDTH), "bfloat16")
    module = Module("lm", layers, reads="sequence", hidden=shape, output=shape, inputs=lambda part: part.samples[0])
    model = Model([module], lambda output, _: output.float().square().mean(), lambda _: 1.0)
    half = _LAYERS // 2
    chunks = (Chunk("lm", (0, half - 1), 0), Chunk("lm", (half, _LAYERS - 1), 0))
    layout = Layout(1, (ModuleLayout("lm"),), chunks)
    batch = Batch(tuple(Sample(str(i), _ROWS) for i in range(_NUM_MICROBATCHES)))
    packing = pack(batch, model.spec, layout, PackingSpec(_ROWS))
    verbs = ("I", "W") if split else ("B",)
    actions: list[Action] = []
    for m in range(_NUM_MICROBATCHES):
        for c in (0, 1):
            actions.append(_act("F", c, m, strategy))
            if strategy == "offload":
                actions.append(_act(Verb.OFFLOAD, c, m))
    order = [(m, c) for m in reversed(range(_NUM_MICROBATCHES)) for c in (1, 0)]
    for step, (m, c) in enumerate(order):
        if strategy == "offload":
            # One backward ahead, as lowering does it.
            ahead = order[:2] if step == 0 else order[step + 1 : step + 2]
            actions += [_act(Verb.LOAD, chunk, microbatch) for microbatch, chunk in ahead]
        actions += [_act(verb, c, m) for verb in verbs]
    plan = ExecutionPlan(1, 0, layout.digest, (tuple(actions),))
    executor = Executor(
        model, layout, 0, ThreadHub().transport(0), "cuda", options=ExecutorOptions(autocast=torch.bfloat16)
    )
    return executor, plan, packing


def _act(verb: str, chunk: int, microbatch: int, strategy: str = "") -> Action:
    return Action(verb=Verb(verb), chunk=f"lm.{chunk}", microbatch=microbatch, strategy=strategy)


def _plain(layers: list[_Feed], samples: list[Tensor]) -> None:
    losses = []
    with torch.autocast("cuda", torch.bfloat16):
        for x in samples:
            for layer in layers:
                x = layer(x)
            losses.append(x.float().square().mean() / len(samples))
    for loss in reversed(losses):
        loss.backward()  # type: ignore[no-untyped-call]


def _clear(layers: list[_Feed]) -> None:
    for layer in layers:
        layer.zero_grad(set_to_none=True)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
