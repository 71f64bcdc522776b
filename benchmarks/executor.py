"""What the executor costs beyond the computation itself, beside PyTorch's own pipelining runtime."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.packing import Microbatch, Packing, SubMicrobatch
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.report import markdown_table
from pipeloom.runtime import Executor, Model, Module, ThreadHub
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, Workload

TITLE = "Executor overhead"
_WIDTH, _ROWS = 16, 2
_NUM_MICROBATCHES = 16
_REPEATS = 80
_WARM_UP = 5
_CASES = (("1F1B", 1, False), ("interleaved 1F1B", 4, False), ("split backward", 4, True))

Pair = tuple[Tensor, Tensor]


def run() -> str:
    """Measure, and return the section as Markdown."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        rows = [_row(name, chunks, split) for name, chunks, split in _CASES]
    finally:
        dist.destroy_process_group()
    text = (
        f"CPU microseconds per compute action, above a plain loop over the same tensors. Medians of {_REPEATS} "
        f"alternated runs on one rank, with chunks of one {_WIDTH} by {_WIDTH} linear layer, {_NUM_MICROBATCHES} "
        "microbatches and no messages. PyTorch's schedules are fixed; Pipeloom links every new plan, "
        "which the last two columns show."
    )
    header = ["schedule", "actions", "plain loop", "PyTorch", "Pipeloom", "ratio", "linking a plan", "ratio with it"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _row(name: str, num_chunks: int, split: bool) -> list[str]:
    torch.manual_seed(0)
    setting = _Case(
        [nn.Linear(_WIDTH, _WIDTH) for _ in range(num_chunks)],
        [(torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _WIDTH)) for _ in range(_NUM_MICROBATCHES)],
        split,
    )
    executor, plan, packing = setting.ours()
    schedule = setting.torch_schedule(name)
    inputs, targets = (torch.cat(part) for part in zip(*setting.data, strict=True))
    plain = setting.plain_split if split else setting.plain

    # As in training, every program that is linked is run once, then gone.
    linked = [executor.prepare(plan, packing)]

    def link() -> None:
        linked.append(executor.prepare(plan, packing))

    def ours() -> None:
        executor.run_linked(linked.pop(0), setting.data)

    times: dict[str, list[float]] = {"plain": [], "torch": [], "ours": [], "link": []}
    for repeat in range(_WARM_UP + _REPEATS):
        steps: dict[str, Callable[[], object]] = {
            "plain": plain,
            "torch": lambda: schedule(inputs, targets),
            "ours": ours,
            "link": link,
        }
        # Each in turn goes first, so that none always finds the caches as the same other one left them.
        order = list(steps)[repeat % len(steps) :] + list(steps)[: repeat % len(steps)]
        for key in order:
            for layer in setting.layers:
                layer.zero_grad()
            begin = time.process_time()
            steps[key]()
            if repeat >= _WARM_UP:
                times[key].append(time.process_time() - begin)
    num_actions = len(plan.ranks[0])
    each = {key: statistics.median(found) / num_actions * 1e6 for key, found in times.items()}
    theirs, mine = each["torch"] - each["plain"], each["ours"] - each["plain"]
    return [
        name,
        str(num_actions),
        f"{each['plain']:.1f}",
        f"{theirs:.1f}",
        f"{mine:.1f}",
        f"{mine / theirs:.2f}",
        f"{each['link']:.1f}",
        f"{(mine + each['link']) / theirs:.2f}",
    ]


@dataclass
class _Case:
    layers: list[nn.Linear]
    data: list[Pair]
    split: bool

    def ours(self) -> tuple[Executor, ExecutionPlan, Packing]:
        """Our executor, with the plan that PyTorch's schedule amounts to on one rank."""
        count, chunks = len(self.data), range(len(self.layers))
        module = Module(
            "lm",
            self.layers,
            reads="sequence",
            hidden=("tokens", _WIDTH),
            output=("tokens", _WIDTH),
            inputs=lambda part: part.samples[0][0],
        )
        model = Model([module], lambda output, part: _loss(output, part.samples[0][1]), lambda _: 1.0)
        layout = Layout(1, (ModuleLayout("lm"),), tuple(Chunk("lm", (c, c), 0) for c in chunks))
        part = ((SubMicrobatch(0, 1, Workload((_ROWS,))),),)
        packing = Packing(
            Batch(tuple(Sample(str(m), _ROWS) for m in range(count))),
            ("lm",),
            tuple(Microbatch((m,), part) for m in range(count)),
        )
        actions = []
        for m in range(count):
            actions += [Action(Verb.F, f"lm.{c}", m, strategy="keep") for c in chunks]
            for c in reversed(chunks):
                verbs = (Verb.I, Verb.W) if self.split else (Verb.B,)
                actions += [Action(verb, f"lm.{c}", m) for verb in verbs]
        plan = ExecutionPlan(1, 0, layout.digest, (tuple(actions),))
        return Executor(model, layout, 0, ThreadHub().transport(0)), plan, packing

    def torch_schedule(self, name: str) -> Callable[[Tensor, Tensor], object]:
        """PyTorch's runtime on the same layers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed import pipelining

            count = len(self.layers)
            stages = [
                pipelining.PipelineStage(layer, i, count, torch.device("cpu")) for i, layer in enumerate(self.layers)
            ]
            kinds = {
                "1F1B": pipelining.Schedule1F1B,
                "interleaved 1F1B": pipelining.ScheduleInterleaved1F1B,
                "split backward": pipelining.ScheduleInterleavedZeroBubble,
            }
            first = stages[0] if name == "1F1B" else stages
            schedule = kinds[name](first, len(self.data), loss_fn=_loss, scale_grads=False)

        def step(inputs: Tensor, targets: Tensor) -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return schedule.step(inputs, target=targets)

        return step

    def plain(self) -> None:
        """The same computation as a loop without any runtime."""
        for x, y in self.data:
            passed = self._forward(x)
            gradient: Tensor | None = None
            for number, (entry, output) in reversed(list(enumerate(passed))):
                end = _loss(output, y) if number == len(passed) - 1 else output
                torch.autograd.backward(end, gradient)
                gradient = entry.grad

    def plain_split(self) -> None:
        """The same with each backward in two halves, as little as autograd needs for that."""
        for x, y in self.data:
            passed = self._forward(x)
            gradient: Tensor | None = None
            for number, (entry, output) in reversed(list(enumerate(passed))):
                end = _loss(output, y) if number == len(passed) - 1 else output
                upstream = None
                if number:
                    (upstream,) = torch.autograd.grad(end, entry, gradient, retain_graph=True)
                weights = list(self.layers[number].parameters())
                found = torch.autograd.grad(end, weights, gradient)
                for weight, more in zip(weights, found, strict=True):
                    weight.grad = more if weight.grad is None else weight.grad + more
                gradient = upstream

    def _forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        passed = []
        for number, layer in enumerate(self.layers):
            if number:
                x = x.detach().requires_grad_()
            output = layer(x)
            passed.append((x, output))
            x = output
        return passed


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()
