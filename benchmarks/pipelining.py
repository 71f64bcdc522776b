"""`PlannedSchedule` on PyTorch's stages beside PyTorch's schedules: what it costs, and what unequal lengths gain."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.integrations.pipelining import PlannedSchedule, Planning
from pipeloom.plan import schedule_from_pytorch_csv
from pipeloom.report import markdown_table
from pipeloom.runtime.launch.processes import launch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

TITLE = "PlannedSchedule against PyTorch's schedules"
_WIDTH, _ROWS, _NUM_MICROBATCHES = 16, 2, 16
_CASES = (("1F1B", 1, False), ("interleaved 1F1B", 4, False), ("zero bubble, interleaved", 4, True))
_CPU = torch.device("cpu")


def run(repeats: int = 60, steps: int = 24) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    repeats : int
        Runs of each program in the first table.
    steps : int
        Steps of each program in the second.
    """
    return f"{_overheads(repeats)}\n\n{_unequal(steps)}"


# ------------------------------------------------------------------ what it costs


def _overheads(repeats: int) -> str:
    rows = []
    for num_ranks in (1, 2):
        for name, per_rank, split in _CASES:
            found = launch(_overhead, num_ranks, name, per_rank, split, repeats, timeout_s=120.0)
            count = found[0]["actions"]
            plain, theirs, mine = (sum(each[key] for each in found) / len(found) for key in ("plain", "torch", "ours"))
            above = (theirs - plain, mine - plain)
            rows.append(
                [
                    name,
                    str(num_ranks),
                    str(count),
                    *(f"{each / count * 1e6:.1f}" for each in (plain, *above)),
                    f"{above[1] / above[0]:.2f}",
                ]
            )
    text = (
        "CPU microseconds of a rank's own thread per computation, above a plain loop over the same stages. "
        f"Medians of {repeats} alternated steps, mean of the ranks. Stages are linear layers of {_WIDTH} "
        f"by {_WIDTH}, with {_NUM_MICROBATCHES} microbatches. Both run PyTorch's order. A step of Pipeloom "
        "includes everything: it reads the input sizes, broadcasts the choice of a plan, links and runs "
        "the plan, and collects losses and outputs."
    )
    header = ["schedule", "ranks", "computations", "plain loop", "PyTorch", "Pipeloom", "ratio"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _overhead(name: str, per_rank: int, split: bool, repeats: int) -> dict[str, float]:
    """On one rank: median CPU seconds of a step."""
    warnings.simplefilter("ignore")
    from torch.distributed import pipelining

    size, here = dist.get_world_size(), dist.get_rank()
    count = size * per_rank
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(count)]
    mine = [number for number in range(count) if number % size == here]

    def stages() -> list[pipelining.PipelineStage]:
        return [pipelining.PipelineStage(layers[number], number, count, _CPU) for number in mine]

    kinds: dict[str, Any] = {
        "1F1B": pipelining.Schedule1F1B,
        "interleaved 1F1B": pipelining.ScheduleInterleaved1F1B,
        "zero bubble, interleaved": pipelining.ScheduleInterleavedZeroBubble,
    }
    own = stages()
    theirs = kinds[name](own[0] if per_rank == 1 else own, _NUM_MICROBATCHES, loss_fn=_loss, scale_grads=False)
    order = _plain_1f1b if per_rank == 1 else _order_of(theirs.pipeline_order, size)
    planning = Planning(order=order, backward="split" if split else "whole")
    ours = PlannedSchedule(stages(), planning, _loss, n_microbatches=_NUM_MICROBATCHES, scale_grads=False)
    inputs, target = torch.randn(2, _NUM_MICROBATCHES * _ROWS, _WIDTH)
    args: tuple[Tensor, ...] = (inputs,) if here == 0 else ()
    targets = target if here == size - 1 else None
    steps: dict[str, Callable[[], object]] = {
        "plain": lambda: _plain([layers[number] for number in mine], inputs, target, split),
        "torch": lambda: theirs.step(*args, target=targets),
        "ours": lambda: ours.step(*args, target=targets),
    }
    times: dict[str, list[float]] = {key: [] for key in steps}
    for repeat in range(5 + repeats):
        keys = list(steps)[repeat % 3 :] + list(steps)[: repeat % 3]
        for key in keys:
            for layer in layers:
                layer.zero_grad()
            dist.barrier()
            begin = time.thread_time()
            steps[key]()
            if repeat >= 5:
                times[key].append(time.thread_time() - begin)
    found = {key: statistics.median(each) for key, each in times.items()}
    return found | {"actions": float(len(mine) * _NUM_MICROBATCHES * (3 if split else 2))}


