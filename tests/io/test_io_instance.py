"""Instances: the document survives a round trip, and every wrong value is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeloom
from pipeloom.errors import InputError
from pipeloom.io import instance_document, instance_from_document, read_instance, write_instance
from pipeloom.taskgraph import TaskGraph
from tests.io.documents import TINY, instances


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(instances())
def test_document_read_and_written_again_is_the_same(document: dict[str, Any]) -> None:
    graph = instance_from_document(document)
    assert instance_document(graph) == document


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(document=instances(), suffix=st.sampled_from(["json", "json.gz"]))
def test_file_read_and_written_again_is_the_same(
    document: dict[str, Any], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("round")
    first, second = folder / f"a.{suffix}", folder / f"b.{suffix}"
    write_instance(first, instance_from_document(document))
    write_instance(second, read_instance(first))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == [first.name, second.name]


def test_the_example_of_the_format(tmp_path: Any) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    graph = pipeloom.load(path)
    assert isinstance(graph, TaskGraph)
    assert graph.duration_ns.tolist() == [10**9, 10**9, 2 * 10**9, 2 * 10**9]
    assert graph.edge_delay_ns.tolist() == [10**7, 0, 10**7]
    assert graph.capacity_bytes is not None
    assert graph.capacity_bytes.tolist() == [100, 100]
    assert [graph.task(2).kind, graph.task(2).rank, graph.task(2).module] == ["B", 1, "lm"]
    assert graph.weight_gradient_bytes.tolist() == [40, 40]


def test_nullable_fields_may_be_absent() -> None:
    short = copy.deepcopy(TINY)
    del short["pairs"]["weight_gradient_bytes"], short["pairs"]["candidates"], short["edges"]["bytes"]
    short["memory_capacity_bytes"] = None
    full = instance_document(instance_from_document(short))
    del short["memory_capacity_bytes"]
    assert instance_document(instance_from_document(short)) == full


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [
        (0.0, 0),
        (5e-10, 0),
        (1.5e-9, 2),
        (2.5e-9, 2),
        (3.5e-9, 4),
        (0.1 + 0.2, 300_000_000),
        (1e-9, 1),
        (86400.0, 86400 * 10**9),
    ],
)
def test_times_are_rounded_once_to_the_nearest_even_nanosecond(seconds: float, nanoseconds: int) -> None:
    document = copy.deepcopy(TINY)
    document["tasks"]["duration_s"][1] = seconds
    assert instance_from_document(document).duration_ns[1] == nanoseconds


@given(st.integers(0, 2**51 - 1))
def test_nanoseconds_survive_the_way_through_seconds(ns: int) -> None:
    document = copy.deepcopy(TINY)
    document["tasks"]["duration_s"][0] = ns / 1e9
    assert instance_from_document(document).duration_ns[0] == ns


def _set(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(TINY)
    node: Any = document
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for parent in parents:
        node = node[parent]
    node[last] = value
    return document


KEEP = {"strategy": "keep", "forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 40}
BASE = "pairs.candidates[0][0]"


def base(**changes: float) -> list[list[dict[str, Any]]]:
    """The candidates of both pairs: a base that repeats the columns, but for the changes."""
    return [[KEEP | changes]] * 2


BAD = [
    ("tasks.duration_s.2", -0.2, "tasks.duration_s[2]: -0.2 is negative"),
    ("tasks.duration_s.2", float("inf"), "tasks.duration_s[2]: inf is not finite"),
    ("tasks.duration_s.2", 1e12, "tasks.duration_s[2]: 1e+12 is not below 4.6e+09 s"),
    ("tasks.duration_s.2", True, "tasks.duration_s[2]: true is not a number"),
    ("tasks.duration_s.2", "1", "tasks.duration_s[2]: '1' is not a number"),
    ("tasks.duration_s.2", None, "tasks.duration_s[2]: null is not a number"),
    ("tasks.duration_s", [1.0], "tasks.duration_s: has 1 entries, tasks.kind has 4"),
    ("tasks.duration_s", [3e9] * 4, "tasks.duration_s: sums to 1.2e+10 s"),
    ("tasks.rank.3", 2, "tasks.rank[3]: 2 is not below 2"),
    ("tasks.rank.3", 1.5, "tasks.rank[3]: 1.5 is not an integer"),
    ("tasks.rank.3", 10**30, "tasks.rank[3]: an integer of more than 20 digits is above 2147483648"),
    ("tasks.rank.3", -1, "tasks.rank[3]: -1 is negative"),
    ("tasks.kind.0", "X", "tasks.kind[0]: 'X' is not one of F, B, I, W"),
    ("tasks.kind.0", 1, "tasks.kind[0]: 1 is not a string"),
    ("tasks.pair.0", 7, "tasks.pair[0]: 7 is not below 2"),
    ("tasks", [], "tasks: an empty list is not an object"),
    ("tasks.durations_s", [], "tasks.durations_s: is not a known field; did you mean duration_s?"),
    ("links", [], "links: is not a known field"),
    ("num_ranks", 3, "memory_static_bytes: has 2 entries, num_ranks is 3"),
    ("num_ranks", "2", "num_ranks: '2' is not an integer"),
    ("memory_static_bytes.0", -5, "memory_static_bytes[0]: -5 is negative"),
    ("memory_static_bytes.0", 0.5, "memory_static_bytes[0]: 0.5 is not an integer"),
    ("memory_capacity_bytes", [1], "memory_capacity_bytes: has 1 entries, expected 2"),
    ("host_capacity_bytes", [1], "host_capacity_bytes: has 1 entries, expected 2"),
    ("host_staging_bytes", [-1, 0], "host_staging_bytes[0]: -1 is negative"),
    ("pairs.activation_bytes", [2**61, 2**61], "pairs.activation_bytes: sums to 4611686018427387904"),
    ("pairs.candidates", [], "pairs.candidates: has 0 lists, there are 2 pairs"),
    ("pairs.candidates", [[], []], "pairs.candidates[0]: is empty"),
    (
        "pairs.candidates",
        [[{"strategy": "keep", "forward_s": 1.0, "activation_bytes": 4}]] * 2,
        "pairs.candidates[0][0].backward_s: is missing",
    ),
    (
        "pairs.candidates",
        [[{"strategy": "keep", "forward_s": -1.0, "backward_s": 1, "activation_bytes": 4}]] * 2,
        "pairs.candidates[0][0].forward_s: -1 is negative",
    ),
    (
        "pairs.candidates",
        [[{"strategy": "keep", "forward_s": 1, "backward_input_s": 1, "activation_bytes": 4}]] * 2,
        "pairs.candidates[0][0].backward_input_s: is given for a pair without I and W",
    ),
    (
        "pairs.candidates",
        [[KEEP | {"forward_s": 5.0}]] * 2,
        f"{BASE}.forward_s: 5 s, tasks.duration_s[0] is 1 s; the first",
    ),
    (
        "pairs.candidates",
        [[KEEP | {"backward_s": 2.0001}]] * 2,
        f"{BASE}.backward_s: 2.0001 s, tasks.duration_s[3] is 2 s",
    ),
    (
        "pairs.candidates",
        [[KEEP | {"activation_bytes": 4}]] * 2,
        f"{BASE}.activation_bytes: 4, pairs.activation_bytes[0] is",
    ),
    ("edges.source.0", 9, "edges.source[0]: 9 is not below 4"),
    ("edges.delay_s.0", -1e-3, "edges.delay_s[0]: -0.001 is negative"),
    ("edges.bytes", [1, 0, 0], "edges.bytes[0]: 1 bytes on an edge from rank 0 to rank 1"),
    ("edges.target.0", 0, "edges: task 0 (F of lm, microbatch 0, rank 0) waits for itself"),
    ("format", "pipeloom.instance/2", "format: 'pipeloom.instance/2' is not 'pipeloom.instance/1'"),
    ("format", None, "format: is missing"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=[f"{p}={v!r}"[:50] for p, v, _ in BAD])
def test_wrong_value_is_named_with_its_path(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        instance_from_document(_set(path, value), "x.json")
    assert str(caught.value).startswith(f"x.json: {message}")


def test_base_candidate_of_a_split_pair_repeats_its_columns() -> None:
    base = {"strategy": "keep", "forward_s": 1.0, "backward_input_s": 2.0, "backward_weight_s": 3.0}
    base |= {"activation_bytes": 40, "weight_gradient_bytes": 7}
    document = copy.deepcopy(TINY)
    for name, values in document["tasks"].items():
        document["tasks"][name] = values[:1] * 3
    document["tasks"] |= {"kind": ["F", "I", "W"], "duration_s": [1.0, 2.0, 3.0], "segment": [0, 1, 2]}
    document["pairs"] = {"activation_bytes": [40], "weight_gradient_bytes": [7], "candidates": [[base]]}
    document["edges"] = {"source": [], "target": [], "delay_s": []}
    assert instance_from_document(document).candidates is not None
    for name, task in (("backward_input_s", 1), ("backward_weight_s", 2)):
        document["pairs"]["candidates"] = [[base | {name: 2.5}]]
        with pytest.raises(InputError, match=rf"{name}: 2.5 s, tasks.duration_s\[{task}\] is"):
            instance_from_document(document)
    document["pairs"]["candidates"] = [[base | {"weight_gradient_bytes": None}]]
    with pytest.raises(InputError, match=r"weight_gradient_bytes: 40, pairs.weight_gradient_bytes\[0\] is 7"):
        instance_from_document(document)


def test_base_candidate_may_be_rounded_in_another_way() -> None:
    document = _set("pairs.candidates", [[KEEP | {"forward_s": 1.000000001}, KEEP | {"forward_s": 3.0}], [KEEP]])
    graph = instance_from_document(document)
    assert graph.with_candidates([0, 0]).duration_ns.tolist() == graph.duration_ns.tolist()
    assert graph.with_candidates([1, 0]).duration_ns[0] == 3 * 10**9


def test_candidates_replace_durations_and_bytes() -> None:
    keep = {"strategy": "keep", "forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 40}
    full = {"strategy": "full", "forward_s": 1.0, "backward_s": 3.0, "activation_bytes": 4}
    graph = instance_from_document(_set("pairs.candidates", [[keep, full], [keep]]))
    chosen = graph.with_candidates([1, 0])
    assert chosen.duration_ns.tolist() == [10**9, 10**9, 2 * 10**9, 3 * 10**9]
    assert np.array_equal(chosen.activation_bytes, [4, 40])


def test_segments_may_have_any_numbers(tmp_path: Path) -> None:
    document = {
        "format": "pipeloom.instance/1",
        "name": "far",
        "num_ranks": 1,
        "memory_capacity_bytes": None,
        "memory_static_bytes": [0],
        "tasks": {
            "kind": ["F", "B"],
            "rank": [0, 0],
            "duration_s": [1.0, 2.0],
            "pair": [0, 0],
            "segment": [5, 900],
            "microbatch": [0, 0],
            "module": ["lm", "lm"],
        },
        "pairs": {"activation_bytes": [1], "weight_gradient_bytes": None, "candidates": None},
        "edges": {"source": [], "target": [], "delay_s": [], "bytes": None},
    }
    path = tmp_path / "far.json"
    path.write_text(json.dumps(document))
    assert read_instance(path).pass_id.tolist() == [0, 1]
