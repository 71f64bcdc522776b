"""`pipeloom megatron`: the fastest pipeline that Megatron supports, as text to paste."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.options import CLUSTER_HELP, check_budget, check_seed
from pipeloom.cli.output import JSON_HELP, check_targets, compiled_kernels, draw, print_json, print_written, stdout
from pipeloom.heartbeat import doing
from pipeloom.integrations.megatron.planned import IMPORT, excluded_by
from pipeloom.kernels import ALL
from pipeloom.limits import MAX_DEVICES
from pipeloom.printing import print_line
from pipeloom.report import Track, emulated_track, seconds_text, share_text, size_text
from pipeloom.report.any_width import Table
from pipeloom.validation import INTERVAL, Interval, chance, interval_for

if TYPE_CHECKING:
    from pipeloom.integrations.megatron import MegatronAnswer, PlanGain, TimedSetup

HELP = """\
Find the fastest pipeline layout, recomputation and microbatch group size that Megatron supports.

Reads a run from Megatron's arguments, emulates an iteration of this run, and searches the layouts that Megatron
supports, with Megatron's order of tasks. Degrees, batch and model are unchanged. It also predicts what a plan for every
step adds, in Megatron's own training loop. Times are emulated, not measured.
"""
EPILOG = (
    "Examples: pipeloom megatron train.sh --cluster h100-64. pipeloom megatron recipe.yaml --cluster my_cluster.toml "
    "--html pipeline.html. Save a recipe of Megatron Bridge with ConfigContainer.to_yaml. Supported arguments: "
    "docs/megatron.md."
)
_SHOWN = 12
"""Ignored arguments that are printed; --json has all."""


def megatron(
    arguments: str = typer.Argument(
        ..., metavar="ARGUMENTS", help="Megatron's arguments: a text file, a shell script or a .yaml file."
    ),
    cluster: str = typer.Option("h100-64", help=CLUSTER_HELP),
    gpus: int | None = typer.Option(
        None,
        min=1,
        max=MAX_DEVICES,
        metavar="N",
        help="Number of devices; default: from torchrun in the file, or from the cluster.",
    ),
    budget: float = typer.Option(10.0, metavar="SECONDS", help="Search seconds."),
    seed: int = typer.Option(0, metavar="N", help="Seed of all random choices."),
    samples: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Metadata of samples to pack into the microbatches of planned steps; default: full ones.",
    ),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with the timelines."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    from pipeloom.integrations.megatron import best_layout, plan_gain, read_megatron
    from pipeloom.io import read_samples
    from pipeloom.search import Budget
    from pipeloom.spec.catalog import load_cluster

    check_budget(budget)
    check_seed(seed)
    check_targets(html)
    hardware = load_cluster(cluster)
    run = read_megatron(arguments, num_devices=gpus, default_devices=hardware.num_devices)
    doing(f"searching layouts (budget {budget:g} s)")
    with compiled_kernels(ALL):
        found = best_layout(run, hardware, budget=Budget(seconds=budget), seed=seed)
        plans = None
        if not excluded_by(run):
            doing("planning single steps")
            plans = plan_gain(
                found.timing, found.best.setup, None if samples is None else read_samples(samples), seed=seed
            )
    written = []
    if html is not None:
        bounds = [f"{name} {_trust(found).text(one.iteration_s)}" for name, one in _setups(found)]
        note = (
            f"{_verdict(found).capitalize()}. {INTERVAL}: {', '.join(bounds)}. {' '.join(_plans_text(found, plans))} "
        )
        tracks = [_track(found, name, one) for name, one in _setups(found)]
        if plans is not None:
            tracks.append(_track(found, "planned", plans.planned[0]))
        written = draw(tracks, title=_title(found), note=note + _note(found), html_file=html, ranked=True)
    if json:
        print_json(_document(found, plans) | {"seed": seed, "written": written})
        return
    _print(found, plans)
    print_written(written)


def _title(found: MegatronAnswer) -> str:
    d = found.run.degrees
    degrees = f"tp {d.tensor} pp {d.pipeline} dp {d.data}" + (f" cp {d.context}" if d.context > 1 else "")
    return f"{found.run.source} on {found.cluster.name}, {degrees}" + (f" ep {d.expert}" if d.expert > 1 else "")


def _setups(found: MegatronAnswer) -> tuple[tuple[str, TimedSetup], ...]:
    return ("now", found.now), ("best", found.best)


def _note(found: MegatronAnswer) -> str:
    device = found.cluster.device
    return (
        f"Emulated, not measured: {device.name}, {device.basis} table; trainer: {found.timing.trainer.text}. "
        f"{_trust(found).note}."
    )


def _trust(found: MegatronAnswer) -> Interval:
    return interval_for(found.cluster.device, found.run.architecture, found.run.with_options(found.timing.trainer))


def _plans_text(found: MegatronAnswer, plans: PlanGain | None) -> tuple[str, ...]:
    """Return how to plan every step of the best layout, and the predicted gain."""
    if plans is None:
        return (f"Plans for every step are not possible with {excluded_by(found.run)}.",)
    faster = f"faster by {share_text(plans.gain)} ({plans.basis})" if plans.gain > 0 else f"no faster ({plans.basis})"
    sign = f"; sign right: {chance(1 / (1 + plans.gain)).text} of published pairs" if plans.gain > 0 else ""
    times = f"{seconds_text(plans.planned_s)} in place of {seconds_text(plans.static_s)}"
    return (
        "Or plan every step of this layout: write the arguments, and at the top of your script",
        f"  {IMPORT}",
        f"{times}, {faster}{sign}.",
    )


def _document(found: MegatronAnswer, plans: PlanGain | None) -> dict[str, Any]:
    """Return the document of ``--json``, with intervals and the probability of the gains' signs."""
    made, trust = found.document(), _trust(found)
    for name, one in _setups(found):
        made[name] |= trust.fields(one.iteration_s)
    more = {"sign_probability": chance(1 / (1 + found.gain)).probability, "interval_basis": trust.basis}
    if plans is None:
        return made | more | {"planned": {"excluded_by": excluded_by(found.run)}}
    planned = {
        "import": IMPORT,
        "basis": plans.basis,
        "static_iteration_s": plans.static_s,
        "iteration_s": plans.planned_s,
        "gain": plans.gain,
        "sign_probability": chance(1 / (1 + plans.gain)).probability,
    }
    return made | more | {"planned": planned | trust.fields(plans.planned_s)}


