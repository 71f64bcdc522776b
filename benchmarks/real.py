"""Real computation: plans made for each batch, beside PyTorch's own schedules on the same layers, data and threads."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.cost import Correction, Profile
from pipeloom.errors import ExecutionError
from pipeloom.io import make_folder, write_text
from pipeloom.layout import ModulePlacement, chain_of_stages, separate
from pipeloom.packing import Packing, PackingSpec, packing_from_counts
from pipeloom.plan import BACKENDS, ExecutionPlan, backend_of, boundary_shapes, lower
from pipeloom.planner import PlanningProblem, answer_of, plan_batch
from pipeloom.report import markdown_table
from pipeloom.runtime import (
    BatchedTransport,
    ExecutionOptions,
    Executor,
    Model,
    Module,
    ProfileOptions,
    TorchTransport,
    choose_device,
    group_device,
    profile_model,
)
from pipeloom.runtime.execute.result import Calibrator, gather_times
from pipeloom.runtime.launch.accelerator import synchronize
from pipeloom.runtime.launch.processes import launch
from pipeloom.search import Budget, interleaved_one_f_one_b, one_f_one_b, solve
from pipeloom.spec import Batch, Layout, batch_from_dicts
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import simulate
from pipeloom_lab.figures import Axis, bar_figure

TITLE = "Real computation against PyTorch's schedules"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "real-computation.svg"
_MOST_RANKS, _FEWEST_RANKS = 4, 2
# A GPU for each rank where there are two; they are given wider layers, since on these all would be launching.
_DEVICE = choose_device("auto", _FEWEST_RANKS)
_SCALE = 16 if _DEVICE == "cuda" else 1
_WIDTH, _ROWS = 256 * _SCALE, 256 * _SCALE
# Hidden widths of the layers: unlike ones, as of attention, experts and heads.
_HIDDEN = tuple(
    _SCALE * hidden for hidden in (256, 1024, 512, 256, 2048, 512, 256, 1024, 512, 1536, 256, 768, 512, 256, 1024, 3072)
)
_SYSTEMS = ("1F1B, PyTorch", "interleaved, PyTorch", "1F1B, our runtime", "interleaved, our runtime", "per-batch plan")
_TOLERANCE = 1e-3
_Sample = tuple[int, int]
"""Number and length of a sample; its numbers are made from its number."""


@dataclass(frozen=True)
class Settings:
    """What is trained, and how often it is timed."""

    num_ranks: int
    num_batches: int
    repeats: int
    microbatches: int
    threads: int
    layouts: dict[str, Layout]
    profile: Profile


@dataclass(frozen=True)
class Timing:
    """One system on one batch: seconds planned (0: by no plan of ours), and measured in each repeat."""

    planned_s: float
    measured_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the measured seconds."""
        return statistics.median(self.measured_s)


