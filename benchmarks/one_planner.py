"""One planner for packing, order, memory and layout: the numbers that it was to reach, and those that it reaches.

``python -m benchmarks one_planner --rows tight,planning`` measures some rows and prints them; all rows together, which
take an hour, are written.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks import all_four, arrange, joint, large, overtaking, own_systems, search, threads
from pipeloom.planner import FinishingTime
from pipeloom.report import markdown_table
from pipeloom.search import compile_kernels
from pipeloom_lab.reproduce.dip import planning, runs
from pipeloom_lab.reproduce.dip.large import mean_and_mfu
from pipeloom_lab.reproduce.dip.setups import LARGE, SETUPS
from pipeloom_lab.reproduce.part import Options
from pipeloom_lab.reproduce.pipetune import setups as pipetune

TITLE = "Joint planner"
_OPTIONS = Options(iterations=1)
_TIGHT = ("vlm-s-m1.5", "vlm-s-k3-m2.5", "vlm-l-k2-m1.5")
_ORDERS_MS = {"gpt-13b": 3060.0, "nemotron-nano-9b": 1880.0}


class Measurement(NamedTuple):
    """What a row came to; ``reached`` is None where this machine cannot tell. ``detail``: tables for below."""

    text: str
    reached: bool | None
    detail: tuple[str, ...] = ()


class Row(NamedTuple):
    """A number to reach."""

    title: str
    target: str
    measure: Callable[[Path | None], Measurement]


def run(layers: Path | None = None, rows: Sequence[str] = ()) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    layers : Path or None
        Folder of measured layers, `pipeloom.layers/1`; they are not part of the repository.
    rows : sequence of str
        Names in `ROWS`; none: all.
    """
    unknown = set(rows) - set(ROWS)
    if unknown:
        sys.exit(f"rows: {', '.join(sorted(unknown))} unknown; there are {', '.join(ROWS)}")
    lines: list[list[str]] = []
    details: list[str] = []
    compile_kernels()
    for name in rows or ROWS:
        row, began_s = ROWS[name], time.process_time()
        found = row.measure(layers)
        verdict = "not tried" if found.reached is None else "reached" if found.reached else "MISSED"
        lines.append([row.title, row.target, found.text, verdict])
        details += found.detail
        print(f"  {name}: {found.text}: {verdict} ({time.process_time() - began_s:.0f} CPU s)", flush=True)
    table = markdown_table(["", "goal", "measured", ""], lines)
    return "\n\n".join((table, *details))


