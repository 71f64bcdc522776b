"""`pipeloom export`: a checkpoint as a folder that the model's own library reads."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeloom.printing import print_line

_BYTES_PER_GB = 10**9


HELP = """\
Write trained weights in the format of the model's own library, for its from_pretrained.

For runs of transformers and diffusers models. FOLDER receives safetensors with the library's keys,
configurations, and the source's processors or pipeline. Weights are read and written a few at a
time.

Example: pipeloom export runs/my_run --to my_model
"""


def export(
    checkpoint: Path = typer.Argument(
        ..., metavar="CHECKPOINT", help="A checkpoint of a run, or the run's folder for its newest good one."
    ),
    to: Path = typer.Option(..., "--to", metavar="FOLDER", help="Output folder; new or empty."),
    source: Path | None = typer.Option(
        None, "--source", metavar="FOLDER", help="Folder of the original model; default: as recorded by the run."
    ),
    ema: bool = typer.Option(False, "--ema", help="Export the average of the weights ([ema] in train.toml)."),
    shard_gb: float = typer.Option(5.0, "--shard-gb", min=0.001, max=1e6, help="Maximum size of a file in GB."),
) -> None:
    from pipeloom.integrations.export import export as write

    taken = write(
        checkpoint, to, source, weights="ema" if ema else "trained", shard_bytes=round(shard_gb * _BYTES_PER_GB)
    )
    print_line(f"{to}: the weights of {taken}")
