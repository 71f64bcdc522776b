"""`pipeloom profile`: measure the layers of a model, as input for `pipeloom arrange`."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeloom.cli.output import JSON_HELP, check_targets, print_json, print_written
from pipeloom.io import write_layers
from pipeloom.printing import print_line

HELP = """\
Measure a model's layers on this machine, and write the cost of each on a typical microbatch.

Nothing is trained. The model must have one module. CONFIG defines ranks, replicas, packing, links and memory;
its fields are in docs/train-config.md.
"""
EPILOG = (
    "Example: pipeloom profile examples/moe_mamba_lm/train.toml --out layers.json, then pipeloom arrange layers.json "
    '--budget 5 --out layout.json; in train.toml: [layout] kind = "file", path = "layout.json".'
)


def profile(
    config: Path = typer.Argument(..., metavar="CONFIG", help="A train.toml; docs/train-config.md lists its fields."),
    out: Path = typer.Option(..., metavar="LAYERS", help="File for the pipeloom.layers/1."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    from pipeloom.cli.progress import Terminal
    from pipeloom.training import TrainingRun

    check_targets(out)
    run = TrainingRun.from_toml(config, runs=out.parent, display=Terminal(to_stderr=True))
    table = run.measure_layers()
    write_layers(out, table)
    if json:
        print_json(
            {
                "name": table.name,
                "num_layers": len(table.layers),
                "num_ranks": table.num_ranks,
                "num_microbatches": table.num_microbatches,
                "written": [str(out)],
            }
        )
        return
    print_line(f"{len(table.layers)} layers, {table.num_ranks} ranks, {table.num_microbatches} microbatches")
    print_written([out])
