"""`pipeloom compare`: systems on one iteration of a described model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.options import FREEZE_HELP, check_budget
from pipeloom.cli.output import JSON_HELP, check_targets, draw, print_json, stderr, stdout
from pipeloom.report import share_text, size_text, time_text

if TYPE_CHECKING:
    from pipeloom.lab.systems.outcome import Outcome

EPILOG = (
    "Examples: pipeloom compare vlm-s --cluster dip-h800-64 --tp 4 --pp 4 --data dip-vlm --html systems.html. "
    "pipeloom compare config.json --data samples.jsonl --systems interleaved,dip,pipeloom. Models, clusters and data "
    "sets: names of the zoo (pipeloom emulate list), or your own files."
)
OTHERS = 5
"""Layouts shown beside the chosen one."""


def compare(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="A model of the zoo, a .toml file, or a Hugging Face config.json."
    ),
    systems: str = typer.Option("all", metavar="NAMES", help="Which, with commas between; all: every one that can."),
    cluster: str = typer.Option("dip-h800-64", help="A cluster of the zoo, or a .toml file."),
    data: str | None = typer.Option(
        None, help="A data set of the zoo, or samples (.jsonl, .parquet, .tar); default: the model's own data set."
    ),
    tp: int = typer.Option(1, min=1, help="Tensor parallelism."),
    pp: int = typer.Option(4, min=1, help="Pipeline ranks."),
    dp: int = typer.Option(1, min=1, help="Data-parallel replicas."),
    freeze: list[str] = typer.Option([], metavar="MODULE", help=FREEZE_HELP),
    microbatches: int = typer.Option(16, min=1, metavar="N", help="Of one replica."),
    tokens: int = typer.Option(8192, min=1, metavar="N", help="Tokens of a microbatch at most, of your own samples."),
    budget: float = typer.Option(1.0, metavar="SECONDS", help="Seconds of search, for the systems that search."),
    seed: int = typer.Option(0, metavar="N", help="Seed of all random choices."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an offline page with all timelines."),
    out: Path | None = typer.Option(None, metavar="FOLDER", help="Folder for the page; it is created."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Time one iteration of a described model under a dozen systems, each with its own layout.

    All have the same data, memory and costs: one table, and with --html one page with all timelines on one time axis.
    Times are emulated, not measured.
    """
    from pipeloom.integrations.models import load_model
    from pipeloom.io import make_folder
    from pipeloom.lab.systems.comparison import compare_case, suitable
    from pipeloom.lab.systems.iterations import sampled_iterations
    from pipeloom.lab.systems.model_on_cluster import put_on_cluster
    from pipeloom.lab.systems.outcome import Outcome
    from pipeloom.search import Deadline, warm_up
    from pipeloom.spec.parallelism import Degrees

    check_budget(budget)
    check_targets(html)
    case = put_on_cluster(load_model(model, freeze), cluster, Degrees(tensor=tp, pipeline=pp, data=dp))
    names = suitable(case, None if systems == "all" else systems.split(","))
    typical, groups = sampled_iterations(case, data, microbatches, tokens, seed)
    with stderr().status("compiling ...") as status:
        warm_up()
        compared = compare_case(
            case,
            typical,
            groups,
            names,
            budget=Deadline(budget),
            seed=seed,
            on_system=lambda title: status.update(f"{title} ..."),
        )
    found = Outcome(case, groups, compared)
    written = []
    if out is not None:
        make_folder(out)
    page = html or (None if out is None else out / "comparison.html")
    if page is not None:
        written = draw(found.tracks(), title=found.title, note=found.note, html_file=page, ranked=True)
    if json:
        print_json(_document(found, seed) | {"written": written})
        return
    _print(found, seed)
    for name in written:
        typer.echo(f"wrote {name}")


def _document(found: Outcome, seed: int) -> dict[str, Any]:
    hardware = found.case.cluster
    return {
        "model": found.case.architecture.name,
        "cluster": hardware.name,
        "kind_of_time": "emulated",
        "device": hardware.device.name,
        "device_basis": hardware.device.basis,
        "seed": seed,
        "num_microbatches": len(found.groups),
        "systems": found.rows(),
    }


def _print(found: Outcome, seed: int) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = found.rows()
    table = Table(title=Text(found.title), title_justify="left")
    table.add_column("system", no_wrap=True)
    for name in ("iteration", "MFU", "bubbles", "peak memory", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    best = min((row["iteration_s"] for row in rows if "problem" not in row), default=0.0)
    for row in rows:
        if "problem" in row:
            table.add_row(row["system"], "does not fit", "", "", "", "")
            continue
        table.add_row(
            row["system"],
            time_text(round(row["iteration_s"] * 1e9)),
            f"{row['mfu']:.3f}",
            share_text(row["bubble_share"]),
            size_text(row["peak_memory_bytes"]),
            share_text(row["gap"]),
            style="bold" if row["iteration_s"] == best else "",
        )
    console = stdout()
    console.print(table)
    for row in rows:
        if "problem" in row:
            console.print(f"{row['system']}: {row['problem']}", markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        for line in _layout_lines(row):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    device, count = found.case.cluster.device, len(found.groups)
    console.print(
        f"{count} microbatches a replica, seed {seed}. Emulated, not measured: {device.name}, {device.basis} table.",
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def _layout_lines(row: dict[str, Any]) -> list[str]:
    """The layout that a system chose, and what the next ones would cost on the same sampled iterations."""
    layouts = row.get("layouts", [])
    if not layouts:
        return []
    chosen, *others = layouts
    lines = [f"{row['system']}: layout {chosen['layout']}, of {len(layouts)} tried on sampled iterations:"]
    for one in (chosen, *others[:OTHERS]):
        value = (
            f"{one['planned_s']:.4g} s"
            if "planned_s" in one
            else ("does not fit" if "problem" in one else f"more than {one['more_than_s']:.4g} s")
        )
        lines.append(f"  {one['layout']}: {value}")
    if len(others) > OTHERS:
        lines.append(f"  and {len(others) - OTHERS} more, in --json")
    return lines
