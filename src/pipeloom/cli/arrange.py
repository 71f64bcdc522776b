"""`pipeloom arrange`: partition, placement and schedule of a chain of layers, chosen together."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from pipeloom.cli.compare import load_model
from pipeloom.cli.options import check_budget, check_seed
from pipeloom.cli.output import JSON_HELP, check_targets, draw, note_compiling, print_json, print_note
from pipeloom.cli.solve import interruptible, progress_display
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.io import SearchRecord, read_layers, write_instance, write_layout, write_schedule
from pipeloom.io.stage_names import megatron_layout, torchtitan_modules
from pipeloom.report import make_track, share_text, size_text, time_text
from pipeloom.timeline import check

if TYPE_CHECKING:
    from pipeloom.arrange import Arranged, LayerChain
    from pipeloom.cost.layers import LayerTable
    from pipeloom.report import Track

EPILOG = (
    "Example: pipeloom arrange model.layers.json --budget 5 --out layout.json --instance instance.json --schedule "
    "schedule.json --memory 1.5x. Ctrl-C ends the search early and writes the best so far. Exit code 2: a file or "
    "value is wrong, or nothing fits into memory."
)
METHODS = ("joint", "adaptis")
_MOST_THREADS = 16


def arrange(
    layers: str = typer.Argument(
        ...,
        metavar="LAYERS",
        help="A pipeloom.layers/1 file; or a model: zoo name, .toml, Hugging Face config.json.",
    ),
    budget: float = typer.Option(..., metavar="SECONDS", help="Seconds of search; loading is not counted."),
    out: Path = typer.Option(..., metavar="LAYOUT", help="File for the pipeloom.layout/1."),
    instance: Path | None = typer.Option(None, metavar="INSTANCE", help="File for the pipeloom.instance/1."),
    schedule: Path | None = typer.Option(None, metavar="SCHEDULE", help="File for the pipeloom.schedule/1."),
    memory: str | None = typer.Option(
        None,
        metavar="LIMIT",
        help="Limit of every rank: 1.5x (of what 1F1B holds on its fullest rank), bytes, or none; default: the file's.",
    ),
    split: bool = typer.Option(
        True, "--split/--no-split", help="Split backwards where the file gives both parts."
    ),
    method: str = typer.Option(
        "joint", metavar="NAME", help="joint: ours; adaptis: that paper's generator, one phase at a time."
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of all random choices."),
    threads: int = typer.Option(0, metavar="N", help="Threads that search; 0: all cores."),
    page: Path | None = typer.Option(
        None, metavar="FILE", help="Write an offline page: what was chosen, and why."
    ),
    cluster: str = typer.Option("dip-h800-64", help="For a model: a cluster of the zoo, or a .toml file."),
    tp: int = typer.Option(1, min=1, help="For a model: tensor parallelism."),
    pp: int = typer.Option(4, min=1, help="For a model: pipeline ranks."),
    tokens: int = typer.Option(4096, min=1, help="For a model: tokens of a microbatch, one sequence."),
    microbatches: int = typer.Option(16, min=1, metavar="N", help="For a model: microbatches."),
    megatron: bool = typer.Option(False, "--megatron", help="Print Megatron's pipeline layout string."),
    torchtitan: bool = typer.Option(False, "--torchtitan", help="Print torchtitan's module names per stage."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Choose partition, placement and schedule of a chain of layers together.

    Any number of chunks per rank, uneven, in any order, within every rank's memory. The answer says how far from
    the best possible it can be at most.
    """
    check_budget(budget)
    check_seed(seed)
    if not 0 <= threads <= _MOST_THREADS:
        raise InputError("--threads", f"{threads} is not between 0 and {_MOST_THREADS}")
    if method not in METHODS:
        raise InputError("--method", f"{method!r} is unknown", f"use {' or '.join(METHODS)}")
    check_targets(out, instance, schedule, page)
    table = _table(layers, cluster, tp, pp, tokens, microbatches)
    from pipeloom.arrange import arrange as search
    from pipeloom.arrange import chain_of_layers, layout_of, tune_phases
    from pipeloom.arrange.joint import warm_up

    try:
        chain = limit_memory(chain_of_layers(table, split=split), memory)
    except InputError as error:
        if error.entity.startswith("--"):
            raise
        raise InputError(f"{layers}: {error.entity}", error.problem, error.remedy) from error
    with interruptible(budget) as rule, progress_display() as show:
        with note_compiling():
            warm_up()  # no part of the budget
        try:
            if method == "joint":
                found = search(
                    chain, budget=rule, seed=seed, threads=threads or num_threads(), on_progress=show
                )
            else:
                found = tune_phases(chain, budget=rule, on_progress=show)
        except InfeasibleError as error:
            raise InfeasibleError(f"{layers}: infeasible: {error}") from error
    # Nothing leaves that the independent checker has not passed; a violation here is a defect of the search.
    if violations := check(found.graph, found.schedule, found.timeline):
        raise RuntimeError(f"the search gave an infeasible schedule ({violations[0]}); nothing is written")
    layout = layout_of(chain.num_ranks, found.arrangement)
    record = SearchRecord(found.method, seed, budget, round(found.elapsed_s, 6), found.evaluations)
    write_layout(out, layout)
    written = [str(out)]
    if instance is not None:
        write_instance(instance, found.graph)
        written.append(str(instance))
    if schedule is not None:
        write_schedule(schedule, found.graph, found.schedule, found.timeline, found.lower_bound, record)
        written.append(str(schedule))
    standard = compare(chain)
    if page is not None:
        written += write_page(page, found, standard)
    if rule.stopped:
        print_note(f"interrupted: {out} holds the best arrangement so far")
    if json:
        print_json(document(found, standard) | {"written": written})
        return
    for line in lines(found, standard):
        typer.echo(line)
    for wanted, other, write in (
        (megatron, "Megatron", megatron_layout), (torchtitan, "torchtitan", torchtitan_modules)
    ):  # fmt: skip
        if wanted:
            try:
                typer.echo(f"{other}: {write(layout, chain.layer_names)}")
            except InputError as error:
                print_note(f"not expressible for {other}: {error}")
    for target in written:
        typer.echo(f"wrote {target}")


