"""`pipeloom arrange`: co-optimized partition, placement and schedule of a chain of layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from pipeloom.cli.options import CLUSTER_HELP, check_budget, check_seed
from pipeloom.cli.output import JSON_HELP, check_targets, compiled_kernels, draw, print_json, print_note, print_written
from pipeloom.cli.solve import interruptible, progress_display
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.heartbeat import doing
from pipeloom.integrations.models import load_model
from pipeloom.io import (
    SearchRecord,
    read_layers,
    read_spec,
    rule_path,
    write_instance,
    write_layout,
    write_rule,
    write_schedule,
)
from pipeloom.io.files import is_regular_target
from pipeloom.io.stage_names import megatron_layout, torchtitan_modules
from pipeloom.kernels import ALL, num_cores
from pipeloom.limits import MAX_COUNT, MAX_DEVICES, MAX_MICROBATCHES, MAX_RANKS
from pipeloom.plugins import ARRANGE_METHODS, installed
from pipeloom.printing import print_line
from pipeloom.report import make_track, share_text, size_text, time_text
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import LowerBound, check, lower_bound

if TYPE_CHECKING:
    from pipeloom.cost.layers import LayerTable
    from pipeloom.layout.cooptimize import CooptimizedPipeline, LayerChain
    from pipeloom.report import Track
    from pipeloom.spec import Layout

HELP = """\
Co-optimize partition, placement and schedule of a chain of layers.

Ranks may have any number of chunks, uneven and in any order, within their memory. The result has an optimality gap.
"""
EPILOG = (
    "Example: pipeloom arrange model.layers.json --budget 5 --out layout.json --instance instance.json --schedule "
    "schedule.json --memory 1.5x. Ctrl-C ends the search early and writes the best so far. Exit code 2: a file or "
    "value is wrong, or nothing fits into memory."
)
_JOINT = "joint"
_MOST_THREADS = 16


def arrange(
    layers: str = typer.Argument(
        ..., metavar="LAYERS", help="A pipeloom.layers/1 file, or a model: zoo name, .toml, Hugging Face config.json."
    ),
    budget: float = typer.Option(..., metavar="SECONDS", help="Search seconds, without loading."),
    out: Path = typer.Option(..., metavar="LAYOUT", help="File for the pipeloom.layout/1."),
    instance: Path | None = typer.Option(None, metavar="INSTANCE", help="File for the pipeloom.instance/1."),
    schedule: Path | None = typer.Option(None, metavar="SCHEDULE", help="File for the pipeloom.schedule/1."),
    memory: str | None = typer.Option(
        None,
        metavar="LIMIT",
        help="Memory limit of every rank: a multiple of 1F1B's peak (1.5x), bytes, or none; default: as in the file.",
    ),
    split: bool = typer.Option(
        True, "--split/--no-split", help="Split backwards if the file has costs of both halves."
    ),
    method: str = typer.Option(
        _JOINT, metavar="NAME", help="joint: Pipeloom's search; adaptis: AdaPtis's three phases (pipeloom-lab)."
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of all random choices."),
    threads: int = typer.Option(0, metavar="N", help="Search threads; 0: all cores."),
    params: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="A .toml file with parameters of the joint search (pipeloom.layout.cooptimize.params).",
    ),
    page: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page about the result."),
    cluster: str = typer.Option("dip-h800-64", help="For a model. " + CLUSTER_HELP),
    tp: int = typer.Option(1, min=1, max=MAX_DEVICES, help="For a model: tensor parallelism."),
    pp: int = typer.Option(4, min=1, max=MAX_RANKS, help="For a model: pipeline ranks."),
    tokens: int = typer.Option(4096, min=1, max=MAX_COUNT, help="For a model: tokens of a microbatch (one sequence)."),
    microbatches: int = typer.Option(16, min=1, max=MAX_MICROBATCHES, metavar="N", help="For a model: microbatches."),
    megatron: bool = typer.Option(False, "--megatron", help="Print Megatron's pipeline layout string."),
    torchtitan: bool = typer.Option(False, "--torchtitan", help="Print torchtitan's module names per stage."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    check_budget(budget)
    check_seed(seed)
    if not 0 <= threads <= _MOST_THREADS:
        raise InputError("--threads", f"{threads} is not between 0 and {_MOST_THREADS}")
    known = (_JOINT, *installed(ARRANGE_METHODS))
    if method not in known:
        raise InputError("--method", f"{method!r} is none of {', '.join(known)}", "pipeloom-lab adds adaptis")
    if params is not None and method != _JOINT:
        raise InputError("--params", f"is for the joint search, not {method}", "omit --params or --method")
    check_targets(out, instance, schedule, page, later=[rule_path(out)] if is_regular_target(out) else [])
    from pipeloom.layout.cooptimize import layout_of

    table = _table(layers, cluster, Degrees(tensor=tp, pipeline=pp), tokens, microbatches)
    chain = _chain(layers, table, split, memory)
    threads = threads or min(num_cores(), _MOST_THREADS)
    found, interrupted = _search(layers, chain, budget, method, seed, threads, params)
    layout = layout_of(found.chain.num_ranks, found.placement)
    write_layout(out, layout)
    written = [str(out)]
    if is_regular_target(out):
        written.append(str(write_rule(out, found.order_rule)))
    if instance is not None:
        write_instance(instance, found.graph)
        written.append(str(instance))
    if schedule is not None:
        record = SearchRecord(found.method, seed, budget, round(found.elapsed_s, 6), found.evaluations)
        write_schedule(schedule, found.graph, found.schedule, found.timeline, _task_bound(found), record)
        written.append(str(schedule))
    standard = _standard(found.chain)
    if page is not None:
        written += _write_page(page, found, standard)
    if interrupted:
        print_note(f"interrupted: {out} has the best placement so far")
    wanted = {"Megatron": megatron, "torchtitan": torchtitan}
    others = {name: _other_format(name, layout, found.chain.layer_names) for name in wanted if wanted[name]}
    if json:
        fields = {name.lower(): text for name, text in others.items()}
        print_json(_document(found, standard) | fields | {"written": written})
        return
    for line in _lines(found, standard):
        print_line(line)
    for name, text in others.items():
        if text is not None:
            print_line(f"{name}: {text}")
    print_written(written)


def _search(
    layers: str, chain: LayerChain, seconds: float, method: str, seed: int, threads: int, params_file: Path | None
) -> tuple[CooptimizedPipeline, bool]:
    """Search and check the result; return it and whether Ctrl-C ended the search early."""
    from pipeloom.layout.cooptimize import CooptimizeParams, cooptimize
    from pipeloom.layout.cooptimize.joint import compile_kernels

    params = CooptimizeParams() if params_file is None else read_spec(params_file, CooptimizeParams)
    with interruptible(seconds) as interrupt, progress_display() as show:
        with compiled_kernels(ALL):
            compile_kernels()  # no part of the budget
        doing(f"searching (budget {seconds:g} s)")
        try:
            if method == _JOINT:
                found = cooptimize(
                    chain, budget=interrupt.budget, seed=seed, threads=threads, params=params, on_progress=show
                )
            else:
                found = installed(ARRANGE_METHODS)[method](chain, budget=interrupt.budget, on_progress=show)
        except InfeasibleError as error:
            raise type(error)(f"{layers}: {error.verdict}: {error}") from error
    # The independent checker verifies every result; a violation here is a defect of the search.
    if violations := check(found.graph, found.schedule, found.timeline):
        raise RuntimeError(f"the search gave an infeasible schedule ({violations[0]}); nothing is written")
    return found, interrupt.stopped


_OTHER_FORMATS: dict[str, Callable[[Layout, tuple[str, ...]], str | list[list[str]]]] = {
    "Megatron": megatron_layout,
    "torchtitan": torchtitan_modules,
}


def _other_format(framework: str, layout: Layout, names: tuple[str, ...]) -> str | list[list[str]] | None:
    """Return a layout in another framework's format. If that cannot express it, print a note and return None."""
    try:
        return _OTHER_FORMATS[framework](layout, names)
    except InputError as error:
        print_note(f"not supported by {framework}: {error}")
        return None


