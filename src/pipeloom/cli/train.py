"""`pipeloom train`: measure, lay out, then train over several processes with a plan made for every batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from pipeloom.cli.config import TrainConfig, call_task, load_task, read_config
from pipeloom.cli.record import fresh_folder
from pipeloom.errors import InputError
from pipeloom.io import write_layout, write_text

if TYPE_CHECKING:
    from pipeloom.runtime import Model

_PROFILED_BATCHES, _MOST_PROFILED_BATCHES = 4, 64
LEFT_BEHIND = {
    "timeline.html": "one iteration, planned above measured: open it in a browser",
    "comparison.html": "one batch under 1F1B, interleaved 1F1B and its own plan (also comparison.svg)",
    "trace.json": "the first for Perfetto, https://ui.perfetto.dev",
    "plans/": "every iteration's plan as text; pipeloom verify reads them",
    "summary.json": "the run in numbers",
}


def train(
    config: Path = typer.Argument(..., metavar="CONFIG", help="A train.toml, see docs/train.md."),
    runs: Path = typer.Option(Path("runs"), help="Folder under which the run's own folder is made."),
    iterations: int = typer.Option(
        0, min=0, help="Train for fewer or more iterations than CONFIG says; 0: as it says."
    ),
    json: bool = typer.Option(
        False, "--json", help="Print summary.json on standard output, and nothing else there."
    ),
) -> None:
    """Train a model over pipeline ranks, each iteration with a schedule made for its own batch.

    Measures the model's layers on this machine, lays them over the ranks, and starts one process per rank and one
    for the planner. Leaves summary.json, trace.json, timeline.html and every plan in RUNS/<name>.

    Example: pipeloom train examples/digits_vlm/train.toml
    """
    console = Console(stderr=json)
    settings = read_config(config)
    if iterations:
        settings = msgspec.structs.replace(settings, iterations=iterations)
    folder = runs / settings.name
    fresh_folder(folder)
    setup_path = folder / "setup.json"
    prepare(console, settings, config, setup_path)
    from pipeloom.cli.train_rank import train_rank
    from pipeloom.runtime import launch
    from pipeloom.search import warm_up

    # Here, once, so that neither the planner nor rank 0 compiles while the others wait.
    console.print("Compiling the planner's kernels; they are kept for later runs ...")
    warm_up()
    console.print(f"Starting {settings.layout.ranks} ranks and the planner ...")
    launch(
        train_rank,
        settings.layout.ranks,
        str(config),
        settings.iterations,
        str(setup_path),
        str(folder),
        json,
    )
    if json:
        typer.echo((folder / "summary.json").read_text())
        return
    console.print(f"Left in {folder}:")
    for name, what in LEFT_BEHIND.items():
        console.print(f"  {name:16} {what}", highlight=False)


def prepare(console: Console, settings: TrainConfig, path: Path, setup_path: Path) -> None:
    """Measure the layers, choose the layout, and write the planner's setup."""
    from pipeloom.arrange import separate
    from pipeloom.cli.train_rank import build_model
    from pipeloom.planner import Setup
    from pipeloom.runtime import profile_model
    from pipeloom.search import METHODS

    if settings.planner.method not in METHODS:
        known = ", ".join(METHODS)
        raise InputError(f"{path}: planner.method", f"{settings.planner.method!r} is none of {known}")

    task = load_task(settings, path)
    model = build_model(task, settings)
    for name in settings.layout.modules:
        model.spec.module(name)
    placements = settings.layout.modules
    given = call_task(task, "batches", num_iterations=settings.iterations, **settings.data)
    batches = typical_batches(model, task.describe, given)
    console.print(f"Measuring the layers of {model.name} on this machine ...")
    profile = profile_model(
        model, batches, describe=task.describe, packing=settings.packing, placements=placements
    )
    console.print(
        f"{len(profile.layers)} kinds of layers; the fit is {profile.mean_error:.1%} off on average."
    )
    layout = separate(model.spec, settings.layout.ranks, placements, profile.load)
    write_layout(setup_path.with_name("layout.json"), layout)
    setup = Setup(
        model=model.spec, layout=layout, profile=profile, packing=settings.packing, cluster=settings.cluster,
        budget_s=settings.planner.budget_s, seed=settings.seed, method=settings.planner.method,
    )  # fmt: skip
    write_text(setup_path, msgspec.json.format(msgspec.json.encode(setup), indent=1).decode() + "\n")


def typical_batches(
    model: Model, describe: Callable[[Any], dict[str, Any]], given: Iterable[Any]
) -> list[list[Any]]:
    """The first few batches, and more of them while some module has had nothing to do in any."""
    from pipeloom.runtime import user_code
    from pipeloom.spec import batch_from_dicts

    batches: list[list[Any]] = []
    idle = {module.name for module in model.spec.modules}
    with user_code("batches"):
        for samples in itertools.islice(given, _MOST_PROFILED_BATCHES):
            batches.append(list(samples))
            metadata = batch_from_dicts([describe(sample) for sample in batches[-1]])
            for module in model.spec.modules:
                if any(module.instance_lengths(sample) for sample in metadata.samples):
                    idle.discard(module.name)
            if len(batches) >= _PROFILED_BATCHES and not idle:
                break
    return batches
