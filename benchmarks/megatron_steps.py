"""`planned_forward_backward` in Megatron Core beside its own schedules, on unequal microbatches.

Ranks wait for the times of their computations, so that a few cores can run several of them. Messages are real.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeloom.integrations.steps.planning import Planning
from pipeloom.report import markdown_table
from pipeloom.runtime.launch.processes import launch
from pipeloom.search import Budget, solve
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

TITLE = "Planned steps in Megatron Core against its own schedules"
_RANKS, _MICROBATCHES, _LONGEST, _UNIT_S, _WIDTH = 4, 16, 8, 0.008, 16
_FORWARD, _BACKWARD = 1.0, 2.0


def run(batches: int = 5, evaluations: int = 3000, repeats: int = 40) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    batches : int
        Number of steps with other microbatches.
    evaluations : int
        Schedules that the search tries for each.
    repeats : int
        Steps of the comparison of overheads.
    """
    found = launch(_race, _RANKS, batches, evaluations, timeout_s=600.0)[0]
    overheads = launch(_overheads, 2, repeats, timeout_s=600.0)
    return f"{_unequal(found)}\n\n{_overhead_table(overheads, repeats)}"


def _unequal(found: dict[str, list[float]]) -> str:
    ours, planned = found.pop("Pipeloom"), found.pop("planned")
    interleaved = [times for name, times in found.items() if name != "1F1B"]
    compared = (found["1F1B"], [min(times) for times in zip(*interleaved, strict=True)])
    # Of all steps together: a median of a few ratios depends on which steps happen to be in the middle.
    gains = [sum(theirs) / sum(times) - 1 for times in (ours, planned) for theirs in compared]
    rows = [[name, f"{statistics.mean(times):.2f}", ""] for name, times in found.items()]
    rows.append(["better interleaved of each step", f"{statistics.mean(compared[1]):.2f}", ""])
    rows.append(["Pipeloom, 2 chunks", f"{statistics.mean(ours):.2f}", f"{statistics.mean(planned):.2f}"])
    text = (
        f"Seconds of a step on {_RANKS} ranks with {_MICROBATCHES} microbatches, whose sizes differ by a factor of up "
        f"to {_LONGEST}; means of {len(ours)} steps. Every rank waits {_UNIT_S * 1e3:g} ms for each unit of size and "
        f"forward, and twice as long for the backward. Measured gains over all steps are {gains[0]:.1%} over 1F1B and "
        f"{gains[1]:.1%} over the better interleaved schedule of each step. With the planned times in place of the "
        f"measured ones, they are {gains[2]:.1%} and {gains[3]:.1%}."
    )
    return f"{text}\n\n{markdown_table(['schedule', 'measured', 'planned'], rows)}"


def _overhead_table(ranks: list[dict[str, tuple[float, float]]], repeats: int) -> str:
    rows = []
    for name in ranks[0]:
        theirs, ours = (statistics.mean(each[name][i] for each in ranks) for i in (0, 1))
        rows.append([name, f"{theirs * 1e6:.0f}", f"{ours * 1e6:.0f}", f"{ours / theirs:.2f}"])
    text = (
        "CPU microseconds of a rank per forward or backward, on 2 ranks, with chunks that compute next to nothing and "
        f"{_MICROBATCHES} equal microbatches. Medians of {repeats} alternated steps, mean of the ranks. A step of "
        "Pipeloom includes the agreement of ranks and a plan that is known."
    )
    return f"{text}\n\n{markdown_table(['schedule', 'Megatron', 'Pipeloom', 'ratio'], rows)}"


class _OnCpu(TorchFunctionMode):
    """Make on the CPU what Megatron's schedules make on ``device="cuda"``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit_s: float) -> Tensor:
        ctx.unit_s = unit_s
        time.sleep(_FORWARD * unit_s * x.shape[0])
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(_BACKWARD * ctx.unit_s * gradient.shape[0])
        return gradient, gradient.sum(dim=(0, 1)), None


class _Chunk(nn.Module):
    """A model chunk with the interface that Megatron's schedules use."""

    def __init__(self, config: Any, unit_s: float, is_first: bool) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.weight, self.unit_s, self.is_first = nn.Parameter(torch.zeros(_WIDTH)), unit_s, is_first
        self.given: Any = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.given = tensors[0]

    def forward(self, size: int) -> Tensor:
        x = torch.zeros(size, 1, _WIDTH) if self.is_first else self.given
        output: Tensor = _Wait.apply(x, self.weight, self.unit_s)  # type: ignore[no-untyped-call]
        return output


