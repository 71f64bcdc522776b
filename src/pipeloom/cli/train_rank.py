"""One rank of `pipeloom train`: builds its model, trains, and on rank 0 shows and records."""

from __future__ import annotations

import inspect
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
from rich.console import Console

from pipeloom.cli.config import (
    OptimizerConfig,
    TrainConfig,
    call_task,
    checkpoints_of,
    load_task,
    read_config,
)
from pipeloom.cli.differences import difference_page
from pipeloom.cli.progress import Progress
from pipeloom.cli.record import Recorder, Summary, closing_tables
from pipeloom.errors import InputError
from pipeloom.io import write_text
from pipeloom.packing import cost_loads
from pipeloom.planner import Planner, Problem, Setup
from pipeloom.planner.compare import SystemTimeline, chain_layouts, compare_systems
from pipeloom.planner.difference import Difference, difference, mean_difference
from pipeloom.planner.replay import answered_graph, timeline_of
from pipeloom.report import make_track, timeline_html, timeline_svg, trace
from pipeloom.runtime import Model, StepReport, TcpPlanStore, Trainer, group_device
from pipeloom.search import Deadline
from pipeloom.timeline import LowerBound

_NUM_COMPARED = 40
AUTOCAST = {None: None, "bf16": torch.bfloat16}


def train_rank(
    config_path: str, iterations: int, setup_path: str, folder: str, to_stderr: bool, resume: bool
) -> None:
    """Train as one rank of the default process group.

    Parameters
    ----------
    config_path : str
        The train.toml.
    iterations : int
        How many to train for.
    setup_path : str
        The planner's `Setup` as JSON, made once by the launching process, so that all ranks have one layout.
    folder : str
        Where rank 0 writes what the run leaves behind.
    to_stderr : bool
        Show progress on standard error, keeping standard output free.
    resume : bool
        Go on from the newest checkpoint.
    """
    path = Path(config_path)
    config = msgspec.structs.replace(read_config(path), iterations=iterations)
    task = load_task(config, path)
    setup = read_setup(Path(setup_path))
    model = build_model(task, config)
    planner = Planner(setup, TcpPlanStore.host, deadline_s=config.planner.deadline_s)
    optimizer, costs = config.optimizer, setup.costs
    trainer = Trainer(
        model,
        setup.layout,
        planner,
        describe=getattr(task, "describe", None),
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters,
            lr=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            betas=optimizer.betas,
            # Divided and whole parameters do not go through one call together.
            foreach=None if config.parallel.divides_nothing else False,
        ),
        learning_rate=learning_rates(optimizer, config.iterations),
        clip_norm=optimizer.clip_norm,
        checkpoints=checkpoints_of(config, path, Path(folder)),
        timeout_s=config.timeout_s,
        loads=lambda batch: cost_loads(batch, setup.model, setup.layout, costs),
        device=group_device(),
        autocast=AUTOCAST[config.runtime.autocast],
        random_seed=config.seed,
        shard=config.parallel.shard,
    )
    first = trainer.resume() if resume else 0
    batches = untrained_batches(trainer, task, config, first)
    if trainer.rank != 0:
        for _ in trainer.run(batches, first):
            pass
        trainer.gather_model()
        return
    console = Console(stderr=to_stderr)
    recorder = Recorder(Path(folder), first)
    if first:
        console.print(f"Going on from the checkpoint after {first} iterations.")
    begin = time.monotonic()
    with Progress(console, config.iterations, first) as progress:
        for report in trainer.run(batches, first):
            progress.show(report)
            recorder.add(report)
    elapsed_s = time.monotonic() - begin
    trainer.gather_model()
    # Everything is on disk before the user's evaluation, in which anything may happen.
    summary = finish(recorder, config, setup, model, elapsed_s)
    if hasattr(task, "evaluate"):
        summary = recorder.write(with_evaluation(summary, task, model))
    console.print(closing_tables(summary))


def read_setup(path: Path) -> Setup:
    """Read what rank 0 has prepared for all ranks.

    Raises
    ------
    InputError
        When it is not there: on another host, most likely.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Setup)
    except OSError as error:
        raise InputError(
            str(path.absolute()), f"cannot be read on host {socket.gethostname()} ({error.strerror}), rank 0 wrote it",
            "with several hosts, let --runs be a folder that all of them share",
        ) from error  # fmt: skip


def untrained_batches(
    trainer: Trainer, task: ModuleType, config: TrainConfig, first: int
) -> Iterator[Sequence[Any]]:
    """The batches from an iteration on; a task whose ``batches`` take a ``start`` need not make the others again."""
    arguments, skipped = dict(config.data), first
    if first and "start" in inspect.signature(task.batches).parameters:
        # One is looked at again, to see that it is the one that was trained.
        arguments["start"], skipped = first - 1, 1
    batches = call_task(task, "batches", num_iterations=config.iterations, **arguments)
    return trainer.skip_trained(batches, skipped)


def with_evaluation(summary: Summary, task: ModuleType, model: Model) -> Summary:
    """Call the task's ``evaluate`` and add what it says.

    Raises
    ------
    InputError
        When it raises, or returns anything but numbers by name.
    """
    scores = call_task(task, "evaluate", model)
    where = f"{task.__file__}: evaluate"
    if not isinstance(scores, Mapping):
        raise InputError(where, f"returned a {type(scores).__name__}", "return a dictionary of numbers")
    for name, score in scores.items():
        if not isinstance(score, int | float):
            raise InputError(where, f"returned {type(score).__name__} for {name!r}", "return numbers")
    return msgspec.structs.replace(
        summary, digit_accuracy=scores.get("digit_accuracy"), exact_match=scores.get("exact_match"),
        evaluation=dict(scores),
    )  # fmt: skip


def build_model(task: ModuleType, config: TrainConfig) -> Model:
    """Build the task's model in the dtype of the run."""
    torch.set_default_dtype(getattr(torch, config.dtype))
    model = call_task(task, "build_model", seed=config.seed, **config.model)
    if not isinstance(model, Model):
        raise InputError(
            f"{task.__file__}: build_model", f"returned a {type(model).__name__}", "return a pipeloom.Model"
        )
    return model


