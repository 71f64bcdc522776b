"""`pipeloom export`: a checkpoint as a folder that the model's own library reads."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeloom.printing import print_line

_BYTES_A_GB = 10**9


HELP = """\
Write trained weights as the model's own library has them, so that its from_pretrained reads them.

For runs of models of the transformers and diffusers libraries. FOLDER gets safetensors with the library's keys,
configurations, and what else the source has of processors or a pipeline. Weights are read and written a few at a
time.

Example: pipeloom export runs/my_run --to my_model
"""


def export(
    checkpoint: Path = typer.Argument(
        ..., metavar="CHECKPOINT", help="A checkpoint of a run, or the run's folder: then its newest good one."
    ),
    to: Path = typer.Option(..., "--to", metavar="FOLDER", help="New or empty folder."),
    source: Path | None = typer.Option(
        None, "--source", metavar="FOLDER", help="Folder that the model came from; by default as the run noted it."
    ),
    ema: bool = typer.Option(False, "--ema", help="Take the average of the weights ([ema] in train.toml)."),
    shard_gb: float = typer.Option(5.0, "--shard-gb", min=0.001, max=1e6, help="Most GB of one file."),
) -> None:
    """Write trained weights as the model's own library has them, so that its from_pretrained reads them."""
    from pipeloom.integrations.export import export as write

    taken = write(
        checkpoint, to, source, weights="ema" if ema else "trained", shard_bytes=round(shard_gb * _BYTES_A_GB)
    )
    print_line(f"{to}: the weights of {taken}")