def _table(layers: str, cluster: str, tp: int, pp: int, tokens: int, microbatches: int) -> LayerTable:
    """Read a layer file, or emulate the layers of a model."""
    a_model = layers.endswith((".toml", "config.json"))
    if not a_model and (Path(layers).is_file() or layers.endswith((".json", ".json.gz"))):
        return read_layers(layers)
    from pipeloom.cost.emulated_layers import emulated_layers
    from pipeloom.spec.catalog import load_machine
    from pipeloom.spec.hardware import Degrees

    machine = load_machine(cluster)
    table = emulated_layers(
        load_model(layers), machine, Degrees(tensor=tp, pipeline=pp), tokens=tokens,
        num_microbatches=microbatches, strategies=("keep", "full"),
    )  # fmt: skip
    return msgspec.structs.replace(table, memory_capacity_bytes=(machine.device.usable_bytes,) * pp)


def num_threads() -> int:
    """Cores that this process may use, up to a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_THREADS)


def limit_memory(chain: LayerChain, memory: str | None) -> LayerChain:
    """Apply ``--memory``: None keeps the file's own limit.

    Raises
    ------
    InputError
        The word is none of ``none``, a number of bytes, or a multiple such as ``1.5x``.
    """
    from pipeloom.arrange import one_f_one_b_peaks

    if memory is None:
        return chain
    if memory == "none":
        return chain.with_capacity(None)
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)x", memory):
        factor = float(found[1])
        if not 0 < factor <= 1e6:
            raise InputError("--memory", f"{memory} is not above 0x and at most 1000000x")
        return chain.with_capacity(math.floor(factor * int(one_f_one_b_peaks(chain).max())))
    if re.fullmatch(r"\d{1,19}", memory) and int(memory) < 2**60:
        return chain.with_capacity(int(memory))
    raise InputError("--memory", f"{memory!r} is no limit", "give bytes, a multiple such as 1.5x, or none")


@dataclass(frozen=True, slots=True)
class Standard:
    """1F1B on stages of equally many layers: what the answer is compared with, on the same costs."""

    makespan_ns: int
    peak_bytes: int
    track: Track


def compare(chain: LayerChain) -> Standard | None:
    """Run 1F1B without a memory limit; None where there are fewer layers than ranks."""
    from pipeloom.arrange import graph_of
    from pipeloom.arrange.standard import stages
    from pipeloom.baselines import one_f_one_b
    from pipeloom.timeline import simulate

    if chain.num_layers < chain.num_ranks:
        return None
    graph = graph_of(chain.with_capacity(None), stages(chain))
    order = one_f_one_b(graph)
    timeline = simulate(graph, order)
    track = make_track("1F1B, equal layers", graph, order, timeline)
    return Standard(timeline.makespan_ns, int(timeline.peak_bytes.max()), track)


def lines(found: Arranged, standard: Standard | None) -> list[str]:
    """The answer in a few lines."""
    ns, chain = found.timeline.makespan_ns, found.chain
    said = [
        f"makespan {time_text(ns)}, lower bound over all arrangements {time_text(found.lower_bound.ns)} "
        f"({found.lower_bound.name}), gap {share_text(max(found.gap, 0.0))}, {found.evaluations} arrangements tried"
    ]
    if standard is not None:
        said.append(
            f"1F1B on equal stages {time_text(standard.makespan_ns)}: "
            f"{share_text(1 - ns / standard.makespan_ns)} less; "
            f"peak memory {size_text(int(found.timeline.peak_bytes.max()))}, 1F1B {size_text(standard.peak_bytes)}"
        )
    for rank in range(chain.num_ranks):
        mine = [
            f"{first}-{last - 1}" if last - first > 1 else str(first)
            for first, last, home in zip(
                found.arrangement.cuts, found.arrangement.cuts[1:], found.arrangement.ranks, strict=False
            )
            if home == rank
        ]
        held = size_text(int(found.timeline.peak_bytes[rank]))
        said.append(f"rank {rank}: layers {', '.join(mine) or 'none'}; peak memory {held}")
    return said


def document(found: Arranged, standard: Standard | None) -> dict[str, Any]:
    """The answer for ``--json``."""
    return {
        "name": found.chain.name,
        "makespan_s": found.timeline.makespan_ns / 1e9,
        "lower_bound_s": found.lower_bound.ns / 1e9,
        "lower_bound": found.lower_bound.name,
        "gap": found.gap,
        "one_f_one_b_s": None if standard is None else standard.makespan_ns / 1e9,
        "peak_memory_bytes": found.timeline.peak_bytes.tolist(),
        "first_layers": list(found.arrangement.cuts[:-1]),
        "ranks": list(found.arrangement.ranks),
        "strategies": [
            names[index]
            for names, index in zip(
                found.chain.strategies,
                found.arrangement.strategies or (0,) * found.chain.num_layers,
                strict=True,
            )
        ],
        "evaluations": found.evaluations,
        "elapsed_s": found.elapsed_s,
    }


def write_page(page: Path, found: Arranged, standard: Standard | None) -> list[str]:
    """Timelines of 1F1B and of the answer, with the search's own account above them."""
    tracks = [] if standard is None else [standard.track]
    tracks.append(make_track("arranged", found.graph, found.schedule, found.timeline, found.lower_bound))
    return draw(tracks, title=f"{found.chain.name}: arranged", note=account(found), html_file=page)


def account(found: Arranged) -> str:
    """What the search did and why it chose this: loads, starts, and the moves that brought new bests."""
    from pipeloom.arrange.layer_chain import chunk_costs

    costs = chunk_costs(found.chain, found.arrangement)
    work = costs.forward_ns + costs.backward_ns + costs.weight_ns
    loads = [
        int(sum(int(w) for w, home in zip(work, found.arrangement.ranks, strict=True) if home == rank))
        for rank in range(found.chain.num_ranks)
    ]
    by_bests = sorted(found.moves.items(), key=lambda item: -item[1][2])[:5]
    starts = ", ".join(
        f"{r.start.num_chunks} chunks: {time_text(r.start_ns)} to {time_text(r.best_ns)}"
        for r in found.reports
    )
    return " ".join([
        *(f"{line}." for line in lines(found, None)),
        f"Work per microbatch by rank: {', '.join(time_text(load) for load in loads)}.",
        f"{found.method[0].upper()}{found.method[1:]}, from {len(found.reports)} starts ({starts}).",
        "Changes that brought most new bests: " + ", ".join(f"{name} {c[2]}" for name, c in by_bests) + ".",
        "Times are planned from the given layer costs.",
    ])  # fmt: skip
