"""One rank with all forwards before all backwards, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.runtime import ExecutionOptions, Executor, Model, Module, StepResult, ThreadHub
from pipeloom.runtime.launch import accelerator
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, TensorShape

from .cases import Gradients, take_gradients

NUM_MICROBATCHES = 4


class Sizes(NamedTuple):
    """Widths of a layer, and tokens of a sample."""

    width: int = 256
    inner: int = 4096
    length: int = 2048


LARGE = Sizes()


class Feed(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def run(
    strategy: str,
    backward: tuple[str, ...],
    device: str,
    *,
    sizes: Sizes = LARGE,
    pinned: bool = False,
    autocast: bool = False,
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> tuple[Gradients, StepResult]:
    """Two chunks of two layers, all forwards before all backwards; inputs on the device, or in pinned memory.

    ``before`` is called before the first action.
    """
    torch.manual_seed(0)
    width, inner, length = sizes
    samples = [torch.randn(length, width) for _ in range(NUM_MICROBATCHES)]
    samples = [accelerator.pinned(sample) if pinned else sample.to(device) for sample in samples]
    # The sum of a float32 input and a layer's output is float32 under autocast too.
    shape = TensorShape(("tokens", width), "float32")
    module = Module(
        "lm",
        [Feed(width, inner) for _ in range(4)],
        reads="sequence",
        hidden=shape,
        output=shape,
        inputs=lambda part: part.samples[0],
    )
    model = Model([module], lambda output, part: output.sin().sum(), lambda sample: 1.0)
    layout = Layout(1, (ModuleLayout("lm"),), tuple(Chunk("lm", (2 * c, 2 * c + 1), 0) for c in (0, 1)))
    batch = Batch(tuple(Sample(str(i), length) for i in range(NUM_MICROBATCHES)))
    packing = pack(batch, model.spec, layout, PackingSpec(length))

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
    executor = Executor(
        model, layout, 0, ThreadHub().transport(0), options=ExecutionOptions(device=device, autocast=dtype)
    )
    linked = executor.prepare(plan, packing)
    before()
    result = executor.run_linked(linked, samples, normalizer=1.0, **options)
    gradients = {name: None if g is None else g.cpu() for name, g in take_gradients(model).items()}
    return gradients, result
