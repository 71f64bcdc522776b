"""`pipeloom train`: measure, lay out, then train over several processes with a plan made for every batch."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from pipeloom.cli.config import (
    TrainConfig,
    call_task,
    checkpoints_of,
    load_task,
    read_config,
    with_chosen_layout,
)
from pipeloom.cli.record import fresh_folder
from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.io import write_layout, write_text
from pipeloom.spec import Batch

if TYPE_CHECKING:
    from pipeloom.cost import Profile
    from pipeloom.planner import Setup
    from pipeloom.runtime import Model, Worker
    from pipeloom.runtime.device import DeviceType
    from pipeloom.runtime.prefetch import Describe

_PROFILED_BATCHES, _MOST_PROFILED_BATCHES = 4, 64
FirstBatches = Callable[[], tuple[list[list[Any]], list[Batch]]]
"""Gives the first few batches, and their metadata."""
LEFT_BEHIND = {
    "timeline.html": "one iteration, planned above measured: open it in a browser",
    "comparison.html": "one batch under 1F1B, interleaved 1F1B and its own plan (also comparison.svg)",
    "trace.json": "the first for Perfetto, https://ui.perfetto.dev",
    "difference.html": "where measured and planned time differ, and why",
    "history.jsonl": "every iteration in numbers",
    "plans/": "every iteration's plan as text; pipeloom verify reads them",
    "summary.json": "the run in numbers",
}


def train(
    config: Path = typer.Argument(..., metavar="CONFIG", help="A train.toml, see docs/train.md."),
    runs: Path = typer.Option(Path("runs"), help="Folder under which the run's own folder is made."),
    iterations: int = typer.Option(
        0, min=0, help="Train for fewer or more iterations than CONFIG says; 0: as it says."
    ),
    choose_layout: bool = typer.Option(
        False,
        "--choose-layout",
        help="Plan the first batches under many layouts and take the fastest, for CONFIG's.",
    ),
    resume: bool | None = typer.Option(
        None,
        "--resume/--from-scratch",
        help="Go on from the newest checkpoint, or remove what an earlier run saved. Needed where there is one.",
    ),
    max_restarts: int = typer.Option(
        0, min=0, help="Start all ranks again from the newest checkpoint, so often, when one of them dies."
    ),
    json: bool = typer.Option(
        False, "--json", help="Print summary.json on standard output, and nothing else there."
    ),
) -> None:
    """Train a model over pipeline ranks, each iteration with a schedule made for its own batch.

    Measures the model's layers on this machine, lays them over the ranks, and starts one process per rank and one
    for the planner. Leaves summary.json, trace.json, timeline.html and every plan in RUNS/<name>.

    Under torchrun the ranks are torchrun's: torchrun --nproc-per-node RANKS -m pipeloom train CONFIG; when it starts
    them again, they go on from the newest checkpoint.

    Example: pipeloom train examples/digits_vlm/train.toml
    """
    from pipeloom.runtime import choose_device, this_worker

    settings = read_config(config)
    if iterations:
        settings = msgspec.structs.replace(settings, iterations=iterations)
    if choose_layout:
        settings = with_chosen_layout(settings)
    worker = this_worker()
    num_local = settings.num_processes if worker is None else worker.num_local
    device = choose_device(settings.runtime.device, num_local)
    run = Run(config, settings, runs / settings.name, Console(stderr=json), json, device)
    if worker is not None:
        _train_as_worker(run, worker, resume)
    else:
        _train_here(run, resume, max_restarts)
    if worker is not None and worker.rank != 0:
        return
    if json:
        typer.echo((run.folder / "summary.json").read_text())
        return
    run.console.print(f"Left in {run.folder}:")
    for name, what in LEFT_BEHIND.items():
        run.console.print(f"  {name:16} {what}", highlight=False)


@dataclass(frozen=True)
class Run:
    """One call of the command: its file, its settings, its folder, where it speaks, and what it computes on."""

    config: Path
    settings: TrainConfig
    folder: Path
    console: Console
    to_stderr: bool
    device: DeviceType = "cpu"

    @property
    def setup_path(self) -> Path:
        """Where the planner's setup is written."""
        return self.folder / "setup.json"

    def begin(self, resume: bool) -> None:
        """Make the folder, and prepare all that the ranks read."""
        checkpoints = checkpoints_of(self.settings, self.config, self.folder)
        if checkpoints is not None and not resume:
            checkpoints.clear()
        fresh_folder(self.folder, go_on=resume)
        setup = prepare(self, self.setup_path)

        # Here, once, so that neither the planner nor rank 0 compiles while the others wait.
        self.console.print("Compiling the planner's kernels; they are kept for later runs ...")
        setup.problem().warm_up()

    def arguments(self, resume: bool) -> tuple[str, int, str, str, bool, bool]:
        """What every rank is called with."""
        return (
            str(self.config), self.settings.iterations, str(self.setup_path), str(self.folder), self.to_stderr, resume,
        )  # fmt: skip


