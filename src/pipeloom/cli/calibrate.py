"""`pipeloom calibrate`: measure this machine and write its device table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import typer

from pipeloom.cli.output import JSON_HELP, check_targets, print_json, stderr, stdout
from pipeloom.emulator import CalibrationRow, mean_error
from pipeloom.errors import InputError
from pipeloom.io import write_text
from pipeloom.printing import print_line

HELP = """\
Time products, attention, norms, copies, messages and collectives; fit and check a device table.

Errors are measured on operator shapes, whole layers and message sizes that were not fitted. The table's link inside a
node (nvlink_*) is the one between two processes of this machine. Links between machines are in the cluster file.
"""
EPILOG = "Example: pipeloom calibrate --device cpu --out cpu.toml. Runs unattended; a CPU takes a few minutes."


def calibrate(
    device: str = typer.Option(..., help="cpu or cuda."),
    out: Path = typer.Option(..., metavar="DEVICE.toml", help="The device table to write."),
    name: str = typer.Option("", help="Name of the device; default: the name that the system reports."),
    repeats: int = typer.Option(9, min=1, max=10000, help="Timed runs of each shape; the median is used."),
    plot: Path | None = typer.Option(
        None, metavar="FILE.html", help="Write an HTML page of predicted and measured times."
    ),
    links: bool = typer.Option(
        True, help="Also time messages and collectives between two processes (cuda: if there are two GPUs)."
    ),
    quick: bool = typer.Option(False, help="Time only a few small shapes, for a quick trial."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    check_targets(out, plot)
    if device not in ("cpu", "cuda"):
        raise InputError("--device", f"{device!r} is neither 'cpu' nor 'cuda'")
    if not str(out).endswith(".toml"):
        raise InputError("--out", f"{str(out)!r} does not end in .toml", "device tables are TOML")
    import torch

    from pipeloom.runtime.measure.microbench import calibrate as measure

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device", "'cuda', but torch sees no CUDA device", "use --device cpu")
    notes = stderr()
    kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    found = measure(kind, name=name, repeats=repeats, small=quick, links=links, progress=lambda line: notes.print(line))
    write_text(out, msgspec.toml.encode(msgspec.to_builtins(found.device)).decode())
    if plot is not None:
        from pipeloom.report.calibration_page import calibration_page

        write_text(plot, calibration_page(found))
    if json:
        print_json(
            {
                "device": found.device.name,
                "out": str(out),
                "mean_operator_error": mean_error(found.operators),
                "mean_layer_error": found.mean_layer_error,
                "operators": [_document(row) for row in found.operators],
                "layers": [_document(row) for row in found.layers],
                "links": [_document(row) for row in found.links],
                "mean_link_error": mean_error(found.links) if found.links else None,
                "links_note": found.links_note,
            }
        )
        return
    _print(found.layers, "Layers that were not fitted")
    if found.links:
        _print(found.links, "Messages and collectives of sizes that were not fitted")
    print_line(found.links_note[:1].upper() + found.links_note[1:] + ".")
    errors = f"operators {mean_error(found.operators):.1%}, layers {found.mean_layer_error:.1%}"
    if found.links:
        errors += f", links {mean_error(found.links):.1%}"
    print_line(f"mean error: {errors}; wrote {out}")


def _document(row: CalibrationRow) -> dict[str, Any]:
    return {"name": row.name, "predicted_s": row.predicted_s, "measured_s": row.measured_s, "error": row.error}


def _print(rows: tuple[CalibrationRow, ...], title: str) -> None:
    from pipeloom.report.any_width import Table

    table = Table(title=title, title_justify="left")
    for name in ("what", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.predicted_s * 1e3:.3g} ms", f"{row.measured_s * 1e3:.3g} ms", f"{row.error:+.1%}"
        )
    stdout().print(table)
