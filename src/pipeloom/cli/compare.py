"""`pipeloom plan MODEL --cluster --data --compare`: systems on one iteration of a described model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipeloom.cli.output import check_targets, draw, print_json, stderr, stdout
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.io import SAMPLE_SUFFIXES, read_samples
from pipeloom.report import key_figures, make_track, share_text, size_text, time_text
from pipeloom.spec import Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.hardware import Degrees

if TYPE_CHECKING:
    from pipeloom.planner.case import Case, Groups
    from pipeloom.planner.comparison import Comparison
    from pipeloom.planner.layout_trial import LayoutTrial

OTHERS = 5
"""Layouts shown beside the chosen one."""


def load_model(name: str) -> Architecture:
    """A model of the zoo, a TOML file, a Hugging Face `config.json`, or a folder that holds one."""
    from pipeloom.spec.catalog import load_architecture

    if name.endswith(".json") or Path(name).is_dir():
        from pipeloom.integrations.huggingface import read_huggingface

        return read_huggingface(name)
    return load_architecture(name)


def compare(
    model: str, cluster: str, degrees: Degrees, data: str | None, microbatches: int, systems: str, tokens: int,
    budget: float, seed: int, html: Path | None, out: Path | None, json: bool,
) -> None:  # fmt: skip
    """Time one iteration under several systems and show them together."""
    from pipeloom.planner.case import make_case
    from pipeloom.planner.comparison import compare_case, suitable
    from pipeloom.search import Deadline, warm_up

    page = html or (None if out is None else out / "comparison.html")
    check_targets(html)
    case = make_case(load_model(model), cluster, degrees)
    names = suitable(case, None if systems == "all" else systems.split(","))
    typical, groups = sampled(case, data, microbatches, tokens, seed)
    with stderr().status("compiling ...") as status:
        warm_up()
        found = compare_case(
            case, typical, groups, names, budget=Deadline(budget), seed=seed,
            on_system=lambda title: status.update(f"{title} ..."),
        )  # fmt: skip
    rows = [_row(case, groups, one) for one in found]
    basis = {"device": case.machine.device.name, "device_basis": case.machine.device.basis, "seed": seed}
    where = f"tp {degrees.tensor} pp {degrees.pipeline} dp {degrees.data}"
    title = f"{case.architecture.name} on {case.machine.name}, {where}"
    written = []
    if page is not None:
        if out is not None:
            from pipeloom.io import make_folder

            make_folder(out)
        tracks = [
            make_track(one.title, r.graph, r.schedule, r.timeline, r.lower_bound, r.layout.chunk_names)
            for one in found if (r := one.result) is not None
        ]  # fmt: skip
        if not tracks:
            raise InfeasibleError(f"{title}: no system fits: {found[-1].problem}")
        note = f"Emulated from the {case.machine.device.basis} table of {case.machine.device.name}."
        written = draw(tracks, title=title, note=note, html_file=page)
    if json:
        print_json({"model": case.architecture.name, "cluster": case.machine.name, "kind_of_time": "emulated", **basis,
                    "num_microbatches": len(groups), "systems": rows, "written": written})  # fmt: skip
        return
    _print(rows, title, case, len(groups), seed)
    for name in written:
        typer.echo(f"wrote {name}")


def sampled(
    case: Case, data: str | None, count: int, tokens: int, seed: int
) -> tuple[Sequence[Groups], Groups]:
    """Iterations to choose layouts on, and the one to compare, of ``count`` microbatches.

    Of a user's own samples the first make the iteration, the rest those before it; where there are not enough for
    another, layouts are chosen on the iteration itself.
    """
    from pipeloom.planner.case import draw_groups

    if data is None or not data.endswith(SAMPLE_SUFFIXES):
        return [
            draw_groups(case, count, seed + 1_000_003),
            draw_groups(case, count, seed + 1_000_004),
        ], draw_groups(case, count, seed, data)
    groups = own_groups(case.architecture, read_samples(data), tokens, count)
    if len(groups) < count:
        raise InputError(
            data,
            f"gives {len(groups)} microbatches, {count} are wanted",
            "use --microbatches, or more samples",
        )
    rest = [groups[i : i + count] for i in range(count, len(groups) - count + 1, count)][:2]
    return rest or [groups[:count]], groups[:count]


def own_groups(
    architecture: Architecture, samples: Sequence[Sample], tokens: int, count: int
) -> list[list[Sample]]:
    """Pack a user's own samples as the papers do: in order, up to a number of tokens, or clips by their length.

    Clips are grouped iteration by iteration, of ``count`` microbatches each.
    """
    from pipeloom.spec.datasets import clips_of_iterations, pack_documents

    if any(module.reads == "videos" for module in architecture.modules):
        return [group for groups in clips_of_iterations(list(samples), count) for group in groups]
    longest = max(samples, key=lambda s: s.sequence_tokens)
    if longest.sequence_tokens > tokens:
        raise InputError(
            f"sample {longest.id!r}", f"has {longest.sequence_tokens} tokens, a microbatch {tokens}",
            "use --tokens, or shorten the sample",
        )  # fmt: skip
    return pack_documents(list(samples), tokens, max_images=tokens)


def _row(case: Case, groups: Groups, one: Comparison) -> dict[str, Any]:
    tried = {"layouts": [_tried(trial) for trial in one.tried]} if one.tried else {}
    if one.result is None:
        return {"system": one.name, "title": one.title, "problem": one.problem} | tried
    from pipeloom.planner.systems import mfu

    r = one.result
    numbers = key_figures(make_track(one.title, r.graph, r.schedule, r.timeline, r.lower_bound))
    return {
        "system": one.name,
        "title": one.title,
        "iteration_s": r.iteration_s + case.update_s,
        "mfu": mfu(case, groups, r.iteration_s),
        "bubble_share": numbers.bubble_share,
        "peak_memory_bytes": numbers.peak_bytes,
        "gap": numbers.gap,
    } | tried


def _tried(trial: LayoutTrial) -> dict[str, Any]:
    """A layout that was tried before training; seconds of one that was ruled out early are what it takes at least."""
    if trial.problem:
        return {"layout": trial.name, "problem": trial.problem}
    key = "more_than_s" if trial.ruled_out else "planned_s"
    return {"layout": trial.name, key: trial.seconds, "lower_bound_s": trial.bound_s}


def _print(rows: list[dict[str, Any]], title: str, case: Case, count: int, seed: int) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("system", no_wrap=True)
    for name in ("iteration", "MFU", "bubbles", "peak memory", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    best = min((row["iteration_s"] for row in rows if "problem" not in row), default=0.0)
    for row in rows:
        if "problem" in row:
            table.add_row(row["system"], "does not fit", "", "", "", "")
            continue
        table.add_row(
            row["system"], time_text(round(row["iteration_s"] * 1e9)), f"{row['mfu']:.3f}",
            share_text(row["bubble_share"]), size_text(row["peak_memory_bytes"]), share_text(row["gap"]),
            style="bold" if row["iteration_s"] == best else "",
        )  # fmt: skip
    console = stdout()
    console.print(table)
    for row in rows:
        if "problem" in row:
            console.print(f"{row['system']}: {row['problem']}", markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        for line in _layout_lines(row):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    device = case.machine.device
    console.print(
        f"{count} microbatches a replica, seed {seed}. Emulated, not measured: {device.name}, {device.basis} table.",
        style="dim",
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
        value = f"{one['planned_s']:.4g} s" if "planned_s" in one else (
            "does not fit" if "problem" in one else f"more than {one['more_than_s']:.4g} s")  # fmt: skip
        lines.append(f"  {one['layout']}: {value}")
    if len(others) > OTHERS:
        lines.append(f"  and {len(others) - OTHERS} more, in --json")
    return lines