def _order_of(rows: dict[int, list[Any]], size: int) -> Callable[[TaskGraph], Schedule]:
    """The order of one of PyTorch's schedules."""
    lines = [",".join("" if action is None else str(action) for action in rows[rank]) for rank in range(size)]
    text = "\n".join(lines) + "\n"
    return lambda graph: schedule_from_pytorch_csv(text, graph)


def _plain_1f1b(graph: TaskGraph) -> Schedule:
    """1F1B on one stage a rank, whose order as PyTorch shows it has wrong numbers."""
    size, rows = graph.num_ranks, []
    for rank in range(size):
        ahead = min(size - rank, _NUM_MICROBATCHES)
        cells = [f"{rank}F{m}" for m in range(ahead)]
        for m in range(_NUM_MICROBATCHES):
            cells.append(f"{rank}B{m}")
            if ahead + m < _NUM_MICROBATCHES:
                cells.append(f"{rank}F{ahead + m}")
        rows.append(",".join(cells))
    return schedule_from_pytorch_csv("\n".join(rows) + "\n", graph)


def _plain(layers: Sequence[nn.Module], inputs: Tensor, target: Tensor, split: bool) -> None:
    """The same computation without any runtime."""
    for x, y in zip(torch.split(inputs, _ROWS), torch.split(target, _ROWS), strict=True):
        passed = []
        for layer in layers:
            x = x.detach().requires_grad_()
            output = layer(x)
            passed.append((x, output))
            x = output
        gradient: Tensor | None = None
        for number, (entry, output) in reversed(list(enumerate(passed))):
            end = _loss(output, y) if number == len(passed) - 1 else output
            if not split:
                torch.autograd.backward(end, gradient)
                gradient = entry.grad
                continue
            (upstream,) = torch.autograd.grad(end, entry, gradient, retain_graph=True)
            weights = list(layers[number].parameters())
            found = torch.autograd.grad(end, weights, gradient)
            for weight, more in zip(weights, found, strict=True):
                weight.grad = more if weight.grad is None else weight.grad + more
            gradient = upstream


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


# ------------------------------------------------------------------ unequal lengths

_MODEL, _HEADS, _UNIT, _BLOCKS, _PER_STEP = 128, 4, 48, 8, 8
_LONGEST = 8