def wants_resume(run: Run, resume: bool | None) -> bool:
    """Whether to go on from a checkpoint.

    Raises
    ------
    InputError
        Where there is one and nobody said what is to become of it, or nothing is ever saved.
    """
    checkpoints = checkpoints_of(run.settings, run.config, run.folder)
    if checkpoints is None:
        if resume:
            raise InputError(f"{run.config}: checkpoint", "is missing", "add [checkpoint] to save and resume")
        return False
    steps = checkpoints.steps()
    if steps and resume is None:
        raise InputError(
            str(checkpoints.folder), f"has a checkpoint after {steps[-1]} iterations",
            "--resume goes on from it, --from-scratch removes it",
        )  # fmt: skip
    return bool(resume and steps)


def _train_here(run: Run, resume: bool | None, max_restarts: int) -> None:
    """Start the ranks as processes of this machine; again from a checkpoint while restarts are left."""
    from pipeloom.cli.train_rank import train_rank
    from pipeloom.runtime import launch

    go_on = wants_resume(run, resume)
    run.begin(go_on)
    for restart in itertools.count(1):
        planners = "the planner" if run.settings.parallel.dp == 1 else f"{run.settings.parallel.dp} planners"
        run.console.print(f"Starting {run.settings.num_processes} ranks and {planners} ...")
        try:
            launch(
                train_rank, run.settings.num_processes, *run.arguments(go_on), timeout_s=run.settings.timeout_s,
                device=run.device,
            )  # fmt: skip
        except ExecutionError as error:
            checkpoints = checkpoints_of(run.settings, run.config, run.folder)
            if restart > max_restarts or checkpoints is None:
                raise
            go_on = bool(checkpoints.steps())
            where = "the newest checkpoint" if go_on else "the beginning"
            run.console.print(
                f"{error}; starting again from {where}, {restart} of {max_restarts}", style="yellow"
            )
        else:
            return


def _train_as_worker(run: Run, worker: Worker, resume: bool | None) -> None:
    """Train as one of the processes that torchrun started."""
    from pipeloom.cli.train_rank import train_rank
    from pipeloom.runtime import join_workers

    ranks, parallel = run.settings.num_processes, run.settings.parallel
    if worker.num_ranks != ranks:
        what = "layout.ranks" + " x parallel.dp" * (parallel.dp > 1) + " x parallel.tp" * (parallel.tp > 1)
        raise InputError(
            f"{run.config}: {what}", f"{ranks}, but torchrun started {worker.num_ranks} processes",
            f"use torchrun --nproc-per-node {ranks}",
        )  # fmt: skip
    # Restarted, it goes on; what is there was saved by this very run.
    go_on = wants_resume(run, True if worker.num_restarts and run.settings.checkpoint is not None else resume)
    try:
        join_workers(worker, lambda: run.begin(go_on), run.settings.timeout_s, run.device)
        train_rank(*run.arguments(go_on))
    except PipeloomError as error:
        message = str(error) if str(error).startswith("rank ") else f"rank {worker.rank}: {error}"
        print(f"pipeloom: {message}", file=sys.stderr, flush=True)
        # The group's threads may hang on a dead peer; nothing here is worth waiting for.
        os._exit(2)