def run(num_batches: int = 2, repeats: int = 5, microbatches: int = 8) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    num_batches : int
        Batches with other lengths each, and as many with equal ones.
    repeats : int
        Iterations of each system on each batch, by turns.
    microbatches : int
    """
    cores = len(os.sched_getaffinity(0))
    places = torch.cuda.device_count() if _DEVICE == "cuda" else cores
    num_ranks = max(_FEWEST_RANKS, min(_MOST_RANKS, places))
    threads = max(1, cores // num_ranks)
    model = build_model()
    packing, placements = PackingSpec(_ROWS), {"lm": ModulePlacement(2)}
    some = [_batch(seed, microbatches, even=False) for seed in range(2)]
    torch.set_num_threads(threads)
    profile = profile_model(
        model, some, describe=_describe, packing=packing, placements=placements, options=ProfileOptions(device=_DEVICE)
    )
    layouts = {
        "1F1B": chain_of_stages(model.spec, num_ranks, 1, profile.load),
        "interleaved": chain_of_stages(model.spec, num_ranks, 2, profile.load),
        "plan": separate(model.spec, num_ranks, placements, profile.load),
    }
    settings = Settings(num_ranks, num_batches, repeats, microbatches, threads, layouts, profile)
    # Here, once, so that no rank waits while another compiles.
    _problem(model, settings, layouts["plan"]).compile_kernels()
    found = launch(_measure, num_ranks, settings, threads=threads, timeout_s=300.0, device=_DEVICE)[0]
    rows = [
        [kind, system, *_columns(found[kind, system], found[kind, "per-batch plan"])]
        for kind in ("equal", "unequal")
        for system in _SYSTEMS
    ]
    shared = (
        f"The {num_ranks} ranks have {cores} core, so they share it: these times say little about schedules."
        if cores < num_ranks
        else f"Each rank has {threads} thread(s) on as many of {cores} hardware threads."
    )
    if _DEVICE == "cuda":
        shared = f"Each rank has a GPU ({torch.cuda.get_device_name()}) and a share of {cores} hardware threads."
    text = (
        f"{num_ranks} ranks, {len(_HIDDEN)} layers of different widths, {microbatches} microbatches, with "
        f"forward, backward and all messages. {shared} Microbatches have equal or unequal lengths. PyTorch's "
        "runtime needs unequal ones padded to the longest. Values are milliseconds per iteration: means "
        f"over {num_batches} batches of the median of {repeats} repeats, with all rows in turn. *Gain* "
        "says how much longer a row takes than the per-batch plan: predicted by simulation with measured "
        "costs, and measured (median of all turns)."
    )
    header = [
        "microbatches",
        "schedule",
        "planned, ms",
        "measured, ms",
        "measured over planned",
        "gain predicted",
        "gain measured",
    ]
    make_folder(FIGURE.parent)
    write_text(
        FIGURE,
        bar_figure(
            [f"{kind} microbatches" for kind in ("equal", "unequal")],
            {system: [_mean_ms(found[kind, system]) for kind in ("equal", "unequal")] for system in _SYSTEMS},
            y=Axis("measured iteration, ms"),
            title=f"{num_ranks} ranks on {cores} hardware threads",
            values=".0f",
        ),
    )
    return f"{text}\n\n{markdown_table(header, rows)}\n\n![Iterations measured](figures/{FIGURE.name})"


def _mean_ms(timed: Sequence[Timing]) -> float:
    return statistics.fmean(each.median_s for each in timed) * 1e3


def _columns(theirs: Sequence[Timing], ours: Sequence[Timing]) -> list[str]:
    """Numbers of one system on all batches of one kind, beside the per-batch plans on the same ones."""
    measured_ms = _mean_ms(theirs)
    planned = statistics.fmean(each.planned_s for each in theirs)
    promise, gain = "", ""
    if theirs is not ours:
        pairs = list(zip(theirs, ours, strict=True))
        turns = [t / o for a, b in pairs for t, o in zip(a.measured_s, b.measured_s, strict=True)]
        gain = f"{statistics.median(turns) - 1:+.1%}"
        if planned:
            promise = f"{statistics.median(a.planned_s / b.planned_s for a, b in pairs) - 1:+.1%}"
    error = statistics.median(each.median_s / each.planned_s for each in theirs) - 1 if planned else None
    return [
        f"{planned * 1e3:.1f}" if planned else "",
        f"{measured_ms:.1f}",
        "" if error is None else f"{error:+.1%}",
        promise,
        gain,
    ]


class Layer(nn.Module):
    """A residual perceptron."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.widen, self.narrow = nn.Linear(_WIDTH, hidden), nn.Linear(hidden, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``(tokens, _WIDTH)``."""
        out: Tensor = x + self.narrow(torch.nn.functional.gelu(self.widen(self.norm(x))))
        return out


def build_model() -> Model:
    """A chain of layers, the same in every process."""
    torch.manual_seed(0)
    layers = [Layer(hidden) for hidden in _HIDDEN]
    module = Module(
        "lm",
        layers,
        reads="sequence",
        hidden=("tokens", _WIDTH),
        output=("tokens", _WIDTH),
        inputs=lambda part: torch.cat([numbers(sample) for sample in part.samples]),
    )
    return Model([module], lambda out, _: out.square().sum() / _WIDTH, lambda sample: float(sample[1]))


def numbers(sample: _Sample) -> Tensor:
    """The rows of a sample."""
    return torch.randn(sample[1], _WIDTH, generator=torch.Generator().manual_seed(sample[0]))


