"""`pipeloom report`: a training run, or schedules side by side."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from pipeloom.bounds import Number, Seconds
from pipeloom.cli.output import JSON_HELP, check_targets, draw, figures_document, print_json, print_written, stdout
from pipeloom.cli.simulate import read_track
from pipeloom.errors import InputError
from pipeloom.io import read_instance, read_text, write_text
from pipeloom.io.document import convert, read_document
from pipeloom.outputs import check_input
from pipeloom.printing import print_line
from pipeloom.report import comparison_table, summary_table

HELP = """\
Show a training run, or compare schedules of one instance.

With a folder of pipeloom train: shows its numbers; --html and --trace copy its timeline and trace.

With an instance and one or more schedules: shows times, bubbles, gaps and memory, relative to the first schedule
(1.00 x). Pictures show all schedules on one time axis.
"""
EPILOG = (
    "Examples: pipeloom report runs/digits_vlm. pipeloom report batch.json 1f1b.json plan.json --html compare.html "
    "draws both schedules on one time axis."
)


_COPIED = ("timeline.html", "trace.json")


class RunSummary(msgspec.Struct, frozen=True):
    """The fields of summary.json that are checked and shown."""

    name: str
    iterations: Number
    mean_planned_s: Seconds
    mean_measured_s: Seconds


def report(
    source: Path = typer.Argument(..., metavar="RUN_OR_INSTANCE", help="A run's folder, or a pipeloom.instance/1."),
    schedules: list[Path] | None = typer.Argument(None, metavar="SCHEDULE...", help="pipeloom.schedule/1 files."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with the timeline."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Write a Chrome trace, for Perfetto."),
    svg: Path | None = typer.Option(None, metavar="FILE", help="Write a static SVG image."),
    title: str = typer.Option("", help="Heading of the page and the table; default: the name in the file."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    check_targets(html, trace, svg)
    if source.is_dir():
        _report_run(source, schedules or [], html, trace, svg, json)
        return
    if not schedules:
        raise InputError(str(source), "is not a folder of a run, and there is no schedule", "add SCHEDULE files")
    graph = read_instance(source)
    tracks = [read_track(graph, path) for path in schedules]
    heading = title or graph.name or source.stem
    written = draw(tracks, title=heading, trace_file=trace, html_file=html, svg_file=svg)
    if json:
        systems = [figures_document(track) for track in tracks]
        print_json({"instance": graph.name, "systems": systems, "written": written})
        return
    console = stdout()
    console.print(comparison_table(tracks, title=heading))
    print_written(written)


def _report_run(
    folder: Path, schedules: list[Path], html: Path | None, trace: Path | None, svg: Path | None, json: bool
) -> None:
    if schedules:
        raise InputError(
            str(schedules[0]), "is set with a run's folder", "give either a folder, or INSTANCE SCHEDULE..."
        )
    if svg is not None:
        raise InputError("--svg", "cannot be made from a run's folder", "use --html, or an instance and schedules")
    path = folder / "summary.json"
    if not path.is_file():
        raise InputError(str(folder), "has no summary.json", "give a folder of pipeloom train, runs/NAME")
    fields = read_document(path)
    convert(fields, RunSummary, str(path))
    for name in _COPIED:
        check_input(folder / name)
    copies = [(target, read_text(folder / name)) for name, target in zip(_COPIED, (html, trace), strict=True) if target]
    for target, text in copies:
        write_text(target, text)
    written = [str(target) for target, _ in copies]
    if json:
        print_json(fields | {"written": written})
        return
    console = stdout()
    plain = {name: value for name, value in fields.items() if not isinstance(value, dict | list)}
    console.print(summary_table(plain, title=str(folder)))
    for name, heading in (("evaluation", "Evaluation"), ("comparison", "Mean planned seconds on the same batches")):
        numbers = fields.get(name)
        if isinstance(numbers, dict) and numbers:
            console.print(summary_table(numbers, title=heading))
    for name in (*_COPIED, "plans"):
        if (folder / name).exists():
            print_line(f"{folder / name}")
