"""`pipeloom profile`: measure the layers of a model that is to be trained, as `pipeloom arrange` reads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import typer
from rich.console import Console

from pipeloom.cli.config import load_task, read_config
from pipeloom.cli.output import JSON_HELP, check_targets, print_json
from pipeloom.io import write_layers

EPILOG = (
    "Example: pipeloom profile examples/moe_mamba_lm/train.toml --out layers.json, then pipeloom arrange layers.json "
    '--budget 5 --out layout.json; in train.toml: [layout] kind = "file", path = "layout.json".'
)


def profile(
    config: Path = typer.Argument(..., metavar="CONFIG", help="A train.toml, see docs/train.md."),
    out: Path = typer.Option(..., metavar="LAYERS", help="File for the pipeloom.layers/1."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Measure a model's layers on this machine, and write what each costs on a typical microbatch.

    Nothing is trained. The model has one module; CONFIG says how many ranks and replicas there are, how batches are
    packed, and what links and memory the ranks have.
    """
    from pipeloom.cli.train import Run, first_batches, measured_profile
    from pipeloom.cli.train_layout import measured_layers
    from pipeloom.cli.train_rank import build_model
    from pipeloom.runtime import choose_device

    check_targets(out)
    settings = read_config(config)
    device = choose_device(settings.runtime.device, 1)
    run = Run(config, settings, out.parent, Console(stderr=True), True, device)
    task = load_task(settings, config)
    model = build_model(task, settings)
    for name in settings.layout.modules:
        model.spec.module(name)
    first = cache(lambda: first_batches(run, task, model))
    table = measured_layers(run, model, measured_profile(run, task, model, first), first)
    write_layers(out, table)
    if json:
        print_json({
            "name": table.name, "num_layers": len(table.layers), "num_ranks": table.num_ranks,
            "num_microbatches": table.num_microbatches, "written": [str(out)],
        })  # fmt: skip
        return
    typer.echo(f"{len(table.layers)} layers, {table.num_ranks} ranks, {table.num_microbatches} microbatches")
    typer.echo(f"wrote {out}")