def learning_rates(config: OptimizerConfig, iterations: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine to zero."""

    def rate(iteration: int) -> float:
        if iteration < config.warmup_iterations:
            return config.learning_rate * (iteration + 1) / config.warmup_iterations
        done = (iteration - config.warmup_iterations) / max(1, iterations - config.warmup_iterations)
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    return rate


def finish(recorder: Recorder, config: TrainConfig, setup: Setup, model: Model, elapsed_s: float) -> Summary:
    """Compare with the baselines, draw one iteration, and write everything but the evaluation."""
    reports = recorder.reports
    systems: dict[str, list[SystemTimeline]] = {}
    explained = None
    # There are none where all was trained before the checkpoint: then only the numbers are written again.
    if reports:
        systems = compared_systems(config, setup, reports)
        write_timelines(recorder, setup, reports)
        write_comparison(recorder.folder, list(systems.values()))
        explained = explain(setup.problem(), reports)
        write_text(recorder.folder / "difference.html", difference_page(config.name, explained))
    return recorder.summarise(
        name=config.name,
        elapsed_s=elapsed_s,
        num_ranks=setup.layout.num_ranks,
        num_parameters=sum(
            p.numel() for module in model.modules for x in module.layers for p in x.parameters()
        ),
        seed=config.seed,
        layout=setup.layout.digest,
        comparison={
            name: sum(system.timeline.makespan_ns for system in runs) / len(runs) / 1e9
            for name, runs in systems.items()
        },
        comparison_batches=len(next(iter(systems.values()), [])),
        difference=explained,
    )


def compared_systems(
    config: TrainConfig, setup: Setup, reports: list[StepReport]
) -> dict[str, list[SystemTimeline]]:
    """Some of the batches under each system, with the costs as they were last corrected."""
    problem = setup.problem().corrected(reports[-1].correction)
    batches = [report.batch for report in reports if report.batch is not None]
    layouts = chain_layouts(problem, setup.profile.load)
    systems: dict[str, list[SystemTimeline]] = {}
    for batch in batches[:: max(1, len(batches) // _NUM_COMPARED)]:
        budget = Deadline(config.planner.budget_s)
        for system in compare_systems(problem, layouts, batch, budget=budget, seed=config.seed):
            systems.setdefault(system.name, []).append(system)
    return systems


def explain(problem: Problem, reports: list[StepReport]) -> Difference:
    """Where measured and planned time differ, over the iterations whose reports were kept, the first left out."""
    found = [
        difference(problem, report.batch, report.answer, report.correction, report.measured)
        for report in reports[1:] or reports
        if report.batch is not None and report.answer is not None and report.measured is not None
    ]
    return mean_difference(found)


def write_timelines(recorder: Recorder, setup: Setup, reports: list[StepReport]) -> None:
    """Write ``trace.json`` and ``timeline.html`` of the iteration nearest to the mean measured time."""
    settled = [report for report in reports[len(reports) // 2 :] if report.fresh] or reports
    mean = sum(report.measured_s for report in settled) / len(settled)
    report = min(settled, key=lambda each: abs(each.measured_s - mean))
    answer, batch = report.answer, report.batch
    assert answer is not None
    assert batch is not None
    problem = setup.problem()
    graph = answered_graph(problem, batch, answer, report.correction)
    bound = LowerBound(answer.lower_bound_ns, answer.lower_bound)
    names = setup.layout.chunk_names
    planned = timeline_of(graph, problem, answer, answer.planned_start_ns)
    measured = timeline_of(graph, problem, answer, report.measured_ns)
    tracks = [
        make_track("planned", graph, None, planned, bound, names),
        make_track("measured", graph, None, measured, None, names),
    ]
    title = f"{recorder.folder.name}, iteration {report.iteration}"
    note = "Memory is planned bytes in both; measured times are real computation on this machine's cores."
    write_text(recorder.folder / "trace.json", trace(tracks))
    write_text(recorder.folder / "timeline.html", timeline_html(tracks, title=title, note=note))


def write_comparison(folder: Path, systems: list[list[SystemTimeline]]) -> None:
    """Write ``comparison.html`` and ``comparison.svg``: all systems on one batch, one time axis.

    The batch is the one whose gain over the first system is the median of all compared ones.
    """
    gains = [
        first.timeline.makespan_ns / last.timeline.makespan_ns
        for first, last in zip(systems[0], systems[-1], strict=True)
    ]
    median = sorted(range(len(gains)), key=gains.__getitem__)[len(gains) // 2]
    chosen = [runs[median] for runs in systems]
    tracks = [
        make_track(x.name, x.graph, x.schedule, x.timeline, x.lower_bound, x.layout.chunk_names)
        for x in chosen
    ]
    title = f"{folder.name}: one batch under each system, planned"
    note = "Simulated from measured layer costs; the same samples, microbatches and costs for all."
    write_text(folder / "comparison.html", timeline_html(tracks, title=title, note=note))
    write_text(folder / "comparison.svg", timeline_svg(tracks))
