"""What each parameter of the search is worth: the change of the makespan if it is halved or doubled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pipeloom.errors import InputError
from pipeloom.report import markdown_table
from pipeloom.search import Budget, SearchParams, solve
from pipeloom.search.compilation import compile_kernels
from pipeloom.search.params import DEFAULTS
from pipeloom.taskgraph import TaskGraph
from pipeloom_instances.library import instance

TITLE = "Parameters of the search"
FAMILIES = (
    "vlm-s-m1.5",
    "vlm-s-ckpt-m1.5",
    "vlm-s-ckpt-k3-m2.5",
    "vlm-s-may-split",
    "vlm-s-strategies-m1.5",
    "vlm-l-ckpt-k2-m1.5",
    "t2v-s",
    "t2v-s-strategies-m1.5",
    "small-vlm-m1.5",
)
_SECONDS = (0.1, 1.0)
_INSTANCES = 2
_GROUPS = ("assignment", "packings", "exact")
"""Groups that `solve` does not read."""


def available() -> bool:
    """Run only by name: it takes 40 minutes."""
    return False


class Change(NamedTuple):
    """A parameter with another value."""

    name: str
    default: float
    value: float
    params: SearchParams


def changes(params: SearchParams = DEFAULTS) -> Iterator[Change]:
    """Yield every number of the parameters of `solve`, halved and doubled, as far as the value is valid."""
    for group in params.__struct_fields__:
        values = getattr(params, group)
        if group in _GROUPS or not isinstance(values, msgspec.Struct):
            continue
        for field in values.__struct_fields__:
            before = getattr(values, field)
            for factor in (0.5, 2.0) if isinstance(before, int | float) else ():
                after = type(before)(before * factor)
                try:
                    inner = msgspec.structs.replace(values, **{field: after})
                except InputError:  # such as a share above 1
                    continue
                if after != before:
                    changed = msgspec.structs.replace(params, **{group: inner})
                    yield Change(f"{group}.{field}", before, after, changed)


def run(families: Sequence[str] = FAMILIES, seconds: Sequence[float] = _SECONDS, instances: int = _INSTANCES) -> str:
    """Measure, and return the section as Markdown."""
    compile_kernels()
    graphs = [instance(f"{name}/{number}") for name in families for number in range(instances)]
    _makespans(graphs, DEFAULTS, min(seconds), 0)  # loads all kernels
    before = [[_makespans(graphs, DEFAULTS, each, seed) for each in seconds] for seed in (0, 1)]
    # The same search with another seed shows how much of a change is noise.
    noise = [_change(*pair) for pair in zip(*before, strict=True)]
    rows: dict[tuple[str, float], list[tuple[float, list[float]]]] = {}
    for change in changes():
        found = [
            _change(known, _makespans(graphs, change.params, each, 0))
            for each, known in zip(seconds, before[0], strict=True)
        ]
        rows.setdefault((change.name, change.default), []).append((change.value, found))
    ordered = sorted(rows.items(), key=lambda row: -max(abs(c) for _, found in row[1] for c in found))
    header = ["parameter", "default", *(f"{text}, {s:g} s" for text in ("less", "more") for s in seconds)]
    cells = [[name, f"{value:g}", *_cells(found, value, len(seconds))] for (name, value), found in ordered]
    return (
        f"Mean change of the makespan in per cent over {len(graphs)} instances if one parameter is halved (*less*) or "
        f"doubled (*more*), {' and '.join(f'{s:g}' for s in seconds)} CPU seconds on one thread; negative is better. "
        f"Another seed changes it by {' and '.join(f'{100 * each:+.2f}' for each in noise)}. Empty: no valid value.\n\n"
        f"{markdown_table(header, cells)}"
    )


def _makespans(graphs: Sequence[TaskGraph], params: SearchParams, seconds: float, seed: int) -> list[int]:
    budget = Budget(seconds=seconds, clock="cpu")
    return [solve(graph, budget=budget, seed=seed, params=params).timeline.makespan_ns for graph in graphs]


def _change(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the mean relative change."""
    return math.expm1(statistics.mean(math.log(b / a) for a, b in zip(before, after, strict=True)))


def _cells(found: Sequence[tuple[float, list[float]]], default: float, count: int) -> Iterator[str]:
    """Yield the changes with the smaller value, then those with the larger one."""
    for smaller in (True, False):
        (change,) = [each for value, each in found if (value < default) is smaller] or [[math.nan] * count]
        yield from ("" if math.isnan(each) else f"{100 * each:+.2f}" for each in change)
