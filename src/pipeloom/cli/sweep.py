"""`pipeloom sweep`: rank degrees of parallelism for a model on a cluster."""

from __future__ import annotations

from typing import Any

import typer

from pipeloom.cli.emulate import document, microbatches_of, parameters_text, samples_text
from pipeloom.cli.options import CLUSTER_HELP, FREEZE_HELP, TRAINER_HELP
from pipeloom.cli.output import JSON_HELP, print_json, stderr, stdout
from pipeloom.emulator import module_parameters
from pipeloom.heartbeat import doing
from pipeloom.integrations.models import load_model
from pipeloom.iteration import Points, SweepEntry
from pipeloom.iteration import sweep as run_sweep
from pipeloom.limits import MAX_COUNT, MAX_DEVICES, MAX_MICROBATCHES, MAX_SEED
from pipeloom.printing import print_line
from pipeloom.report import share_text, size_text
from pipeloom.report.any_width import Table
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.validation import INTERVAL, SIGN_RIGHT, Chance, Interval, chance, interval_for

HELP = "Emulate every combination of tensor, pipeline and data parallelism on one global batch, fastest first."
EPILOG = "Example: pipeloom sweep vlm-m --cluster dip-h800-64 --gpus 64."


def sweep(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="A model of the zoo, a .toml file, a config.json, or module:function."
    ),
    cluster: str = typer.Option("dip-h800-64", help=CLUSTER_HELP),
    gpus: int = typer.Option(0, min=0, max=MAX_DEVICES, help="Number of devices to use; 0: the whole cluster."),
    microbatches: int = typer.Option(
        128, min=1, max=MAX_MICROBATCHES, metavar="N", help="Microbatches of the global batch."
    ),
    data: str | None = typer.Option(
        None, help="A data set of the zoo, or your own samples (.jsonl, .parquet, .tar); default: the papers' mixture."
    ),
    max_tp: int = typer.Option(8, min=1, max=MAX_DEVICES, help="Maximum degree of tensor parallelism."),
    top: int = typer.Option(
        10,
        min=1,
        max=MAX_COUNT,
        metavar="N",
        help="Maximum number of rows for combinations that run and for those that do not.",
    ),
    freeze: list[str] = typer.Option([], metavar="MODULE", help=FREEZE_HELP),
    trainer: str = typer.Option("fused", help=TRAINER_HELP),
    seed: int = typer.Option(0, min=0, max=MAX_SEED, help="Seed of the drawn samples."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    architecture, hardware, runs_it = load_model(model, freeze), load_cluster(cluster), load_trainer(trainer)
    trust = interval_for(hardware.device, architecture, runs_it)
    groups = microbatches_of(architecture, data, microbatches, seed, model)
    with stderr().status("emulating ...") as status:

        def show(entry: SweepEntry) -> None:
            status.update(f"emulating {_name(entry)} ...")
            doing(f"emulating {_name(entry)}")

        entries = run_sweep(
            architecture,
            hardware,
            batch=groups,
            points=Points(num_devices=gpus or None, max_tensor=max_tp),
            progress=show,
            trainer=runs_it,
        )
    if json:
        print_json(
            {
                "model": model,
                "parameters": module_parameters(architecture),
                "cluster": cluster,
                "trainer": runs_it.name,
                "interval_basis": trust.basis,
                "entries": [_document(entry, entries[0], trust) for entry in entries],
            }
        )
        return
    print_line(samples_text(groups))
    print_line(parameters_text(architecture))
    _print(entries, trust, f"{model} on {cluster}, trainer {runs_it.text}", top)


def _name(entry: SweepEntry) -> str:
    degrees = entry.degrees
    return f"dp {degrees.data} tp {degrees.tensor} pp {degrees.pipeline}"


def _document(entry: SweepEntry, best: SweepEntry, trust: Interval) -> dict[str, Any]:
    degrees = entry.degrees
    row: dict[str, Any] = {"data": degrees.data, "tensor": degrees.tensor, "pipeline": degrees.pipeline}
    if entry.result is None:
        return row | {"problem": entry.problem}
    return row | document(entry.result, trust) | {"sign_probability": _best_is_faster(entry, best).probability}


def _best_is_faster(entry: SweepEntry, best: SweepEntry) -> Chance:
    """Return the probability that the best point of the sweep is faster than another."""
    return chance(best.iteration_s / entry.iteration_s)


def _print(entries: list[SweepEntry], trust: Interval, title: str, top: int) -> None:
    columns = ("degrees", "iteration", INTERVAL, "best faster", "MFU", "tokens/s", "bubbles", "peak memory", "strategy")
    table = Table(*columns, title=title, left=(0, 8))
    problems = [entry for entry in entries if entry.result is None]
    runnable = len(entries) - len(problems)
    for entry in entries[: min(top, runnable)]:
        r = entry.result
        assert r is not None
        table.add_row(
            _name(entry),
            f"{r.iteration_s:.4g} s",
            trust.text(r.iteration_s),
            _best_is_faster(entry, entries[0]).text,
            f"{r.mfu:.3f}",
            f"{r.tokens_per_s:,.0f}",
            share_text(r.bubble),
            size_text(int(r.peak_bytes.max())),
            r.strategy,
        )
    console = stdout()
    if runnable:
        console.print(table)
        shown = f"{min(top, runnable)} of {runnable} combinations that run"
        console.print(f"Emulated, not measured; {shown}. tokens/s is per device. {trust.note}.", style="dim")
        console.print(
            f"best faster: probability that the first row is faster than this one ({SIGN_RIGHT}).", style="dim"
        )
    if problems:
        console.print(f"{len(problems)} combinations cannot run:", style="dim")
    for entry in problems[:top]:
        print_line(f"  {_name(entry)}: {entry.problem}")
