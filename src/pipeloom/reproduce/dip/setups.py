"""The evaluation's models, clusters and sampled data, and small helpers of all parts."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeloom.errors import InfeasibleError
from pipeloom.planner.case import Case, Groups, draw_groups, make_case
from pipeloom.planner.choose_layout import LayoutTrial, choose_layout
from pipeloom.planner.compare import SystemTimeline
from pipeloom.planner.systems import System
from pipeloom.reproduce.part import Options
from pipeloom.search import Deadline, warm_up
from pipeloom.spec.hardware import Degrees
from pipeloom.timeline import check

TYPICAL_SEEDS = (1000, 1001)
"""Of the iterations that layouts are chosen on; none of them is timed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One row of the paper's Tables 3 and 6; microbatches are those of one pipeline replica."""

    model: str
    cluster: str
    tensor: int
    pipeline: int
    data: int = 1
    num_microbatches: int = 64
    """`dip.txt` §2.3 counts with 64; the larger tables do not say, and 64 is assumed."""


SETUPS = {
    "VLM-S": Setup("vlm-s", "dip-h800-64", 4, 4),
    "VLM-M": Setup("vlm-m", "dip-h800-64", 8, 4),
    "VLM-L": Setup("vlm-l", "dip-h800-64", 8, 8),
    "T2V-S": Setup("t2v-s", "dip-h800-64", 4, 4),
    "T2V-L": Setup("t2v-l", "dip-h800-64", 8, 8),
}
LARGE = {
    "VLM-XL, 8192 GPUs": Setup("vlm-xl", "dip-h100-8k", 8, 8, 128),
    "VLM-XL, 16384 GPUs": Setup("vlm-xl", "dip-h100-16k", 8, 16, 128),
    "T2V-XL, 3072 GPUs": Setup("t2v-xl", "dip-h100-3k", 8, 4, 96),
    "T2V-XL, 6144 GPUs": Setup("t2v-xl", "dip-h100-6k", 8, 8, 96),
}


@functools.lru_cache(maxsize=16)
def case_of(setup: Setup) -> Case:
    """The model on its cluster."""
    warm_up()
    degrees = Degrees(tensor=setup.tensor, pipeline=setup.pipeline, data=setup.data)
    return make_case(setup.model, setup.cluster, degrees)


@functools.lru_cache(maxsize=16)
def typical(setup: Setup) -> tuple[Groups, ...]:
    """Iterations that layouts are chosen on."""
    return tuple(draw_groups(case_of(setup), setup.num_microbatches, seed) for seed in TYPICAL_SEEDS)


@functools.lru_cache(maxsize=16)
def layouts(setup: Setup) -> tuple[LayoutTrial, ...]:
    """Layouts that were tried on the typical iterations, fastest first; on fewer where pipelines are large."""
    if setup in LARGE.values():
        return choose_layout(case_of(setup), typical(setup)[:1], trial=Deadline(1.0, "cpu"), rounds=1)
    return choose_layout(case_of(setup), typical(setup))


def iterations(setup: Setup, options: Options, count: int | None = None) -> list[tuple[int, Groups]]:
    """Seed and microbatches of every timed iteration: ``options.iterations`` (or ``count``) for each seed."""
    number = count or options.iterations
    return [
        (seed, draw_groups(case_of(setup), setup.num_microbatches, 10_000 * (1 + seed) + i))
        for seed in options.seeds
        for i in range(number)
    ]


def timed(system: System, groups: Groups, seconds: float, seed: int) -> SystemTimeline | None:
    """Time one iteration and judge it by the independent checker; None: it does not fit."""
    try:
        found = system.run(groups, Deadline(seconds, "cpu"), seed)
    except InfeasibleError:
        return None
    faults = check(found.graph, found.schedule, found.timeline)
    if faults:
        raise AssertionError(f"{system.name}: {faults[0]}")
    return found


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    return statistics.fmean(values)


def gain(before: float, after: float) -> str:
    """How much faster ``after`` is than ``before``, as the papers count: the ratio of times less one."""
    return f"{(before / after - 1) * 100:+.1f} %"


def seconds_text(value: float | None) -> str:
    """Seconds of an iteration, or that it does not fit."""
    return "out of memory" if value is None else f"{value:.2f}"


def device(*setups: Setup) -> tuple[str, ...]:
    """Device tables that the times rest on."""
    found = dict.fromkeys((case_of(s).machine.device.name, case_of(s).machine.device.basis) for s in setups)
    return tuple(f"{name} ({basis})" for name, basis in found)


def lazily(names: Sequence[str], make: Callable[[str], System]) -> dict[str, System | None]:
    """Systems by name; None where a layout cannot be made in memory."""
    out: dict[str, System | None] = {}
    for name in names:
        try:
            out[name] = make(name)
        except InfeasibleError:
            out[name] = None
    return out