class _Block(nn.Module):
    """A causal transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_MODEL, 3 * _MODEL), nn.Linear(_MODEL, _MODEL)
        self.up, self.down = nn.Linear(_MODEL, 4 * _MODEL), nn.Linear(4 * _MODEL, _MODEL)
        self.norms = nn.ModuleList([nn.LayerNorm(_MODEL), nn.LayerNorm(_MODEL)])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


def _unequal(steps: int) -> str:
    found = launch(_race, 2, steps, timeout_s=600.0)[0]
    gains = {
        name: statistics.median(a / b for a, b in zip(times, found["ours"], strict=True))
        for name, times in found.items()
        if name != "ours"
    }
    rows = [
        [
            "PlannedSchedule" if name == "ours" else f"{name}, padded",
            f"{statistics.median(times) * 1e3:.0f}",
            "" if name == "ours" else f"{gains[name]:.2f}",
        ]
        for name, times in found.items()
    ]
    text = (
        f"Real computation on 2 ranks with one thread each: {_BLOCKS} transformer blocks (width {_MODEL}) "
        f"in 4 stages, or 2 for 1F1B. A step has {_PER_STEP} microbatches of one sequence each, with new "
        f"lengths of 1 to {_LONGEST} times {_UNIT}. PyTorch's schedules must pad every microbatch of a "
        f"step to its longest. Wall time of a step, medians of {steps} steps on the same lengths in turn. "
        "*Gain* is the median of the ratios step by step. The planner searches each plan for 0.05 s while "
        "the previous step runs."
    )
    return f"{text}\n\n{markdown_table(['schedule', 'ms per step', 'gain of PlannedSchedule'], rows)}"


def _race(steps: int) -> dict[str, list[float]]:
    """Both on the same lengths, step by step."""
    warnings.simplefilter("ignore")
    from torch.distributed import pipelining

    here = dist.get_rank()
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(_BLOCKS)]
    rng = np.random.default_rng(0)
    compile_kernels = 8
    lengths = [
        [int(n) * _UNIT for n in rng.integers(1, _LONGEST + 1, _PER_STEP)] for _ in range(compile_kernels + steps)
    ]

    def stages(count: int) -> list[Any]:
        size = _BLOCKS // count
        parts = [nn.Sequential(*blocks[i * size : (i + 1) * size]) for i in range(count)]
        return [pipelining.PipelineStage(part, i, count, _CPU) for i, part in enumerate(parts) if i % 2 == here]

    def masked(output: Tensor, target: Tensor) -> Tensor:
        # A row of a target that is padding is not a number.
        real = ~target.isnan()
        return torch.where(real, output - target.nan_to_num(), 0.0).square().sum()

    ours = PlannedSchedule(stages(4), Planning(budget_s=0.05), masked, sizes=[*lengths], scale_grads=False)
    # PyTorch's runtime keeps the first shape that it sees, so there is one for every longest length.
    kinds: dict[str, Any] = {
        "1F1B": lambda: pipelining.Schedule1F1B(stages(2)[0], _PER_STEP, masked, scale_grads=False),
        "interleaved 1F1B": lambda: pipelining.ScheduleInterleaved1F1B(stages(4), _PER_STEP, masked, scale_grads=False),
        "zero bubble, interleaved": lambda: pipelining.ScheduleInterleavedZeroBubble(
            stages(4), _PER_STEP, masked, scale_grads=False
        ),
    }
    made: dict[tuple[str, int], Any] = {}
    times: dict[str, list[float]] = {key: [] for key in (*kinds, "ours")}
    for step, row in enumerate(lengths):
        torch.manual_seed(step)
        data = [(torch.randn(1, n, _MODEL), torch.randn(1, n, _MODEL)) for n in row]
        longest = max(row)
        padded = [_padded(torch.cat, [each[i] for each in data], longest, i) for i in (0, 1)]
        runs: dict[str, Callable[[], object]] = {}
        for name, make in kinds.items():
            if (name, longest) not in made:
                made[name, longest] = make()
                # The first step finds shapes, and is not counted.
                _their_step(made[name, longest], padded, here)
            runs[name] = partial(_their_step, made[name, longest], padded, here)
        mine: dict[str, Any] = (
            {"arg_mbs": [(x,) for x, _ in data]} if here == 0 else {"target_mbs": [y for _, y in data]}
        )
        runs["ours"] = partial(ours.step, return_outputs=False, **mine)
        gradients = {}
        keys = list(runs)[step % len(runs) :] + list(runs)[: step % len(runs)]
        for key in keys:
            for block in blocks:
                block.zero_grad()
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            runs[key]()
            dist.barrier()
            if step >= compile_kernels:
                times[key].append(time.perf_counter() - begin)
            gradients[key] = {
                (i, n): p.grad.clone()
                for i, b in enumerate(blocks)
                for n, p in b.named_parameters()
                if p.grad is not None
            }
        for place, gradient in gradients["ours"].items():
            torch.testing.assert_close(gradient, gradients["interleaved 1F1B"][place], rtol=1e-3, atol=1e-3)
    ours.close()
    return times


def _padded(join: Callable[..., Tensor], rows: Sequence[Tensor], longest: int, is_target: int) -> Tensor:
    fill = float("nan") if is_target else 0.0
    return join([F.pad(row, (0, 0, 0, longest - row.shape[1]), value=fill) for row in rows])


def _their_step(schedule: Any, padded: Sequence[Tensor], here: int) -> object:
    if here == 0:
        return schedule.step(padded[0], return_outputs=False)
    return schedule.step(target=padded[1], return_outputs=False)
