"""`pipeloom pack`: assign samples to microbatches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeloom.cli.output import JSON_HELP, check_targets, print_json, print_written, stdout
from pipeloom.errors import InputError, located
from pipeloom.heartbeat import doing
from pipeloom.io import packed_batches, read_samples, write_batches
from pipeloom.limits import MAX_COUNT, MAX_DEVICES, MAX_MICROBATCHES, MAX_SEED
from pipeloom.report import share_text
from pipeloom.report.any_width import Table
from pipeloom.spec import Batch

if TYPE_CHECKING:
    from pipeloom.packing import PackedReplica

HELP = """\
Pack samples into microbatches and show their loads.

Loads are seconds with a --setup, else tokens (and attention by --attention-tokens). With several replicas there is
one file for each, with the replica's number before the suffix of FILE. The policy 'tuned' needs a --setup with encoders
on the first rank. It chooses number, contents and order of the microbatches for the shortest simulated iteration, and
assigns samples to replicas for the shortest iteration of the slowest replica.
"""
EPILOG = (
    "Examples: pipeloom pack samples.jsonl --tokens 8192 --policy balanced --out batches.json; pipeloom pack "
    "samples.jsonl --tokens 8192 --policy balanced_encoder --attention-tokens 49152 --batch 128 --replicas 4 --out "
    "batches.json; pipeloom pack samples.jsonl --setup runs/NAME/setup.json --policy tuned --replicas 4 --out "
    "batches.json. docs/packing.md describes the policies."
)
TUNED = "tuned"
"""Beside the policies of `pipeloom.packing`: packing, order and assignment to replicas chosen by simulated time."""


def pack(
    samples: Path = typer.Argument(..., metavar="SAMPLES", help="Metadata: JSON Lines, Parquet, WebDataset."),
    tokens: int = typer.Option(
        0, min=0, max=MAX_COUNT, metavar="N", help="Maximum tokens in a microbatch; required without --setup."
    ),
    policy: str = typer.Option("balanced", metavar="NAME", help="Packing policy; see docs/packing.md."),
    out: Path = typer.Option(..., metavar="FILE", help="File for the pipeloom.batches/1."),
    batch: int = typer.Option(
        0, min=0, max=MAX_COUNT, metavar="N", help="Samples per iteration; 0: all samples are one batch."
    ),
    microbatches: int = typer.Option(
        0, min=0, max=MAX_MICROBATCHES, metavar="N", help="Minimum number of microbatches; 0: as few as possible."
    ),
    replicas: int = typer.Option(
        1, min=1, max=MAX_DEVICES, metavar="N", help="First assign every batch to this many replicas."
    ),
    attention_tokens: int = typer.Option(
        0,
        min=0,
        max=MAX_COUNT,
        metavar="N",
        help="Length at which attention costs as much as the rest of a layer; 0: attention is free.",
    ),
    setup: Path | None = typer.Option(
        None, metavar="FILE", help="setup.json of a run; loads are then computed from its measured costs."
    ),
    oversized: str = typer.Option(
        "refuse",
        metavar="WORD",
        help="For a sample above the budget: 'refuse' is an error, 'split' splits it into pieces.",
    ),
    seed: int = typer.Option(0, min=0, max=MAX_SEED, metavar="N", help="Seed of all random choices."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    from pipeloom.packing import POLICIES, PackingSpec, check_budget, default_model, pack_replicas, split_oversized

    if policy not in (*POLICIES, TUNED):
        raise InputError("--policy", f"{policy!r} is none of {', '.join((*POLICIES, TUNED))}")
    if policy == TUNED and setup is None:
        raise InputError("--policy", "'tuned' needs --setup", "give the setup.json of a run")
    if policy == TUNED and microbatches:
        raise InputError("--microbatches", "is set, but the policy 'tuned' chooses their number", "omit it")
    if oversized not in ("refuse", "split"):
        raise InputError("--oversized", f"{oversized!r} is none of refuse, split")
    targets = _targets(out, replicas)
    check_targets(*targets)
    problem = None
    if setup is not None:
        from pipeloom.planner import read_problem

        problem = read_problem(setup)
    if tokens < 1 and (tokens < 0 or problem is None):
        raise InputError("--tokens", f"{tokens} is below 1", "give the most tokens of a microbatch")
    budget = tokens or (problem.packing.token_budget if problem is not None else 0)
    named = "balanced" if policy == TUNED else policy
    spec = PackingSpec(budget, named, microbatches or None, attention_tokens or None, seed)  # type: ignore[arg-type]
    model, layout = default_model() if problem is None else (problem.model, problem.layout)

    def pack_batch(whole: Batch) -> list[PackedReplica]:
        check_budget(whole, model, spec.token_budget)
        if policy == TUNED and problem is not None:
            from pipeloom.planner.replicas import pack_tuned

            return pack_tuned(replace(problem, packing=spec), whole, replicas)
        return pack_replicas(whole, model, layout, spec, replicas, None if problem is None else problem.costs)

    rows = read_samples(samples)
    size = batch or len(rows)
    batches = [Batch(rows[first : first + size], i) for i, first in enumerate(range(0, len(rows), size))]
    packed: list[PackedReplica] = []
    for number, one in enumerate(batches, 1):
        doing(f"batch {number} of {len(batches)}")
        with located(str(samples)):
            packed += pack_batch(split_oversized(one, model, budget) if oversized == "split" else one)
    for replica, target in enumerate(targets):
        mine = [each.packing for each in packed if each.replica == replica]
        write_batches(target, packed_batches(mine, policy))
    unit = "tokens" if problem is None else "s"
    if json:
        loads = [row for each in packed for row in each.rows()]
        summaries = [each.summary() for each in packed]
        written = [str(target) for target in targets]
        print_json({"load_unit": unit, "microbatches": loads, "batches": summaries, "written": written})
        return
    _print(packed, unit, replicas)
    print_written(targets)


def _targets(out: Path, replicas: int) -> list[Path]:
    if replicas == 1:
        return [out]
    return [out.with_name(f"{out.stem}.{replica}{out.suffix}") for replica in range(replicas)]


def _print(packed: list[PackedReplica], unit: str, replicas: int) -> None:
    console = stdout()
    for one in packed:
        summary = one.summary()
        title = f"Iteration {summary['iteration']}" + (f", replica {one.replica}" if replicas > 1 else "")
        columns = ("microbatch", "samples", "tokens", "images", f"load, {unit}", "over mean", "encoders' load")
        table = Table(*columns, title=title, left=())
        for row in one.rows():
            table.add_row(
                str(row["microbatch"]),
                str(row["num_samples"]),
                str(row["num_tokens"]),
                str(row["num_images"]),
                f"{row['load']:.5g}",
                share_text(row["load_over_mean"] - 1),
                f"{row['encoder_load']:.5g}",
            )
        console.print(table)
        planned = "" if one.planned_s is None else f" Planned: {one.planned_s:.4g} s."
        console.print_line(
            f"{summary['num_microbatches']} microbatches; the heaviest is {share_text(summary['gap'])} above the lower "
            f"bound of {summary['lower_bound']:.5g} {unit}.{planned}"
        )
