"""`pipeloom explain`: an analysis of a user's run from the traces of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import typer

from pipeloom.cli.options import check_budget, check_seed
from pipeloom.cli.output import JSON_HELP, check_targets, draw, note_compiling, print_json, print_written, stdout
from pipeloom.cli.solve import interruptible
from pipeloom.errors import InputError
from pipeloom.io import write_layers, write_text
from pipeloom.limits import MAX_MICROBATCHES
from pipeloom.report import seconds_text, share_text, time_text
from pipeloom.report.any_width import Table

if TYPE_CHECKING:
    from pipeloom.explain.traces.explained import Explanation, WhatIf
    from pipeloom.explain.traces.timers import TimersExplained
    from pipeloom.timeline import Timeline

_RANKS_PER_TABLE = 6

HELP = """\
Explain a pipeline's iterations from the traces of its ranks.

Shows the measured and the replayed time of every iteration, each rank's idle time by cause, and the time of the
best order of the same tasks with the same costs.

From a log of Megatron-LM (--timing-log-level 2 --timing-log-option all): shows the compute time of each pipeline
rank, its simulated schedule, and the best order.
"""
EPILOG = (
    "Example: python examples/explain_trace.py --out runs/traces, then pipeloom explain runs/traces "
    "--html bubbles.html --out layers.json, then pipeloom arrange layers.json --memory none --out layout.json."
)


def explain(
    traces: list[Path] = typer.Argument(
        ...,
        metavar="TRACE...",
        help="Traces of torch.profiler, one per pipeline rank (.json, .json.gz), their folder, or a Megatron-LM log.",
    ),
    budget: float = typer.Option(2.0, metavar="SECONDS", help="Search seconds for better orders."),
    out: Path | None = typer.Option(None, metavar="LAYERS", help="Write the measured costs, a pipeloom.layers/1."),
    profile: Path | None = typer.Option(
        None, metavar="FILE", help="Write the stages' costs by microbatch size, a pipeloom.profile/1."
    ),
    also: list[Path] | None = typer.Option(
        None, metavar="FOLDER", help="For --profile: traces of the same stages with other sizes; can be repeated."
    ),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with the timeline."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Write a Chrome trace of tasks, for Perfetto."),
    microbatches: int | None = typer.Option(
        None,
        min=1,
        max=MAX_MICROBATCHES,
        metavar="N",
        help="For a Megatron-LM log without printed arguments: microbatches of an iteration.",
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of the search."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    from pipeloom.explain.traces.costs import stage_profile
    from pipeloom.explain.traces.explained import Explanation, tracks, what_if_tracks
    from pipeloom.explain.traces.read import explain_log, explain_traces, is_log, read_run

    check_budget(budget)
    check_seed(seed)
    check_targets(out, profile, html, trace)
    if also and profile is None:
        raise InputError("--also", "needs --profile", "add --profile FILE")
    if profile is not None and is_log(traces):
        raise InputError("--profile", "cannot be made from a log: timers have no sizes", "give traces")
    found: Explanation | TimersExplained
    with interruptible(budget) as interrupt, note_compiling():
        if is_log(traces):
            found = explain_log(traces[0], budget=interrupt.budget, seed=seed, num_microbatches=microbatches)
        elif microbatches is not None:
            raise InputError("--microbatches", "is for a log of Megatron-LM; traces have their number", "omit it")
        else:
            found = explain_traces(traces, budget=interrupt.budget, seed=seed)
    of_traces = isinstance(found, Explanation)
    # Read everything before writing anything.
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
        document = _trace_document(found) if isinstance(found, Explanation) else _timers_document(found)
        print_json(document | {"written": written})
        return
    console = stdout()
    lines, tables = _trace_answer(found) if isinstance(found, Explanation) else _timers_answer(found)
    for line in lines:
        console.print_line(line)
    for table in tables:
        console.print(table)
    print_written(written)


def _headline(found: Explanation) -> list[str]:
    """Describe the run that was read."""
    run = found.run
    where = "kernels of devices" if run.on_device else "operators on the host"
    lines = [
        f"{run.num_ranks} ranks, {run.num_stages} stages, {run.num_microbatches} microbatches, "
        f"{len(run.iterations)} iterations; computations are {where}"
    ]
    if run.between_ns:
        lines.append(f"between iterations {time_text(run.between_ns)}: optimizer, data; not included below")
    if any(run.clock_shift_ns):
        shifts = ", ".join(time_text(shift) for shift in run.clock_shift_ns)
        lines.append(f"clocks aligned by messages, shift of each rank: {shifts}")
    return lines


def _trace_answer(found: Explanation) -> tuple[list[str], list[Table]]:
    """Return lines and tables for the terminal."""
    return _headline(found), [
        _iterations_table(found),
        *_idle_tables(found),
        _orders_table(found.what_if, found.mean_measured_ns),
    ]


def _iterations_table(found: Explanation) -> Table:
    """Return the measured and replayed times of iterations."""
    columns = ("iteration", "measured", "replayed", "difference", "bubbles", "of them replayed")
    table = Table(*columns, title="Iterations", left=())
    for one in found.replays:
        table.add_row(
            str(one.number),
            time_text(one.measured_ns),
            time_text(one.replayed_ns),
            f"{one.error:+.2%}",
            share_text(float(one.measured_idle_ns.sum()) / (one.measured_ns * found.run.num_ranks)),
            f"{max(one.bubble_errors, key=abs):+.2%}",
        )
    return table


def _idle_tables(found: Explanation) -> list[Table]:
    """Return the idle time by cause, as a mean over iterations, with as many ranks per table as fit a terminal."""
    from pipeloom.explain.traces.idle import CAUSES

    ranks = range(found.run.num_ranks)
    idle = np.mean([one.measured_idle_ns for one in found.replays], axis=0)
    compute = np.mean([one.compute_ns for one in found.replays], axis=0)
    tables = []
    for first in ranks[::_RANKS_PER_TABLE]:
        shown = ranks[first : first + _RANKS_PER_TABLE]
        columns = (f"rank {rank}" for rank in shown)
        table = Table("", *columns, title="Time of ranks by cause, mean of an iteration, ms")
        stages = [[str(stage) for stage, of in enumerate(found.run.stage_rank) if of == rank] for rank in shown]
        table.add_row("stages", *(", ".join(row) for row in stages))
        table.add_row("computing", *(f"{compute[rank] / 1e6:.2f}" for rank in shown), end_section=True)
        for number, cause in enumerate(CAUSES):
            table.add_row(cause, *(f"{idle[rank, number] / 1e6:.2f}" for rank in shown))
        table.add_section()
        table.add_row("idle in all", *(f"{idle[rank].sum() / 1e6:.2f}" for rank in shown))
        tables.append(table)
    return tables


def _orders_table(what: WhatIf, measured_ns: int = 0) -> Table:
    """Return the traced order and better ones at mean costs, below the measured time."""
    columns = ("order", "iteration", "less by", "above a bound by at most")
    table = Table(*columns, title="Orders of the same tasks, on their mean costs")
    if measured_ns:
        table.add_row("measured, mean", time_text(measured_ns), "", "-")
    for row in _orders(what):
        gain = f"{row['less_by']:.1%}"
        table.add_row(row["order"], time_text(row["ns"]), gain, "-" if row["gap"] is None else share_text(row["gap"]))
    held = ", ".join(str(number) for number in what.in_flight.tolist())
    table.caption = f"Maximum activations held at once by each rank, in microbatches of a stage: {held}."
    return table


def _orders(what: WhatIf) -> list[dict[str, Any]]:
    base = what.as_traced_timeline.makespan_ns
    rows: list[tuple[str, Timeline, float | None]] = [("as traced, simulated", what.as_traced_timeline, None)]
    rows += [
        (title, solution.timeline, solution.gap)
        for title, solution in (("best, as many activations", what.best), ("best, no limit", what.unlimited))
    ]
    return [
        {"order": title, "ns": timeline.makespan_ns, "less_by": 1 - timeline.makespan_ns / base, "gap": gap}
        for title, timeline, gap in rows
    ]


def _orders_document(what: WhatIf) -> dict[str, Any]:
    return {
        "orders": [{"order": row["order"], "iteration_s": row["ns"] / 1e9, "gap": row["gap"]} for row in _orders(what)],
        "activations_held": what.in_flight.tolist(),
    }


def _trace_document(found: Explanation) -> dict[str, Any]:
    """Return the printed results for ``--json``."""
    from pipeloom.explain.traces.idle import CAUSES

    def by_cause(rows: Any) -> list[dict[str, float]]:
        return [{cause: int(ns) / 1e9 for cause, ns in zip(CAUSES, row, strict=True)} for row in rows]

    run = found.run
    return {
        "name": found.layers.name,
        "num_ranks": run.num_ranks,
        "num_microbatches": run.num_microbatches,
        "rank_of_stage": list(run.stage_rank),
        "on_device": run.on_device,
        "between_iterations_s": run.between_ns / 1e9,
        "clock_shift_s": [shift / 1e9 for shift in run.clock_shift_ns],
        "iterations": [
            {
                "iteration": one.number,
                "measured_s": one.measured_ns / 1e9,
                "replayed_s": one.replayed_ns / 1e9,
                "error": one.error,
                "compute_s": [int(ns) / 1e9 for ns in one.compute_ns],
                "idle_s": by_cause(one.measured_idle_ns),
                "replayed_idle_s": by_cause(one.replayed_idle_ns),
            }
            for one in found.replays
        ],
    } | _orders_document(found.what_if)


def _timers_answer(found: TimersExplained) -> tuple[list[str], list[Table]]:
    """Return lines and tables for the terminal."""
    timers = found.timers
    chunks = f", {timers.chunks_per_rank} chunks a rank" if timers.chunks_per_rank > 1 else ""
    lines = [
        f"{len(timers.forward_s)} pipeline ranks{chunks}, {timers.num_microbatches} microbatches, timers logged "
        f"{timers.num_logged} times; timers have no messages or order: assumes 1F1B and messages in no time"
    ]
    simulated = f"simulated {seconds_text(found.simulated_s)}"
    if timers.forward_backward_s:
        error = found.simulated_s / timers.forward_backward_s - 1
        measured = seconds_text(timers.forward_backward_s)
        lines.append(f"forward-backward measured {measured}, {simulated} ({error:+.2%})")
    else:
        lines.append(f"forward-backward is not in the log; {simulated}")
    columns = ("rank", "forward of a microbatch", "backward", "computing", "idle")
    table = Table(*columns, title="Pipeline ranks, ms", left=())
    for rank, compute in enumerate(found.compute_s):
        each = (timers.forward_s[rank], timers.backward_s[rank])
        idle = f"{(timers.forward_backward_s - compute) * 1e3:.2f}" if timers.forward_backward_s else "-"
        cells = [f"{seconds / timers.num_microbatches * 1e3:.3f}" for seconds in each]
        table.add_row(str(rank), *cells, f"{compute * 1e3:.2f}", idle)
    return lines, [table, _orders_table(found.what_if)]


def _timers_document(found: TimersExplained) -> dict[str, Any]:
    """Return the printed results for ``--json``."""
    timers = found.timers
    return {
        "name": found.layers.name,
        "num_ranks": len(timers.forward_s),
        "num_microbatches": timers.num_microbatches,
        "chunks_per_rank": timers.chunks_per_rank,
        "forward_s": list(timers.forward_s),
        "backward_s": list(timers.backward_s),
        "measured_s": timers.forward_backward_s or None,
        "simulated_s": found.simulated_s,
    } | _orders_document(found.what_if)