def _chain(layers: str, table: LayerTable, split: bool, memory: str | None) -> LayerChain:
    """Make a chain of layers, and apply ``--memory``."""
    from pipeloom.layout.cooptimize import chain_of_layers

    try:
        return _limit_memory(chain_of_layers(table, split=split), memory)
    except InputError as error:
        if error.entity.startswith("--"):
            raise
        raise InputError(f"{layers}: {error.entity}", error.problem, error.remedy) from error


def _table(layers: str, cluster: str, degrees: Degrees, tokens: int, microbatches: int) -> LayerTable:
    """Read a layer file, or emulate the layers of a model."""
    a_model = layers.endswith((".toml", "config.json"))
    if not a_model and (Path(layers).is_file() or layers.endswith((".json", ".json.gz"))):
        return read_layers(layers)
    from pipeloom.cost.emulated_layers import emulated_layers
    from pipeloom.spec.catalog import load_cluster

    hardware = load_cluster(cluster)
    table = emulated_layers(
        load_model(layers),
        hardware,
        degrees,
        tokens=tokens,
        num_microbatches=microbatches,
        strategies=("keep", "recompute"),
    )
    return msgspec.structs.replace(table, memory_capacity_bytes=(hardware.device.usable_bytes,) * degrees.pipeline)


def _limit_memory(chain: LayerChain, memory: str | None) -> LayerChain:
    """Apply ``--memory``; None keeps the file's own limit."""
    from pipeloom.layout.cooptimize import in_memory_of_1f1b

    if memory is None:
        return chain
    if memory == "none":
        return chain.with_capacity(None)
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)x", memory):
        factor = float(found[1])
        if not 0 < factor <= 1e6:
            raise InputError("--memory", f"{memory} is not above 0x and at most 1000000x")
        return in_memory_of_1f1b(chain, factor)
    if re.fullmatch(r"\d{1,19}", memory) and int(memory) < 2**60:
        return chain.with_capacity(int(memory))
    raise InputError("--memory", f"{memory!r} is not a limit", "give bytes, a multiple such as 1.5x, or none")