def _set_up(virtual: int, unit_s: float) -> list[nn.Module]:
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    vars(torch.cuda).update(current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None)
    size, rank = dist.get_world_size(), dist.get_rank()
    several = virtual > 1
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, size, virtual if several else None)
    config = TransformerConfig(
        num_layers=size * virtual,
        hidden_size=_WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual if several else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=several,
        batch_p2p_comm=not several,
    )
    return [_Chunk(config, unit_s / virtual, rank == 0 and number == 0) for number in range(virtual)]


def _steps(batches: int) -> Iterator[list[int]]:
    rng = random.Random(0)
    for _ in range(batches):
        yield [round(_LONGEST ** rng.random()) for _ in range(_MICROBATCHES)]


def _step(function: Any, chunks: list[nn.Module], sizes: list[int]) -> float:
    """Return the seconds of a step, over all ranks."""

    def forward_step(iterator: Any, model: Any) -> Any:
        size = next(iterator)
        return model(int(size)), lambda output: (output.sum(), {"size": size})

    iterators = [iter(sizes) for _ in chunks]
    dist.barrier()
    began = time.monotonic()
    function(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(sizes),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    dist.barrier()
    return time.monotonic() - began


def _race(batches: int, evaluations: int) -> dict[str, list[float]]:
    """On one rank: seconds of each step by each schedule; planned ones on the rank that plans."""
    found = {}
    for name, virtual in (("1F1B", 1), ("interleaved, 2 chunks", 2), ("interleaved, 4 chunks", 4)):
        chunks = _set_up(virtual, _UNIT_S)
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with _OnCpu():
            function = get_forward_backward_func()
            _step(function, chunks, [1] * _MICROBATCHES)
            found[name] = [_step(function, chunks, sizes) for sizes in _steps(batches)]
    found["Pipeloom"], found["planned"] = _ours(batches, evaluations)
    return found


def _ours(batches: int, evaluations: int) -> tuple[list[float], list[float]]:
    """Return measured and planned seconds of each step."""
    chunks = _set_up(2, _UNIT_S)
    from pipeloom.integrations.megatron.core.forward_backward import close, configure, planned_forward_backward

    planned: list[float] = []

    def order(graph: TaskGraph) -> Schedule:
        solution = solve(graph, budget=Budget(evaluations=evaluations), seed=0)
        planned.append(solution.timeline.makespan_ns * 1e-9)
        return solution.schedule

    configure(planner=Planning(order=order), sizes=int)
    # Costs are measured in the second to fourth step.
    for sizes in _steps(6):
        _step(planned_forward_backward, chunks, sizes)
    times, expected = [], []
    for sizes in _steps(batches):
        # The first run makes the plan, which then is known.
        _step(planned_forward_backward, chunks, sizes)
        expected += planned[-1:]
        times.append(_step(planned_forward_backward, chunks, sizes))
    close(chunks)
    return times, expected


def _overheads(repeats: int) -> dict[str, tuple[float, float]]:
    """On one rank: CPU seconds for each forward or backward, by Megatron's schedule and by ours."""
    found = {}
    for name, virtual in (("1F1B", 1), ("interleaved, 2 chunks", 2)):
        chunks = _set_up(virtual, 0.0)
        from megatron.core.pipeline_parallel import schedules

        from pipeloom.integrations.megatron.core.forward_backward import close, configure, planned_forward_backward

        configure(planner=Planning(budget_s=0.0), sizes=int, read_ahead=False)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(8 + repeats):
            for function, taken in zip(
                (schedules.get_forward_backward_func(), planned_forward_backward), times, strict=True
            ):
                began = time.process_time()
                with _OnCpu():
                    _step(function, chunks, [1] * _MICROBATCHES)
                taken.append((time.process_time() - began) / (2 * virtual * _MICROBATCHES))
        found[name] = (statistics.median(times[0][8:]), statistics.median(times[1][8:]))
        close(chunks)
    return found
