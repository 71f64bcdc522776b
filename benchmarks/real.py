"""Real computation: plans made for each batch, beside PyTorch's own schedules on the same layers, data and threads."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.arrange import ModulePlacement, separate
from pipeloom.arrange.layouts import chain
from pipeloom.baselines import interleaved_one_f_one_b, one_f_one_b
from pipeloom.cost import Correction, Profile, ProfileCosts
from pipeloom.packing import Packing, PackingSpec, packing_from_counts
from pipeloom.plan import ExecutionPlan, boundary_shapes, lower
from pipeloom.planner import Problem, answer_of, plan_batch
from pipeloom.report import markdown_table
from pipeloom.runtime import Executor, Model, Module, TorchTransport, launch, profile_model
from pipeloom.runtime.feedback import Calibrator, gather_times
from pipeloom.search import Deadline, solve
from pipeloom.spec import Batch, Layout, batch_from_dicts
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import simulate

TITLE = "Real computation beside PyTorch's schedules"
_RANKS = 4
_WIDTH, _ROWS = 256, 512
# Hidden widths of the layers: unlike ones, as of attention, experts and heads.
_HIDDEN = (256, 1024, 512, 256, 2048, 512, 256, 1024, 512, 1536, 256, 768, 512, 256, 1024, 3072)
_SYSTEMS = (
    "1F1B, PyTorch",
    "interleaved, PyTorch",
    "1F1B, our runtime",
    "interleaved, our runtime",
    "per-batch plan",
)
_Sample = tuple[int, int]
"""Number and length of a sample; its numbers are made from its number."""


@dataclass(frozen=True)
class Settings:
    """What is trained, and how often it is timed."""

    num_batches: int
    repeats: int
    microbatches: int
    threads: int
    layouts: dict[str, Layout]
    profile: Profile


def run(num_batches: int = 4, repeats: int = 5, microbatches: int = 16) -> str:
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
    threads = max(1, cores // _RANKS)
    model = build_model()
    packing, placements = PackingSpec(_ROWS), {"lm": ModulePlacement(2)}
    some = [_batch(seed, microbatches, even=False) for seed in range(2)]
    torch.set_num_threads(threads)
    profile = profile_model(model, some, describe=_describe, packing=packing, placements=placements)
    layouts = {
        "1F1B": chain(model.spec, _RANKS, 1, profile.load),
        "interleaved": chain(model.spec, _RANKS, 2, profile.load),
        "plan": separate(model.spec, _RANKS, placements, profile.load),
    }
    by_rank = launch(
        _measure,
        _RANKS,
        Settings(num_batches, repeats, microbatches, threads, layouts, profile),
        threads=threads,
    )
    found = by_rank[0]
    rows = []
    for even in (True, False):
        name = "equal" if even else "unequal"
        ours = found[name, "per-batch plan"]
        for system in _SYSTEMS:
            mean = [statistics.fmean(column) for column in zip(*found[name, system], strict=True)]
            gain = statistics.median(
                theirs / mine - 1 for (_, theirs), (_, mine) in zip(found[name, system], ours, strict=True)
            )
            promise = [
                theirs / mine - 1 for (theirs, _), (mine, _) in zip(found[name, system], ours, strict=True)
            ]
            planned = "" if not mean[0] else f"{mean[0] * 1e3:.1f}"
            promised = (
                "" if not mean[0] or system == "per-batch plan" else f"{statistics.median(promise):+.1%}"
            )
            rows.append([
                name, system, planned, f"{mean[1] * 1e3:.1f}", promised,
                "" if system == "per-batch plan" else f"{gain:+.1%}",
            ])  # fmt: skip
    shared = (
        f"The {_RANKS} ranks have {cores} cores, so they share them: these times say little about schedules."
        if cores < _RANKS
        else f"Each rank has {threads} thread(s) and as many cores of {cores}."
    )
    text = (
        f"{_RANKS} ranks, {len(_HIDDEN)} layers of unlike widths, {microbatches} microbatches; forward, backward and "
        f"all messages. {shared} Microbatches of equal length, and of unequal ones, which PyTorch's runtime must be "
        "given padded to the longest. Milliseconds of an iteration, means over "
        f"{num_batches} batches, each the median of {repeats} by turns; gain: median of how much longer the system "
        "takes than the per-batch plan. Planned: simulated, with what was measured before."
    )
    header = ["microbatches", "system", "planned, ms", "measured, ms", "gain promised", "gain measured"]
    return f"{text}\n\n{markdown_table(header, rows)}"


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
        "lm", layers, reads="sequence", hidden=("tokens", _WIDTH), output=("tokens", _WIDTH),
        inputs=lambda part: torch.cat([numbers(sample) for sample in part.samples]),
    )  # fmt: skip
    return Model([module], lambda out, _: out.square().sum() / _WIDTH, lambda sample: float(sample[1]))


def numbers(sample: _Sample) -> Tensor:
    """The rows of a sample."""
    return torch.randn(sample[1], _WIDTH, generator=torch.Generator().manual_seed(sample[0]))


def _batch(seed: int, microbatches: int, *, even: bool) -> list[_Sample]:
    """One sample a microbatch, with 64 to 512 rows where they are unequal."""
    lengths = np.random.default_rng(seed).integers(64, _ROWS + 1, size=microbatches).tolist()
    return [(seed * 1000 + i, _ROWS // 2 if even else length) for i, length in enumerate(lengths)]


def _describe(sample: _Sample) -> dict[str, Any]:
    return {"id": str(sample[0]), "text_tokens": sample[1]}


def _packing(batch: Batch, model: Model, layout: Layout) -> Packing:
    """Every sample is a microbatch, for all systems."""
    rows = tuple((i,) for i in range(len(batch.samples)))
    return packing_from_counts(batch, model.spec, layout, rows, tuple(((1,),) for _ in rows))


# ------------------------------------------------------------------ on the ranks


def _measure(settings: Settings) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """On one rank: per kind of data and system, planned and measured seconds of every batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings.threads)
    model = build_model()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
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
            for repeat in range(settings.repeats + 1):
                for name, step in steps.items():
                    seconds = _timed(step, model)
                    # The first is to warm up: PyTorch's runtime learns shapes in it.
                    if repeat:
                        times[name].append(seconds)
            for name, step in steps.items():
                planned = step.planned_s if isinstance(step, _Ours) else 0.0
                row = (planned, statistics.median(times[name]))
                found.setdefault(("equal" if even else "unequal", name), []).append(row)
    return found