@dataclass(frozen=True, slots=True)
class _Standard:
    """1F1B on stages with equal numbers of layers, at the same costs, to compare with."""

    iteration_ns: int
    peak_bytes: int
    track: Track


def _standard(chain: LayerChain) -> _Standard | None:
    """Simulate 1F1B without a memory limit; return None if there are fewer layers than ranks."""
    from pipeloom.layout.cooptimize import graph_of
    from pipeloom.layout.cooptimize.layer_chain import iteration_ns
    from pipeloom.layout.cooptimize.standard import stages
    from pipeloom.search import one_f_one_b
    from pipeloom.timeline import simulate

    if chain.num_layers < chain.num_ranks:
        return None
    placement = stages(chain)
    graph = graph_of(chain.with_capacity(None), placement)
    order = one_f_one_b(graph)
    timeline = simulate(graph, order)
    track = make_track("1F1B, equal layers", graph, order, timeline)
    ns = iteration_ns(chain, placement, graph, timeline.end_ns)
    return _Standard(ns, int(timeline.peak_bytes.max()), track)


def _task_bound(found: CooptimizedPipeline) -> LowerBound:
    """Return a lower bound of the end of the last task, at which instances, schedules and timelines end."""
    return lower_bound(found.graph) if found.chain.end_ns.any() else found.lower_bound


def _lines(found: CooptimizedPipeline, standard: _Standard | None) -> list[str]:
    """Return the result in a few lines."""
    ns, chain = found.iteration_ns, found.chain
    texts = [
        f"iteration {time_text(ns)}, lower bound over all placements {time_text(found.lower_bound.ns)} "
        f"({found.lower_bound.name}), gap {share_text(found.gap)}, {found.evaluations} placements tried"
    ]
    if standard is not None:
        texts.append(
            f"1F1B on equal stages {time_text(standard.iteration_ns)}: "
            f"{share_text(1 - ns / standard.iteration_ns)} less; "
            f"peak memory {size_text(int(found.timeline.peak_bytes.max()))}, 1F1B {size_text(standard.peak_bytes)}"
        )
    for rank in range(chain.num_ranks):
        mine = [f"{first}-{last}" if last > first else str(first) for first, last in found.placement.layers_of(rank)]
        held = size_text(int(found.timeline.peak_bytes[rank]))
        texts.append(f"rank {rank}: layers {', '.join(mine) or 'none'}; peak memory {held}")
    return texts


def _document(found: CooptimizedPipeline, standard: _Standard | None) -> dict[str, Any]:
    """Return the result for ``--json``."""
    return {
        "name": found.chain.name,
        "makespan_s": found.iteration_ns / 1e9,
        "lower_bound_s": found.lower_bound.ns / 1e9,
        "lower_bound": found.lower_bound.name,
        "gap": found.gap,
        "one_f_one_b_s": None if standard is None else standard.iteration_ns / 1e9,
        "peak_memory_bytes": found.timeline.peak_bytes.tolist(),
        "first_layers": list(found.placement.cuts[:-1]),
        "ranks": list(found.placement.ranks),
        "strategies": found.strategies,
        "evaluations": found.evaluations,
        "elapsed_s": found.elapsed_s,
    }


def _write_page(page: Path, found: CooptimizedPipeline, standard: _Standard | None) -> list[str]:
    """Write timelines of 1F1B and the result, below an account of the search."""
    tracks = [] if standard is None else [standard.track]
    tracks.append(make_track("co-optimized", found.graph, found.schedule, found.timeline, _task_bound(found)))
    return draw(tracks, title=f"{found.chain.name}: co-optimized", note=_account(found), html_file=page)


def _account(found: CooptimizedPipeline) -> str:
    """Return an account of the search: loads, starts, and the moves that brought new bests."""
    from pipeloom.layout.cooptimize.layer_chain import rank_work_ns

    loads = rank_work_ns(found.chain, found.placement).tolist()
    by_bests = sorted(found.moves.items(), key=lambda item: -item[1][2])[:5]
    starts = ", ".join(
        f"{r.start.num_chunks} chunks: {time_text(r.start_ns)} to {time_text(r.best_ns)}" for r in found.reports
    )
    return " ".join(
        [
            *(f"{line}." for line in _lines(found, None)),
            f"Work per microbatch by rank: {', '.join(time_text(load) for load in loads)}.",
            f"{found.method[0].upper()}{found.method[1:]}, from {len(found.reports)} starts ({starts}).",
            "Changes that brought most new bests: " + ", ".join(f"{name} {c[2]}" for name, c in by_bests) + ".",
            "Times are simulated from the layer costs.",
        ]
    )