def _combinations(_layers: Path | None) -> Measurement:
    """The covering set is a test; it is run as one."""
    # Without durations the last line says how many passed.
    command = [sys.executable, "-m", "pytest", "--override-ini=addopts=", "-n", "0", "tests/combinations"]
    root = Path(__file__).parents[1]
    made = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (made.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    return Measurement(f"tests/combinations: {last}", made.returncode == 0)


def _size(_layers: Path | None) -> Measurement:
    setting = pipetune.emulated(pipetune.ON_A["13b"])
    layout = joint.separate_layout(setting)
    batches = [pipetune.batch_of(setting.setup, "datamix2", number) for number in range(joint.BATCHES)]
    seconds = mean(joint.planned_s(setting, layout, batch, "planned", setting.max_contexts) for batch in batches)
    return Measurement(f"{seconds:.2f} s", seconds <= 3.97)


def _orders(layers: Path | None) -> Measurement:
    files = sorted(layers.glob("*.layers.json")) if layers is not None else []
    found = dict(arrange.trained_ms(file) for file in files)
    known = {name: found[name] for name in _ORDERS_MS if name in found}
    if len(known) < len(_ORDERS_MS):
        return Measurement("no layers of measured models at hand (--layers FOLDER)", None)
    text = "; ".join(f"{name}: {', '.join(f'{ms:.0f}' for ms in each)}" for name, each in known.items())
    return Measurement(f"{text} ms (seeds)", all(max(each) <= _ORDERS_MS[name] for name, each in known.items()))


def _own(_layers: Path | None) -> Measurement:
    found = []
    for one in own_systems.compare():
        print(f"    {one.workload}: {one.ours_s:.3f}, {one.own} {one.own_s:.3f}, {one.gain:+.1%}", flush=True)
        found.append(one)
    text, reached, rows = own_systems.describe(found)
    table = markdown_table(["workload", "joint, s", "the paper's own, s", "baseline", "faster by"], rows)
    words = (
        "The joint planner has one CPU second per batch. DIP's tree searches have ten CPU seconds, and "
        "a layout by DIP's rules. Pipeloom's layout was chosen before, on other iterations. PipeTune's "
        "recurrence ends by itself. AdaPtis' generator and the co-optimization have "
        f"{own_systems.ADAPTIS_SEARCH:g} CPU s before training. If a published baseline is faster than AdaPtis, the "
        "table has that one."
    )
    return Measurement(text, reached, (words, table))


def _four(_layers: Path | None) -> Measurement:
    found = all_four.measure()
    table = markdown_table(["baseline, its best microbatches", "s", "longer by"], list(all_four.rows_of(found)))
    return Measurement(f"{found.gain:+.1%} over the best alone", found.gain >= all_four.LEAST_GAIN, (table,))


def _t2v_l(_layers: Path | None) -> Measurement:
    setup, numbers = SETUPS["T2V-L"], runs.iterations(_OPTIONS, 1)
    ours = runs.all_timed(setup, runs.OURS_GIVEN, numbers, _OPTIONS.search_s)
    same = runs.all_timed(setup, runs.OURS_SAME, numbers, _OPTIONS.search_s)
    if ours is None or same is None:
        return Measurement("an iteration does not fit", False)
    first, second = mean(one.seconds for one in ours), mean(one.seconds for one in same)
    gap = max(one.seconds / one.bound_s - 1 for one in ours)
    text = f"{first:.1f} s, on DIP's layout {second:.1f} s; {100 * gap:.1f} % above the bound"
    return Measurement(text, first <= second and gap <= 0.05)


def _t2v_xl(_layers: Path | None) -> Measurement:
    found = {}
    for label in ("T2V-XL, 3072 GPUs", "T2V-XL, 6144 GPUs"):
        values = mean_and_mfu(LARGE[label], runs.OURS_GIVEN, runs.iterations(_OPTIONS, 1)[:1], _OPTIONS.search_s)
        found[label] = 0.0 if values is None else values[1]
    text = "; ".join(f"{label}: {value:.3f}" for label, value in found.items())
    return Measurement(text, max(found.values()) > 0.39)


def _tight(_layers: Path | None) -> Measurement:
    gaps = {kind: median(100 * one.gap for one in search.runs_of(kind)) for kind in _TIGHT}
    text = ", ".join(f"{gap:.1f}" for gap in gaps.values())
    return Measurement(f"{text} % (medians of five)", max(gaps.values()) <= 3.0)


def _exact(_layers: Path | None) -> Measurement:
    above = [each for number in overtaking.SIZES for each in overtaking.above_exact(number)]
    text = f"worst {max(above):.2f} %, median {median(above):.2f} %"
    return Measurement(text, round(max(above), 1) <= 0.3 and round(median(above), 1) <= 0.0)


def _chains(_layers: Path | None) -> Measurement:
    gaps = [median(100 * one.gap for one in arrange.searched(chain, 5.0)) for _, chain in arrange.random_chains()]
    text = f"{', '.join(f'{gap:.1f}' for gap in gaps)} %"
    return Measurement(text, max(gaps) <= 1.2)


def _planning(_layers: Path | None) -> Measurement:
    spent: dict[str, float] = {}
    finishing = FinishingTime()
    for label, setup in SETUPS.items():
        found = [planning.planned(setup, *each, _OPTIONS, finishing) for each in runs.iterations(_OPTIONS, 1)]
        spent[label] = max(float("inf") if one is None else sum(one.spent_s) for one in found)
    text = ", ".join(f"{label} {seconds:.2f}" for label, seconds in spent.items())
    return Measurement(f"{text} (largest of three)", max(spent.values()) <= 1.0)


def _large(_layers: Path | None) -> Measurement:
    of, (_, few, many) = large.SHAPES[large.TIGHT]
    least, most = (large.measure(of, count) for count in (few, many))
    text = (
        f"{most.num_tasks} tasks: check {most.check_s:.1f} s; first schedule {most.first_s:.1f} s; gap after 30 s "
        f"{most.gap:.1f} %, with {least.num_tasks} tasks {least.gap:.1f} %"
    )
    return Measurement(text, most.check_s <= 1.0 and most.first_s <= 10.0 and most.gap <= least.gap + 0.1)


def _threads(_layers: Path | None) -> Measurement:
    cores = len(os.sched_getaffinity(0))
    if cores < threads.THREADS:
        return Measurement(f"{cores} cores here, {threads.THREADS} are needed", None)
    one, many = (
        threads.gap("vlm-s-m1.5/0", 0, count, seconds, real=True)
        for count, seconds in ((1, 4.0), (threads.THREADS, 1.0))
    )
    return Measurement(f"{many:.2f} % in 1 s; one thread {one:.2f} % in 4 s", many <= one)


ROWS = {
    "combinations": Row("covering set of combinations", "all run, gradients within 1e-10", _combinations),
    "size": Row("13B DataMix2, separate layout, size not configured", "at most 3.97 s", _size),
    "orders": Row("order of a co-optimized layout, 0.05 s: gpt-13b, nemotron", "at most 3060, 1880 ms", _orders),
    "own": Row(
        "joint planner over each paper's own baseline, 1 CPU s", "never slower by 0.5 %, mean at least 3 % faster", _own
    ),
    "four": Row("a workload that needs all four, over the best alone", "at least 10 %", _four),
    "t2v-l": Row("T2V-L: chosen layout, ours on DIP's; from the bound", "never slower; at most 5 %", _t2v_l),
    "t2v-xl": Row("T2V-XL, MFU", "above 0.39", _t2v_xl),
    "tight": Row(f"gap in 1 CPU s: {', '.join(_TIGHT)}", "at most 3 %", _tight),
    "exact": Row("above CP-SAT's 60 s, vlm-s, memory 1.5, 4 to 6 microbatches", "worst 0.3, median 0.0 %", _exact),
    "chains": Row("ten random chains, medians above the bound", "all at most 1.2 %", _chains),
    "planning": Row("samples to verified plan, CPU s", "all at most 1.0", _planning),
    "large": Row("512k tasks in limited memory", "check 1 s; first schedule 10 s; gap as at 32k", _large),
    "threads": Row("8 threads on 8 cores against one", "its gap in a quarter of the time", _threads),
}
"""By name, in the order of the table."""