def _timed(step: Callable[[], object], model: Model) -> float:
    """Seconds from the first start to the last end over all ranks."""
    for layer in model.modules[0].layers:
        layer.zero_grad()
    dist.barrier()
    begin = time.monotonic_ns()
    step()
    span = torch.tensor([-begin, time.monotonic_ns()])
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return int(span.sum()) / 1e9


class _Ours:
    """One system in our runtime, on one batch."""

    def __init__(
        self, model: Model, settings: Settings, name: str, samples: Sequence[_Sample], correction: Correction
    ) -> None:
        layout = settings.layouts[name]
        self.samples = samples
        batch = batch_from_dicts([_describe(sample) for sample in samples])
        self.packing = _packing(batch, model, layout)
        self.executor = Executor(model, layout, dist.get_rank(), TorchTransport())
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
        schedule = solve(graph, budget=Deadline(1.0), seed=0).schedule
    else:
        schedule = {"1F1B": one_f_one_b, "interleaved": interleaved_one_f_one_b}[name](graph)
    timeline = simulate(graph, schedule)
    shapes = boundary_shapes(model.spec, layout)
    return lower(graph, schedule, timeline, layout, packing, shapes), timeline.makespan_ns / 1e9


def _problem(model: Model, settings: Settings, layout: Layout) -> Problem:
    return Problem(model.spec, layout, ProfileCosts(model.spec, settings.profile), PackingSpec(_ROWS))


def _calibrated(model: Model, settings: Settings) -> Correction:
    """How measured times compare with predicted ones while all ranks compute: on rank 0, from a batch of its own."""
    layout, calibrator = settings.layouts["plan"], Calibrator()
    executor = Executor(model, layout, dist.get_rank(), TorchTransport())
    samples = _batch(1, settings.microbatches, even=False)
    batch = batch_from_dicts([_describe(sample) for sample in samples])
    for _ in range(settings.repeats + 1):
        problem = _problem(model, settings, layout).corrected(calibrator.correction)
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            planned = plan_batch(problem, batch, budget=Deadline(0.2), seed=0)
            made = [(answer_of(planned, search_s=0.0, ready_ns=0), planned.packing)]
        dist.broadcast_object_list(made)
        answer, packing = made[0]
        cpu_ns = time.thread_time_ns()
        result = executor.run(answer.plan, packing, samples)
        measured = gather_times(answer.plan, result.times, time.thread_time_ns() - cpu_ns)
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
            stages.append(pipelining.PipelineStage(layers, number, len(layout.chunks), torch.device("cpu")))
    padded = torch.zeros(len(samples) * longest, _WIDTH)
    counts = torch.zeros(len(samples) * longest, 1)
    for place, sample in enumerate(samples):
        padded[place * longest : place * longest + sample[1]] = numbers(sample)
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