def prepare(run: Run, setup_path: Path) -> Setup:
    """Measure the layers, choose the layout, and write the planner's setup.

    What was measured before the run was interrupted is taken again, so that a resumed run has the same layout.
    """
    from pipeloom.cli.train_layout import given_layout, held_copies, lay_out
    from pipeloom.cli.train_rank import build_model
    from pipeloom.plan import backend_of
    from pipeloom.planner import Setup
    from pipeloom.runtime.divide import check_divisible
    from pipeloom.search import METHODS

    settings, path = run.settings, run.config
    if settings.planner.method not in METHODS:
        known = ", ".join(METHODS)
        raise InputError(f"{path}: planner.method", f"{settings.planner.method!r} is none of {known}")

    task = load_task(settings, path)
    model = build_model(task, settings)
    for name in settings.layout.modules:
        model.spec.module(name)
    check_divisible(model, settings.parallel.degrees, settings.parallel.shard)
    given = given_layout(run, model)
    # The user's data are read once, and not at all where nothing is measured or chosen.
    first = cache(lambda: first_batches(run, task, model))
    profile = _known_profile(run, model) or measured_profile(run, task, model, first)
    layout = given or lay_out(run, model, profile, first)
    layout = msgspec.structs.replace(layout, parallelism=settings.parallel.degrees)
    write_layout(setup_path.with_name("layout.json"), layout)
    setup = Setup(
        model=model.spec, layout=layout, profile=profile, packing=settings.packing, cluster=settings.cluster,
        budget_s=settings.planner.budget_s, seed=settings.seed, method=settings.planner.method,
        strategies=settings.planner.strategies, tuning=settings.tuning, backend=backend_of(run.device),
        split_backward=settings.planner.split_backward, held_copies=held_copies(run, model),
    )  # fmt: skip
    write_text(setup_path, msgspec.json.format(msgspec.json.encode(setup), indent=1).decode() + "\n")
    return setup


def _known_profile(run: Run, model: Model) -> Profile | None:
    """The profile of the run that is resumed: it is there only then, and may lack what is asked for now."""
    from pipeloom.planner import Setup

    try:
        setup = msgspec.json.decode(run.setup_path.read_bytes(), type=Setup)
    except (OSError, msgspec.MsgspecError, PipeloomError):
        return None
    lacks = any(fit.strategies is None for fit in setup.profile.layers.values())
    return setup.profile if setup.model == model.spec and not (lacks and _needs_strategies(run)) else None


def _needs_strategies(run: Run) -> bool:
    """Whether to measure what strategies take: they are to be chosen, or memory is limited."""
    settings = run.settings
    return settings.planner.offers_a_choice or settings.cluster.memory_capacity_bytes is not None


def first_batches(run: Run, task: ModuleType, model: Model) -> tuple[list[list[Any]], list[Batch]]:
    """The first few of the user's batches, and their metadata."""
    settings = run.settings
    given = call_task(task, "batches", num_iterations=settings.iterations, **settings.data)
    return typical_batches(model, getattr(task, "describe", None), given)


def measured_profile(run: Run, task: ModuleType, model: Model, first: FirstBatches) -> Profile:
    """Time every kind of layer on the first batches."""
    from pipeloom.cli.train_rank import AUTOCAST
    from pipeloom.runtime import profile_model

    settings, placements = run.settings, run.settings.layout.modules
    batches, metadata = first()
    run.console.print(f"Measuring the layers of {model.name} on this machine ...")
    profile = profile_model(
        model,
        batches,
        describe=getattr(task, "describe", None),
        packing=settings.packing,
        placements=placements,
        metadata=metadata,
        all_sizes=settings.tuning is not None or settings.layout.kind == "chosen",
        strategies=_needs_strategies(run),
        device=run.device,
        autocast=AUTOCAST[settings.runtime.autocast],
    )
    run.console.print(
        f"{len(profile.layers)} kinds of layers; the fit is {profile.mean_error:.1%} off on average."
    )
    return profile


def typical_batches(
    model: Model, describe: Describe | None, given: Iterable[Any]
) -> tuple[list[list[Any]], list[Batch]]:
    """The first few batches with their metadata; more of them while some module has had nothing to do in any."""
    from pipeloom.runtime import user_code
    from pipeloom.runtime.prefetch import batch_of, close_reading

    batches: list[list[Any]] = []
    described: list[Batch] = []
    idle = {module.name for module in model.spec.modules}
    with user_code("batches"):
        source = iter(given)
        for samples in itertools.islice(source, _MOST_PROFILED_BATCHES):
            batches.append(list(samples))
            described.append(batch_of(samples, describe, len(described)))
            for module in model.spec.modules:
                if any(module.instance_lengths(sample) for sample in described[-1].samples):
                    idle.discard(module.name)
            if len(batches) >= _PROFILED_BATCHES and not idle:
                break
        close_reading(source)
    return batches, described
