"""`pipeloom explain`: the run that somebody has, from the traces of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from pipeloom.cli.explain_answer import timers_answer, timers_document, trace_answer, trace_document
from pipeloom.cli.options import check_budget, check_seed
from pipeloom.cli.output import JSON_HELP, check_targets, draw, note_compiling, print_json, print_written, stdout
from pipeloom.cli.solve import interruptible
from pipeloom.errors import InputError
from pipeloom.io import write_layers, write_text
from pipeloom.limits import MAX_MICROBATCHES

if TYPE_CHECKING:
    from pipeloom.explain.traces.timers import TimersExplained

HELP = """\
Explain a pipeline's iterations from the traces of its ranks.

Shows every iteration as measured and as the simulator runs it again, where each rank's idle time went, and what
the best order of the same tasks would take with the same costs.

With a log of Megatron-LM (--timing-log-level 2 --timing-log-option all): what each pipeline rank computes, its
schedule simulated on that, and the best order.
"""
EPILOG = (
    "Example: python examples/explain_trace.py --out runs/traces, then pipeloom explain runs/traces "
    "--html bubbles.html --out layers.json, then pipeloom arrange layers.json --memory none --out layout.json."
)


def explain(
    traces: list[Path] = typer.Argument(
        ...,
        metavar="TRACE...",
        help="Traces of torch.profiler, one a pipeline rank (.json, .json.gz), or their folder; or a Megatron-LM log.",
    ),
    budget: float = typer.Option(2.0, metavar="SECONDS", help="Time to search for better orders."),
    out: Path | None = typer.Option(None, metavar="LAYERS", help="Write the measured costs, a pipeloom.layers/1."),
    profile: Path | None = typer.Option(
        None, metavar="FILE", help="Write the stages' costs by the size of microbatches, a pipeloom.profile/1."
    ),
    also: list[Path] | None = typer.Option(
        None, metavar="FOLDER", help="For --profile: traces of the same stages with other sizes; may be given again."
    ),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an offline timeline page."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Write a Chrome trace of tasks, for Perfetto."),
    microbatches: int | None = typer.Option(
        None,
        min=1,
        max=MAX_MICROBATCHES,
        metavar="N",
        help="For a log: microbatches of an iteration, where it does not print its arguments.",
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of the search."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Explain a pipeline's iterations from the traces of its ranks."""
    from pipeloom.explain.traces.costs import stage_profile
    from pipeloom.explain.traces.explained import Explanation, tracks, what_if_tracks
    from pipeloom.explain.traces.read import explain_log, explain_traces, is_log, read_run

    check_budget(budget)
    check_seed(seed)
    check_targets(out, profile, html, trace)
    if also and profile is None:
        raise InputError("--also", "is for --profile, which is not given", "add --profile FILE")
    if profile is not None and is_log(traces):
        raise InputError("--profile", "cannot be made from a log: timers have no sizes", "give traces")
    found: Explanation | TimersExplained
    with interruptible(budget) as rule, note_compiling():
        if is_log(traces):
            found = explain_log(traces[0], budget=rule, seed=seed, num_microbatches=microbatches)
        elif microbatches is not None:
            raise InputError("--microbatches", "is for a log of Megatron-LM; traces say it themselves", "leave it out")
        else:
            found = explain_traces(traces, budget=rule, seed=seed)
    of_traces = isinstance(found, Explanation)
    # All is read before anything is written.
    runs = [found.run, *(read_run([folder]) for folder in also or ())] if isinstance(found, Explanation) else []
    written = []
    if out is not None:
        write_layers(out, found.layers)
        written.append(str(out))
    if profile is not None:
        fitted = stage_profile(runs, found.layers.name)
        write_text(profile, msgspec.json.format(msgspec.json.encode(fitted)).decode() + "\n")
        written.append(str(profile))
    if html is not None or trace is not None:
        drawn = (
            tracks(found) if isinstance(found, Explanation) else what_if_tracks(found.what_if, len(found.layers.layers))
        )
        note = "Measured: computations of the trace. " if of_traces else ""
        note += "Simulated from measured costs: all other tracks."
        written += draw(drawn, title=found.layers.name, note=note, trace_file=trace, html_file=html)
    if json:
        document = trace_document(found) if isinstance(found, Explanation) else timers_document(found)
        print_json(document | {"written": written})
        return
    console = stdout()
    lines, tables = trace_answer(found) if isinstance(found, Explanation) else timers_answer(found)
    for line in lines:
        console.print_line(line)
    for table in tables:
        console.print(table)
    print_written(written)
