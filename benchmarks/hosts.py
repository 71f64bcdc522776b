"""Several hosts, in network namespaces: what messages take against their plan, and what plans gain that know links."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.slow_task import NAME, build_model, write_run
from pipeloom.layout import by_count, chain_of_stages, separate
from pipeloom.layout.links import closer
from pipeloom.report import markdown_table
from pipeloom.spec import Layout
from pipeloom.training.record import Row, read_history
from tests.cluster.hosts import hosts, why_not

TITLE = "Several hosts"
_TASK = Path(__file__).parent / "hosts_task.py"
_ROOT = Path(__file__).parents[1]
_LAYERS = 2
"""Of each module on a rank."""
_STRETCH, _SETTLED, _TURNS = 10, 4, 2
"""Iterations of a kind in a row, those of them that are left out, and how often both kinds come."""
_SIZES = ((0, "below 0.1 MB"), (100_000, "0.1 to 0.5 MB"), (500_000, "0.5 to 2 MB"), (2_000_000, "2 to 8 MB"))


class Case(NamedTuple):
    """Hosts, ranks on each, how modules lie, numbers in a row, and where the passes over the ranks go."""

    num_hosts: int
    per_host: int
    layout: Literal["divided", "one chain, two chunks a rank"]
    width: int
    placement: Literal["as numbered", "there and back", "group by group"] = "as numbered"


MESSAGES = (
    Case(2, 1, "divided", 1200),
    Case(3, 1, "divided", 1200),
    Case(2, 2, "divided", 1200),
    Case(2, 2, "divided", 300),
)
GAINS = (
    Case(2, 2, "divided", 300),
    Case(2, 2, "divided", 1200),
    Case(2, 2, "one chain, two chunks a rank", 1200),
    Case(3, 2, "divided", 1200),
)
PLACEMENTS = tuple(
    Case(2, 2, "one chain, two chunks a rank", width, placement)
    for width in (300, 1200, 2400)
    for placement in ("as numbered", "there and back", "group by group")
)


def available() -> bool:
    """Whether this machine allows network namespaces."""
    return not why_not()


def run(
    messages: tuple[Case, ...] = MESSAGES, gains: tuple[Case, ...] = GAINS, placements: tuple[Case, ...] = PLACEMENTS
) -> str:
    """Measure, and return the section as Markdown."""
    header = ["hosts x ranks", "row, kB", "messages", "number", "planned, ms", "measured, ms", "median error"]
    rows = [row for setting in messages for row in _message_rows(setting)]
    text = (
        "Network namespaces on one machine, with 1 Gbit/s between them and loopback inside. torchrun "
        f"starts ranks with layers that sleep ({_LAYERS} layers of each module per rank) and with real "
        "messages over gloo. The table has the messages that their receiver waited for, timed from the "
        "moment both ends had posted them, and their planned times. Medians."
    )
    parts = [text, markdown_table(header, rows)]
    header = ["hosts x ranks", "layout", "row, kB", "one link for all, ms", "links known, ms", "shorter", "planned, ms"]
    text = (
        "The same ranks, planned with one link that is fitted to all messages, and with known link times: "
        f"{_STRETCH} iterations each in turn, {_TURNS} times, on batches of equal sizes. A microbatch "
        "has 300 tokens. With rows of 4.8 kB, a message between hosts takes as long as a chunk's forward, "
        "and with 1.2 kB a quarter of it. Measured times are medians of iterations. Planned times use "
        "the known links."
    )
    parts += [text, markdown_table(header, [_gain_row(setting) for setting in gains])]
    header = ["hosts x ranks", "row, kB", "placement", "planned, ms", "measured, ms"]
    text = (
        "One chain with two chunks per rank, in three placements: as numbered, which ignores link times, "
        "and the two that Pipeloom tries if link times differ. Planned with the known links. Medians "
        "of iterations."
    )
    return "\n\n".join([*parts, text, markdown_table(header, [_placement_row(setting) for setting in placements])])


def _message_rows(setting: Case) -> list[list[str]]:
    _, lines = _train(setting, 16, 0)
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in lines[_SETTLED:]:
        for first, second, num_bytes, planned_s, measured_s in line["messages"]:
            where = "inside a host" if first == second else "between hosts"
            size = next(name for least, name in reversed(_SIZES) if num_bytes >= least)
            found[where, size].append((planned_s, measured_s))
    rows = []
    for (where, size), pairs in sorted(found.items()):
        planned, measured = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        off = statistics.median(abs(m / p - 1) for p, m in pairs)
        row = f"{setting.width * 4 / 1e3:.1f}"
        name = f"{setting.num_hosts} x {setting.per_host}"
        rows.append([name, row, f"{where}, {size}", str(len(pairs)), f"{planned:.2f}", f"{measured:.2f}", f"{off:.0%}"])
    return rows


def _gain_row(setting: Case) -> list[str]:
    rows, lines = _train(setting, 2 * _STRETCH * _TURNS, _STRETCH)
    kinds: dict[bool, list[Row]] = {True: [], False: []}
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        if number % _STRETCH >= _SETTLED:
            kinds[line["blind"]].append(row)
    blind, known = (statistics.median(row.measured_s for row in kinds[kind]) for kind in (True, False))
    planned = statistics.median(row.planned_s for row in kinds[False])
    times = [f"{each * 1e3:.0f}" for each in (blind, known)]
    name = f"{setting.num_hosts} x {setting.per_host}"
    return [
        name,
        setting.layout,
        f"{setting.width * 4 / 1e3:.1f}",
        *times,
        f"{1 - known / blind:.1%}",
        f"{planned * 1e3:.0f}",
    ]


def _placement_row(setting: Case) -> list[str]:
    rows, _ = _train(setting, 14, 0)
    times = [(row.planned_s, row.measured_s) for row in rows[_SETTLED:]]
    planned, measured = (statistics.median(each) * 1e3 for each in zip(*times, strict=True))
    name = f"{setting.num_hosts} x {setting.per_host}"
    return [name, f"{setting.width * 4 / 1e3:.1f}", setting.placement, f"{planned:.0f}", f"{measured:.0f}"]


def _placed(layout: Layout, setting: Case) -> Layout:
    if setting.placement == "as numbered":
        return layout
    host = np.arange(layout.num_ranks) // setting.per_host
    distances = np.where(host[:, None] == host, 0.05, 1.0)
    return dict(closer(layout, distances))[setting.placement]


def _train(setting: Case, iterations: int, stretch: int) -> tuple[list[Row], list[dict[str, Any]]]:
    ranks = setting.num_hosts * setting.per_host
    layers = _LAYERS * ranks
    spec = build_model(0, layers).spec
    is_divided = setting.layout == "divided"
    layout = separate(spec, ranks, {}, by_count) if is_divided else chain_of_stages(spec, ranks, 2, by_count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "messages.jsonl"
        fields = {"layers": layers, "width": setting.width, "stretch": stretch, "file": str(file)}
        config = write_run(folder, _placed(layout, setting), _TASK, iterations, fields, deadline_s=10.0)
        with hosts(setting.num_hosts) as machines:
            started = []
            for host in machines:
                command = [*host.torchrun(str(setting.num_hosts), setting.per_host), "-m", "pipeloom", "train"]
                rest = [str(config), "--runs", str(folder / f"runs-{host.number}")]
                started.append(host.start([*command, *rest], folder, {"PYTHONPATH": str(_ROOT)}))
            codes = [process.wait(600) for process in started]
        if any(codes):
            raise RuntimeError((folder / "host-0.txt").read_text()[-2000:])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return read_history(folder / "runs-0" / NAME / "history.jsonl"), lines