def _batch(seed: int, microbatches: int, *, even: bool) -> list[_Sample]:
    """One sample a microbatch, with an eighth of the rows at least where they are unequal."""
    lengths = np.random.default_rng(seed).integers(_ROWS // 8, _ROWS + 1, size=microbatches).tolist()
    return [(seed * 1000 + i, _ROWS // 2 if even else length) for i, length in enumerate(lengths)]


def _describe(sample: _Sample) -> dict[str, Any]:
    return {"id": str(sample[0]), "text_tokens": sample[1]}


def _packing(batch: Batch, model: Model, layout: Layout) -> Packing:
    """Every sample is a microbatch, for all systems."""
    rows = tuple((i,) for i in range(len(batch.samples)))
    return packing_from_counts(batch, model.spec, layout, rows, tuple(((1,),) for _ in rows))


# ------------------------------------------------------------------ on the ranks


def _measure(settings: Settings) -> dict[tuple[str, str], list[Timing]]:
    """On one rank: per kind of data and system, planned and measured seconds of every batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings.threads)
    model = build_model()
    for layer in model.modules[0].layers:
        layer.to(group_device())
    found: dict[tuple[str, str], list[Timing]] = {}
    correction = _calibrated(model, settings)
    for even in (True, False):
        for number in range(settings.num_batches):
            samples = _batch(100 + number, settings.microbatches, even=even)
            steps: dict[str, Callable[[], object]] = {
                "1F1B, PyTorch": _theirs(model, settings.layouts["1F1B"], samples),
                "interleaved, PyTorch": _theirs(model, settings.layouts["interleaved"], samples),
                "1F1B, our runtime": _Ours(model, settings, "1F1B", samples, correction),
                "interleaved, our runtime": _Ours(model, settings, "interleaved", samples, correction),
                "per-batch plan": _Ours(model, settings, "plan", samples, correction),
            }
            times: dict[str, list[float]] = {name: [] for name in steps}
            norms: list[float] = []
            for repeat in range(settings.repeats + 1):
                # Each in turn goes first, so that none always finds the machine as the same other one left it.
                first = repeat % len(steps)
                for name in [*steps][first:] + [*steps][:first]:
                    seconds = _timed(steps[name], model)
                    # The first is to warm up: PyTorch's runtime learns shapes in it.
                    if repeat:
                        times[name].append(seconds)
                    else:
                        norms.append(_gradient_norm(model))
            if max(norms) > min(norms) * (1 + _TOLERANCE):
                raise ExecutionError(f"the systems' gradients differ, their norms are {norms}")
            for name, step in steps.items():
                planned = step.planned_s if isinstance(step, _Ours) else 0.0
                timed = Timing(planned, tuple(times[name]))
                found.setdefault(("equal" if even else "unequal", name), []).append(timed)
    return found


def _timed(step: Callable[[], object], model: Model) -> float:
    """Seconds from the first start to the last end over all ranks."""
    for layer in model.modules[0].layers:
        layer.zero_grad()
    synchronize(group_device())
    dist.barrier()
    begin = time.monotonic_ns()
    step()
    synchronize(group_device())
    span = torch.tensor([-begin, time.monotonic_ns()])
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return int(span.sum()) / 1e9


def _gradient_norm(model: Model) -> float:
    """Of all ranks' layers: every system has computed the same."""
    gradients = [p.grad for layer in model.modules[0].layers for p in layer.parameters() if p.grad is not None]
    total = torch.tensor(sum(float(gradient.double().square().sum()) for gradient in gradients))
    dist.all_reduce(total)
    return math.sqrt(float(total))


class _Ours:
    """One system in our runtime, on one batch."""

    def __init__(
        self, model: Model, settings: Settings, name: str, samples: Sequence[_Sample], correction: Correction
    ) -> None:
        layout = settings.layouts[name]
        self.samples = samples
        batch = batch_from_dicts([_describe(sample) for sample in samples])
        self.packing = _packing(batch, model, layout)
        self.executor = _executor(model, layout)
        chosen: list[Any] = [None]
        if dist.get_rank() == 0:
            chosen = [_plan(model, settings, name, self.packing, correction)]
        dist.broadcast_object_list(chosen)
        self.plan, self.planned_s = chosen[0]

    def __call__(self) -> None:
        self.executor.run(self.plan, self.packing, self.samples)


def _plan(
    model: Model, settings: Settings, name: str, packing: Packing, correction: Correction
) -> tuple[ExecutionPlan, float]:
    """A system's plan for the same microbatches, and what it promises."""
    layout = settings.layouts[name]
    graph = build_graph(layout, packing, _problem(model, settings, layout).corrected(correction).costs)
    if name == "plan":
        schedule = solve(graph, budget=Budget(seconds=0.5), seed=0).schedule
    else:
        schedule = {"1F1B": one_f_one_b, "interleaved": interleaved_one_f_one_b}[name](graph)
    timeline = simulate(graph, schedule)
    shapes = boundary_shapes(model.spec, layout)
    single_communicator = BACKENDS[backend_of(_DEVICE)].single_communicator
    plan = lower(graph, schedule, timeline, layout, packing, shapes, single_communicator=single_communicator)
    return plan, timeline.makespan_ns / 1e9


def _problem(model: Model, settings: Settings, layout: Layout) -> PlanningProblem:
    packing, backend = PackingSpec(_ROWS), backend_of(_DEVICE)
    return PlanningProblem.from_profile(model.spec, layout, settings.profile, packing, backend=backend)


def _executor(model: Model, layout: Layout) -> Executor:
    transport = BatchedTransport() if BACKENDS[backend_of(_DEVICE)].batches_p2p else TorchTransport()
    if _DEVICE == "cuda":
        transport.connect(group_device())
    return Executor(model, layout, dist.get_rank(), transport, options=ExecutionOptions(device=group_device()))


def _calibrated(model: Model, settings: Settings) -> Correction:
    """How measured times compare with predicted ones while all ranks compute: on rank 0, from a batch of its own."""
    layout, calibrator = settings.layouts["plan"], Calibrator()
    executor = _executor(model, layout)
    samples = _batch(1, settings.microbatches, even=False)
    batch = batch_from_dicts([_describe(sample) for sample in samples])
    for _ in range(settings.repeats + 1):
        problem = _problem(model, settings, layout).corrected(calibrator.correction)
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            planned = plan_batch(problem, batch, budget=Budget(seconds=0.2))
            made = [(answer_of(planned, search_s=0.0, ready_ns=0), planned.packing)]
        dist.broadcast_object_list(made)
        answer, packing = made[0]
        cpu_ns = time.thread_time_ns()
        result = executor.run(answer.plan, packing, samples)
        cpu_ns = time.thread_time_ns() - cpu_ns if _DEVICE == "cpu" else -1
        measured = gather_times(answer.plan, result.moments_ns, cpu_ns)
        if measured is not None:
            calibrator.learn(answer, calibrator.correction, measured)
    return calibrator.correction


def _theirs(model: Model, layout: Layout, samples: Sequence[_Sample]) -> Callable[[], object]:
    """PyTorch's runtime on the same layers and microbatches, padded to the longest."""
    from torch.distributed import pipelining

    longest = max(length for _, length in samples)
    rank, stages = dist.get_rank(), []
    for number, chunk in enumerate(layout.chunks):
        if chunk.rank == rank:
            layers = nn.Sequential(*model.modules[0].layers[chunk.layers[0] : chunk.layers[1] + 1])
            stages.append(pipelining.PipelineStage(layers, number, len(layout.chunks), group_device()))
    padded = torch.zeros(len(samples) * longest, _WIDTH, device=group_device())
    counts = torch.zeros(len(samples) * longest, 1, device=group_device())
    for place, sample in enumerate(samples):
        padded[place * longest : place * longest + sample[1]] = numbers(sample).to(padded)
        counts[place * longest : place * longest + sample[1]] = 1.0
    total = sum(length for _, length in samples)

    def loss(output: Tensor, counted: Tensor) -> Tensor:
        return (output.square() * counted).sum() / (_WIDTH * total)

    kinds = {1: pipelining.Schedule1F1B, 2: pipelining.ScheduleInterleaved1F1B}
    chosen = kinds[len(stages)]
    schedule = chosen(stages if len(stages) > 1 else stages[0], len(samples), loss_fn=loss, scale_grads=False)
    first, last = layout.chunks[0].rank == rank, layout.chunks[-1].rank == rank

    def step() -> object:
        return schedule.step(*([padded] if first else []), **({"target": counts} if last else {}))

    return step
