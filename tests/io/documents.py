"""Random valid documents of the exchange formats, made as JSON and not with the code under test."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

TINY: dict[str, Any] = {
    "format": "pipeloom.instance/1",
    "name": "tiny",
    "num_ranks": 2,
    "memory_capacity_bytes": [100, 100],
    "memory_static_bytes": [10, 10],
    "tasks": {
        "kind": ["F", "F", "B", "B"],
        "rank": [0, 1, 1, 0],
        "duration_s": [1.0, 1.0, 2.0, 2.0],
        "pair": [0, 1, 1, 0],
        "segment": [0, 0, 1, 1],
        "microbatch": [0, 0, 0, 0],
        "module": ["lm", "lm", "lm", "lm"],
    },
    "pairs": {"activation_bytes": [40, 40], "weight_gradient_bytes": None, "candidates": None},
    "edges": {"source": [0, 1, 2], "target": [1, 2, 3], "delay_s": [0.01, 0.0, 0.01], "bytes": None},
}

TINY_SCHEDULE: dict[str, Any] = {
    "format": "pipeloom.schedule/1",
    "instance": "tiny",
    "order": [[0, 3], [1, 2]],
    "candidate": None,
    "start_s": [0.0, 1.01, 2.01, 4.02],
    "makespan_s": 6.02,
    "lower_bound_s": 6.02,
    "lower_bound": "critical path",
    "peak_memory_bytes": [50, 50],
    "search": {"method": "portfolio", "seed": 0, "budget_s": 1.0, "elapsed_s": 0.01, "evaluations": 21},
}


def times() -> st.SearchStrategy[float]:
    """Seconds with at most nine decimals, as any document that was written by us has them."""
    return st.integers(0, 10**12).map(lambda ns: ns / 1e9)


sizes = st.integers(0, 10**12)


@st.composite
def instances(draw: st.DrawFn) -> dict[str, Any]:
    """A chain of microbatches over the ranks, some pairs split, some frozen, with or without candidates."""
    num_ranks = draw(st.integers(1, 3))
    tasks: dict[str, list[Any]] = {
        name: [] for name in ("kind", "rank", "duration_s", "pair", "segment", "microbatch", "module")
    }
    edges: dict[str, list[Any]] = {"source": [], "target": [], "delay_s": [], "bytes": []}
    forms: list[str] = []
    pass_id = 0

    def task(kind: str, rank: int, pair: int, microbatch: int, module: str) -> int:
        row = (kind, rank, draw(times()), pair, pass_id, microbatch, module)
        for name, value in zip(tasks, row, strict=True):
            tasks[name].append(value)
        return len(tasks["kind"]) - 1

    def edge(source: int, target: int) -> None:
        same_rank = tasks["rank"][source] == tasks["rank"][target]
        values = (source, target, draw(times()), draw(sizes) if same_rank else 0)
        for name, value in zip(edges, values, strict=True):
            edges[name].append(value)

    for microbatch in range(draw(st.integers(1, 3))):
        form = draw(st.sampled_from(["forward", "whole", "split"]))
        module = draw(st.sampled_from(["lm", "vision", "ü→", 'a "quoted" name']))
        first_pair = len(forms)
        forms += [form] * num_ranks
        forward = [task("F", r, first_pair + r, microbatch, module) for r in range(num_ranks)]
        pass_id += 1
        for a, b in itertools.pairwise(forward):
            edge(a, b)
        if form == "forward":
            continue
        backward = [
            task("B" if form == "whole" else "I", r, first_pair + r, microbatch, module)
            for r in reversed(range(num_ranks))
        ]
        pass_id += 1
        for a, b in itertools.pairwise(backward):
            edge(a, b)
        if draw(st.booleans()):
            edge(forward[-1], backward[0])
        if form == "split":
            for r in range(num_ranks):
                task("W", r, first_pair + r, microbatch, module)
            pass_id += 1

    activation = [draw(sizes) for _ in forms]
    held = draw(st.none() | st.just([a // 2 for a in activation]).filter(lambda w: w != activation))
    rows: list[list[dict[str, Any]]] | None = None
    if draw(st.booleans()):
        rows = [[_base(pair, form, tasks, activation, held)] for pair, form in enumerate(forms)]
        for row, form in zip(rows, forms, strict=True):
            row += draw(st.lists(candidates(form), max_size=2))
    return {
        "format": "pipeloom.instance/1",
        "name": draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
        "num_ranks": num_ranks,
        "memory_capacity_bytes": draw(st.none() | st.lists(sizes, min_size=num_ranks, max_size=num_ranks)),
        "memory_static_bytes": draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks)),
        **draw(
            st.fixed_dictionaries(
                {}, optional={f"host_{name}_bytes": st.just([7] * num_ranks) for name in ("capacity", "staging")}
            )
        ),
        "tasks": tasks,
        "pairs": {"activation_bytes": activation, "weight_gradient_bytes": held, "candidates": rows},
        "edges": edges | {"bytes": edges["bytes"] if any(edges["bytes"]) else None},
    }


def _base(
    pair: int, form: str, tasks: dict[str, list[Any]], activation: list[int], held: list[int] | None
) -> dict[str, Any]:
    """The first candidate of a pair, which repeats the columns."""
    entry: dict[str, Any] = {"strategy": "keep"}
    names = {"F": "forward_s", "B": "backward_s", "I": "backward_input_s", "W": "backward_weight_s"}
    for kind, name in names.items():
        for of, task, duration in zip(tasks["pair"], tasks["kind"], tasks["duration_s"], strict=True):
            if (of, task) == (pair, kind):
                entry[name] = duration
    entry["activation_bytes"] = activation[pair]
    if held is not None and form == "split" and held[pair] != activation[pair]:
        entry["weight_gradient_bytes"] = held[pair]
    return entry


@st.composite
def candidates(draw: st.DrawFn, form: str) -> dict[str, Any]:
    """One memory strategy as the writer writes it: defaults left out."""
    entry: dict[str, Any] = {"strategy": draw(st.sampled_from(["keep", "full", "offload"])), "forward_s": draw(times())}
    for name in {"forward": [], "whole": ["backward_s"], "split": ["backward_input_s", "backward_weight_s"]}[form]:
        entry[name] = draw(times())
    entry["activation_bytes"] = draw(sizes)
    if draw(st.booleans()):
        entry["weight_gradient_bytes"] = entry["activation_bytes"] + 1
    if draw(st.booleans()):
        entry["layers"] = ["keep", "full"]
    if draw(st.booleans()):
        entry["host_bytes"] = 5
    return entry
