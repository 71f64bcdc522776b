"""`pipeloom train`: measure, choose a layout, then train over several processes with a plan for every batch."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import typer

from pipeloom.cli import main
from pipeloom.cli.options import check_method
from pipeloom.cli.output import print_json_text
from pipeloom.errors import InputError
from pipeloom.forks import can_fork, is_fork, run_in_fork
from pipeloom.heartbeat import doing, paused
from pipeloom.limits import MAX_COUNT
from pipeloom.printing import print_error, print_line
from pipeloom.training.warm import begin_warm

if TYPE_CHECKING:
    from pipeloom.training import RunConfig

_FILES = {
    "timeline.html": "one iteration, planned above measured: open it in a browser",
    "comparison.html": "one batch under 1F1B, interleaved 1F1B and its own plan (also comparison.svg)",
    "trace.json": "the same iteration for Perfetto, https://ui.perfetto.dev",
    "difference.html": "where measured and planned time differ, and why",
    "history.jsonl": "the numbers of every iteration",
    "plans/": "plans of the newest iterations as text; pipeloom verify reads them",
    "summary.json": "the numbers of the run",
}
_WAITING = {"comparison.html": "one batch under each system, measured on ranks that wait: open it in a browser"}
_KERNELS = ("pipeloom.cli.output:load_kernels",)


HELP = """\
Train a model over pipeline ranks, with a schedule for each batch.

Measures the model's layers on this machine, places them on the ranks, and starts one process per rank and one
for the planner. Writes summary.json, trace.json, timeline.html and plans to RUNS/<name>.

The ranks can also be started by torchrun: torchrun --nproc-per-node RANKS -m pipeloom train CONFIG. When it restarts
them, they resume from the newest checkpoint.

Example: pipeloom train examples/digits_vlm/train.toml
"""


def train(
    context: typer.Context,
    config: Path = typer.Argument(..., metavar="CONFIG", help="A train.toml; docs/train-config.md lists its fields."),
    runs: Path = typer.Option(Path("runs"), help="Parent folder of the run's folder."),
    iterations: int = typer.Option(0, min=0, max=MAX_COUNT, help="Number of iterations; 0: as in CONFIG."),
    choose_layout: bool = typer.Option(
        False,
        "--choose-layout",
        help="Plan the first batches under many layouts and use the fastest, in place of CONFIG's layout.",
    ),
    resume: bool | None = typer.Option(
        None,
        "--resume/--from-scratch",
        help="Resume from the newest checkpoint, or remove all checkpoints. Required if there is a checkpoint.",
    ),
    restarts: int = typer.Option(
        0,
        min=0,
        max=MAX_COUNT,
        help="Maximum number of restarts from the newest good checkpoint after a rank dies or fails.",
    ),
    json: bool = typer.Option(False, "--json", help="Print only summary.json on standard output."),
) -> None:
    # First import what ranks and planner are forked with; this command continues in a fork too.
    if not is_fork():
        print_line("Importing PyTorch ...", to_stderr=json)
        doing("importing PyTorch and loading the planner's kernels")
        if begin_warm(_KERNELS) and context.obj is not None and can_fork():
            with paused():
                code = run_in_fork(main, (context.obj,))
            _exit_as(code)
    from pipeloom.cli.progress import Terminal
    from pipeloom.training import TrainingRun

    terminal = Terminal(to_stderr=json)
    run = TrainingRun.from_toml(config, runs=runs, display=terminal)
    settings = msgspec.structs.replace(run.config, iterations=iterations or run.config.iterations)
    run = replace(run, config=with_chosen_layout(settings) if choose_layout else settings)
    check_method(f"{config}: planner.method", settings.planner.method)
    summary = run.train(resume=resume, restarts=restarts)
    if summary is None:
        return
    if json:
        print_json_text((run.folder / "summary.json").read_text())
        return
    terminal.say(f"Files in {run.folder}:")
    # What is to be opened first comes first.
    files = _FILES if summary.waiting is None else _WAITING | {n: w for n, w in _FILES.items() if n not in _WAITING}
    for name, what in files.items():
        if (run.folder / name).exists():
            terminal.say(f"  {name:16} {what}")


def _exit_as(code: int) -> NoReturn:
    """Exit with the code of the process that trained; report the signal if one ended it."""
    if code < 0:
        print_error(f"the training process was ended by {signal.Signals(-code).name}")
    sys.exit(code if code >= 0 else 128 - code)


def with_chosen_layout(config: RunConfig) -> RunConfig:
    """Return the config with the layout that is fastest in planning, instead of its [layout].

    Modules without settings of their own stay excluded from encoder data parallelism. Raise `InputError` if the run's
    orders are PipeTune's, which fixes its layout.
    """
    from pipeloom.layout import ModulePlacement

    if config.tuning is not None and not config.tuning.searches:
        raise InputError(
            "--choose-layout",
            f"given for a run with tuning.order = {config.tuning.order!r}, whose encoders are on the first rank",
            "let tuning.order be 'search'",
        )
    excluded = {name: place for name, place in config.layout.modules.items() if place == ModulePlacement()}
    layout = msgspec.structs.replace(config.layout, kind="chosen", modules=excluded, path="")
    return msgspec.structs.replace(config, layout=layout)