def _track(found: MegatronAnswer, name: str, one: TimedSetup) -> Track:
    return emulated_track(name, one, num_tokens=found.run.global_batch_size * found.run.seq_length)


def _peak(one: TimedSetup) -> str:
    peak = size_text(int(one.peak_bytes.max()))
    return peak if one.fits else f"{peak}, does not fit"


def _verdict(found: MegatronAnswer) -> str:
    if found.best is found.now:
        return "no faster setup was found; change nothing"
    if found.gain > 0:
        return f"faster by {share_text(found.gain)}; sign right: {chance(1 / (1 + found.gain)).text} of published pairs"
    if found.now.fits:
        return "as fast as yours, with less recomputation"
    return "the fastest setup that fits; yours is no slower, but does not fit"


def _print(found: MegatronAnswer, plans: PlanGain | None) -> None:
    console, timing, run, trust = stdout(), found.timing, found.run, _trust(found)
    console.print_line(_title(found), style="bold")
    table = Table("", "now", "best")
    rows: dict[str, Callable[[TimedSetup], str]] = {
        "iteration": lambda one: seconds_text(one.iteration_s),
        INTERVAL: lambda one: trust.text(one.iteration_s),
        "tokens/s": lambda one: f"{timing.tokens_per_s(one):,.0f}",
        "MFU": lambda one: f"{timing.mfu(one):.3f}",
        "bubbles": lambda one: share_text(one.bubble_share),
        "peak memory, fullest rank": _peak,
        "virtual stages a rank": lambda one: str(one.setup.virtual),
        "microbatches in a group": lambda one: str(one.setup.group_size) if one.setup.virtual > 1 else "",
        "recomputed": lambda one: str(one.setup.recompute),
    }
    for name, text in rows.items():
        if any(values := (text(found.now), text(found.best))):
            table.add_row(name, *values)
    console.print(table)
    lines = [f"now:  {found.now.setup.layout}", f"best: {found.best.setup.layout}", _verdict(found)]
    if found.best is not found.now:
        out = f"In place of {' '.join(run.replaced)}, write:" if run.replaced else "Write:"
        lines += ["", out, *(f"  {line}" for line in found.arguments())]
    lines += ["", *_plans_text(found, plans)]
    lines += ["", f"{timing.costs.num_parameters:,} parameters, {run.num_microbatches} microbatches a replica."]
    if run.ignored:
        more = len(run.ignored) - _SHOWN
        shown = " ".join(run.ignored[:_SHOWN]) + (f" and {more} more, in --json" if more > 0 else "")
        lines.append(f"Change nothing here: {shown}")
    lines += [f"Note: {note}." for note in run.notes]
    for line in lines:
        print_line(line)
    console.print_line(f"{_note(found)} {found.evaluations} iterations simulated.", style="dim")
