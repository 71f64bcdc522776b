"""Costs from traces: of the layers of a stage, and by the size of microbatches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeloom.errors import InputError
from pipeloom.explain.traces.costs import layer_table, stage_profile
from pipeloom.explain.traces.layers import layer_shares
from pipeloom.explain.traces.run import traced_run
from pipeloom.explain.traces.traced import Computation, Iteration, PostedReceive, TracedRun, Unit
from pipeloom.io.kineto import read_kineto, trace_files
from pipeloom.taskgraph import BACKWARD, FORWARD, KIND_NAMES, NS_PER_S
from tests.explain.traces.made import documents, random_pipeline, write


def box(name: str, begin: float, end: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3}


def link(number: int, forward: float, backward: float) -> list[dict[str, Any]]:
    ends = (("s", forward), ("f", backward))
    return [{"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "ts": at * 1e3} for ph, at in ends]


def test_layers_share_a_stage_by_their_calls_and_nodes(tmp_path: Path) -> None:
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    events = [
        box("PP:0F0", 0, 10, "user_annotation"),
        box("nn.Module: Sequential_0", 0, 10, "python_function"),
        box("nn.Module: Block_0", 0, 4, "python_function"),
        box("nn.Module: Linear_0", 1, 3, "python_function"),
        box("nn.Module: Block_1", 4, 10, "python_function"),
        box("model.py(3): forward", 0, 10, "python_function"),
        box("aten::addmm", 0, 4),
        box("aten::addmm", 4, 10),
        box("PP:0B0", 12, 20, "user_annotation"),
        box(node, 12, 18),
        box(node, 18, 20),
        *link(1, 0, 18.5),
        *link(2, 4, 12.5),
    ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    traces = [read_kineto(path)]
    run = traced_run(traces)
    shares = layer_shares(traces, run)[0]
    assert [name for name, _, _ in shares] == ["stage.0.0.Block_0", "stage.0.1.Block_1"]
    assert [share[1:] for share in shares] == [(pytest.approx(0.4), pytest.approx(0.25)), (0.6, 0.75)]


def test_layers_of_computations_that_begin_and_end_with_operators(tmp_path: Path) -> None:
    """Where a schedule names no computations, calls of modules begin before them and end after them."""
    events = []
    for microbatch, at in enumerate((0.0, 10.0)):
        events += [
            box(f"PP:0F{microbatch}", at + 1, at + 9, "user_annotation"),
            box("nn.Module: Sequential_0", at + 0.5, at + 9.5, "python_function"),
            box("nn.Module: Block_0", at + 0.6, at + 4, "python_function"),
            box("nn.Module: Block_1", at + 4, at + 9.4, "python_function"),
            box("aten::addmm", at + 1, at + 9),
            box(f"PP:0B{microbatch}", at + 20, at + 29, "user_annotation"),
        ]
    # The call of one computation ends inside the next.
    events[2:2] = [box("nn.Module: Sequential_0", -9, 1.2, "python_function")]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    traces = [read_kineto(path)]
    shares = layer_shares(traces, traced_run(traces))[0]
    assert [name for name, _, _ in shares] == ["stage.0.0.Block_0", "stage.0.1.Block_1"]


def sized(folder: Path, rows: int | None) -> TracedRun:
    """A run whose microbatch ``m`` has ``rows + m`` sequences of 16 tokens."""
    pipeline = next(p for p in (random_pipeline(s, single=True) for s in range(99)) if p.graph.num_ranks == 2)
    made = documents(pipeline)
    for document in made:
        microbatch = 0
        for event in document["traceEvents"]:
            if "RECV" in event["name"]:
                microbatch = int(event["name"][-1])
            if event["name"] == "c10d::recv_" and rows is not None:
                event["args"] = {"Input Dims": [[[rows + microbatch, 16, 8]], [], [], []]}
    return traced_run([read_kineto(file) for file in trace_files([write(folder, made)])])


def chain(computations: list[tuple[str, int, int, float]], shapes: dict[int, tuple[int, ...]]) -> TracedRun:
    """A run of one iteration on two ranks: kind, stage, microbatch and seconds of every computation."""
    ranks: tuple[list[Computation], list[Computation]] = ([], [])
    for kind, stage, microbatch, seconds in computations:
        end = round(seconds * NS_PER_S)
        ranks[stage].append(Computation(Unit(KIND_NAMES.index(kind), stage, microbatch), 0, end, 0, 0, None))
    posted = {Unit(FORWARD, 1, m): PostedReceive(0, shape, 4 * shape[0]) for m, shape in shapes.items()}
    iteration = Iteration(0, (tuple(ranks[0]), tuple(ranks[1])), ({}, posted))
    return TracedRun(("rank0.json", "rank1.json"), (0, 1), len(shapes), (iteration,), (0, 0), 0, False)


def test_layers_have_the_costs_of_most_microbatches() -> None:
    rows = [(kind, stage, m, 3.0 if m == 0 else 1.0) for kind in "FB" for stage in (0, 1) for m in range(3)]
    table = layer_table(chain(rows, {0: (64, 8), 1: (16, 8), 2: (16, 8)}), "run", 0.0, {})
    assert [(layer.forward_s, layer.backward_s) for layer in table.layers] == [(1.0, 1.0)] * 2
    assert table.boundary_bytes == 4 * 16


def test_stages_are_fitted_over_sizes(tmp_path: Path) -> None:
    runs = [sized(tmp_path / "small", 1), sized(tmp_path / "large", 7)]
    profile = stage_profile(runs, "made")
    assert list(profile.layers) == ["model/stage.0", "model/stage.1"]
    assert all(min(fit.forward_s) >= 0 and sum(fit.forward_s) > 0 for fit in profile.layers.values())
    with pytest.raises(InputError, match="record_shapes=True"):
        stage_profile([sized(tmp_path / "none", None)], "made")


def test_whole_and_split_backwards_of_a_stage_are_averaged() -> None:
    rows = [("F", stage, m, 1.0) for stage in (0, 1) for m in range(3)]
    rows += [("B", 0, m, 2.0) for m in range(3)] + [("B", 1, 0, 2.6), ("B", 1, 1, 2.6)]
    rows += [("I", 1, 2, 1.5), ("W", 1, 2, 0.5)]
    fits = stage_profile([chain(rows, dict.fromkeys(range(3), (16, 8)))], "made").layers
    # One sequence of 16 tokens: the features are one, instances, tokens and token pairs.
    backwards = [float(np.dot(fits[f"model/stage.{stage}"].backward_s, (1, 1, 16, 256))) for stage in (0, 1)]
    assert backwards == pytest.approx([2.0, (2.6 + 2.6 + 1.5 + 0.5) / 3])


def allocation(at: float, num_bytes: int, device: int = 0) -> dict[str, Any]:
    args = {"Bytes": num_bytes, "Device Type": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at * 1e3, "args": args}


@pytest.mark.parametrize("split", [(), (0, 1, 2, 3), (2, 3), (0, 1)])
def test_memory_gives_bytes_of_activations_and_parameters(tmp_path: Path, split: tuple[int, ...]) -> None:
    """A forward leaves 100 bytes and frees what else it took; the first backward makes gradients of 1000 bytes."""
    events, begin = [], 0.0
    for step in range(2):
        events.append(box(f"ProfilerStep#{step}", begin, begin + 79 + 10 * len(split), "user_annotation"))
        for microbatch in range(4):
            kinds = ("I", "W") if microbatch in split else ("B",)
            for kind in ("F", *kinds):
                events += [
                    box(f"PP:0{kind}{microbatch}", begin + 1, begin + 8, "user_annotation"),
                    box("aten::addmm", begin + 1, begin + 8),
                ]
                if kind == "F":
                    events += [
                        allocation(begin + 2, 140),
                        allocation(begin + 3, -40),
                        allocation(begin + 4, 7, device=1),
                    ]
                elif kind == kinds[-1]:
                    events.append(allocation(begin + 2, 900 if microbatch == 0 else -100))
                begin += 10
    made: dict[str, Any] = {"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 1}}
    run = traced_run([read_kineto(path) for path in trace_files([write(tmp_path, [made])])])
    (layer,) = layer_table(run, "run", 0.0, {}).layers
    assert (layer.activation_bytes, layer.parameter_bytes) == (100, 1000)
    assert layer.held_bytes == 18 * 1000 // 2
    shared = layer_table(run, "run", 0.0, {0: (("a", 0.25, 0.1), ("b", 0.75, 0.9))}).layers
    assert [(one.activation_bytes, one.parameter_bytes) for one in shared] == [(25, 100), (75, 900)]


@pytest.mark.parametrize(
    ("num_bytes", "parameter_bytes", "held_bytes"), [(0, 4000, 36000), (2, 4000, 36000), (4, 2000, 16000)]
)
def test_parameters_have_the_precision_of_messages(num_bytes: int, parameter_bytes: int, held_bytes: int) -> None:
    """The first backward allocates 4000 bytes of gradients: 2000 parameters, or 1000 in single precision."""
    rows = [(kind, 0, m, 1.0) for m in range(3) for kind in "FB"] + [("F", 1, m, 1.0) for m in range(3)]
    run = chain(rows, dict.fromkeys(range(3), (16, 8)))
    (iteration,) = run.iterations
    posted = {unit: PostedReceive(0, (16, 8), 16 * 8 * num_bytes) for unit in iteration.posted[1]}
    allocated = {one.unit: 4000 if one.unit == (BACKWARD, 0, 0) else 0 for one in iteration.ranks[0]}
    iteration = replace(iteration, posted=({}, posted), allocated=(allocated, {}))
    first, last = layer_table(replace(run, iterations=(iteration,)), "run", 0.0, {}).layers
    assert (first.parameter_bytes, first.held_bytes) == (parameter_bytes, held_bytes)
    assert (last.parameter_bytes, last.static_bytes) == (0, None)
