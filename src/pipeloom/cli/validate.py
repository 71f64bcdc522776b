"""`pipeloom validate`: hold the emulator against published training runs, or those of a user's own cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from pipeloom.cli.output import JSON_HELP, print_json, stderr, stdout
from pipeloom.errors import InputError
from pipeloom.heartbeat import doing
from pipeloom.printing import print_line
from pipeloom.report import share_text, size_text
from pipeloom.report.any_width import Table

if TYPE_CHECKING:
    from pipeloom.spec.hardware import DeviceSpec
    from pipeloom.validation import PaperPrediction, Prediction, PublishedRun, Summary

HELP = """\
Predict training runs whose times are known, and print the errors.

Reads a table of runs, CSV with one run a row (docs/formats.md), or the published runs that come with Pipeloom. Prints
each run's predicted time with an 80 % interval, its published time and peak memory, or the reason why the emulator
cannot express the run; then the errors by device and kind of model. Without a table, it also predicts the figures of
four papers, over the range of what each paper leaves unstated.
"""
EPILOG = "Example: pipeloom validate, or pipeloom validate my_runs.csv --json."


def validate(
    runs: Path | None = typer.Argument(
        None, metavar="[RUNS.csv]", help="A table of runs; default: the published runs that come with Pipeloom."
    ),
    leave_out: Literal["device", "source", "model"] | None = typer.Option(
        None, help="Fit the constants, and make each interval, without the runs of the same device, source or model."
    ),
    device: str = typer.Option(
        "", metavar="DEVICE.toml", help="A blended table (`calibrate --base`) for the runs on its device."
    ),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    from pipeloom.validation import paper_figures, predict, predict_figure, published_runs, read_runs, summarize

    own = _own_table(device, leave_out is not None) if device else None
    table: Sequence[PublishedRun] = published_runs() if runs is None else read_runs(runs)
    predictions = []
    with stderr().status("predicting ...") as status:
        for number, run in enumerate(table, 1):
            status.update(f"predicting run {number} of {len(table)} ...")
            doing(f"predicting run {number} of {len(table)}")
            predictions.append(predict(run, leave_out, own))
        papers = []
        for number, figure in enumerate(paper_figures() if runs is None else (), 1):
            status.update(f"predicting figure {number} of the papers ...")
            doing(f"predicting figure {number} of the papers")
            papers.append(predict_figure(figure))
    summary = summarize(predictions)
    if json:
        document = {"runs": [each.row for each in predictions], "summary": _document(summary)}
        print_json(document | ({"papers": [each.row for each in papers]} if papers else {}))
        return
    if runs is not None:
        _print_runs(predictions)
    _print_summary(summary)
    if papers:
        _print_papers(papers)


def _own_table(device: str, leaves_out: bool) -> DeviceSpec:
    from pipeloom.spec.catalog import load_device
    from pipeloom.validation import published_device

    if leaves_out:
        raise InputError(
            "--leave-out",
            "fits the constants again, and the table of --device has constants of its own",
            "give one of them",
        )
    table = load_device(device)
    if published_device(table.name) is None:
        raise InputError(
            "--device", f"{table.name!r} is the name of no device with published runs", "give its table that name"
        )
    return table


def _document(summary: Summary) -> dict[str, Any]:
    return {
        "runs": summary.num_runs,
        "expressed": summary.num_expressed,
        "errors": [each._asdict() for each in summary.errors],
        "tau": summary.tau,
        "regret": None if summary.regret is None else summary.regret._asdict(),
        "memory": [each._asdict() for each in summary.memory],
        "reasons": summary.reasons,
    }


def _print_runs(predictions: Sequence[Prediction]) -> None:
    table = Table("run", "predicted", "80 % interval", "published", "error", "peak memory", title="Runs")
    for each in predictions:
        if not each.reason:
            interval = f"{each.low_s:.4g} to {each.high_s:.4g} s"
            published = each.run.measured_s
            table.add_row(
                each.run.id,
                f"{each.seconds:.4g} s",
                interval,
                f"{published:.4g} s" if published else "",
                "" if each.error is None else f"{each.error:+.1%}",
                size_text(each.peak_bytes),
            )
    if table.row_count:
        stdout().print(table)
    for each in predictions:
        if each.reason:
            print_line(f"  {each.run.id}: {each.reason}")
        for note in each.notes:
            print_line(f"  {each.run.id}: {note}")


def _print_summary(summary: Summary) -> None:
    print_line(f"{summary.num_expressed} of {summary.num_runs} runs can be expressed.")
    if summary.errors:
        columns = ("", "runs", "median", "absolute", "90th percentile", "in interval", "half width")
        table = Table(*columns, title="Errors: predicted over published time, less 1")
        for each in summary.errors:
            shares = (each.absolute, each.ninth, each.covered, each.half_width)
            table.add_row(each.name, str(each.num_runs), f"{each.median:+.1%}", *map(share_text, shares))
        stdout().print(table)
        regret = summary.regret
        if summary.tau is not None:
            print_line(f"Kendall's tau within one source, model and device: {summary.tau:.2f}.")
        if regret is not None:
            print_line(
                f"Regret of the predicted best over {regret.groups} groups of configurations: median "
                f"{share_text(regret.median)}, 90th percentile {share_text(regret.ninth)}."
            )
    if summary.memory:
        _print_memory(summary)
    if summary.reasons:
        print_line("Runs that cannot be expressed, by reason:")
        for reason, count in summary.reasons.items():
            print_line(f"  {count:4}  {reason}")


def _print_memory(summary: Summary) -> None:
    columns = ("", "runs", "median", "absolute", "90th percentile", "lowest", "highest", "below by 2 %")
    table = Table(*columns, title="Memory: predicted over published peak, less 1")
    for each in summary.memory:
        extremes = (f"{each.lowest:+.1%}", f"{each.highest:+.1%}", str(each.num_below))
        shares = map(share_text, (each.absolute, each.ninth))
        table.add_row(each.name, str(each.num_runs), f"{each.median:+.1%}", *shares, *extremes)
    stdout().print(table)


def _print_papers(papers: Sequence[PaperPrediction]) -> None:
    title = "The papers' figures, none of which was fitted"
    table = Table("paper", "figure", "published", "predicted", "error", title=title, left=(0, 1))
    for each in papers:
        figure, unit = each.figure, " s" if each.figure.unit == "s" else ""
        if each.error is not None:
            error = "inside" if each.error == 0 else f"{each.error:+.0%}"
            low_high = f"{each.low:.4g} to {each.high:.4g}{unit}"
            table.add_row(
                f"{figure.paper}, {figure.where}", figure.what, f"{figure.published:.4g}{unit}", low_high, error
            )
    stdout().print(table)
    print_line("Predicted: over the range of what the paper leaves unstated. Error: of the nearest end of the range.")
    for each in papers:
        if each.reason:
            print_line(f"  {each.figure.id}: {each.reason}")
