from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost import StrategyCost
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec, pack
from pipeloom.spec import Batch, Chunk, Sample, Workload
from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    NO_TASK,
    Candidate,
    Edges,
    Pairs,
    Tasks,
    build_graph,
    make_graph,
    topological_order,
)
from pipeloom.taskgraph.iteration import workspace_bytes
from tests.cases import ToyCosts, random_case, vlm_spec
from tests.columns import graph_of_columns


def test_a_hand_worked_iteration() -> None:
    model = vlm_spec(2, 4)
    layout = separate(model, 2, {"vision": ModulePlacement(1, 1), "lm": ModulePlacement(2)}, lambda m, x: 1.0)
    batch = Batch((Sample("a", 3, (2, 2), (4, 5)), Sample("b", 6)))
    graph = build_graph(layout, pack(batch, model, layout, PackingSpec(7)), ToyCosts(model, transfer_s=0.5e-3))
    # Microbatch 0 is "a": two images, each a sub-microbatch over two vision chunks, then four lm chunks.
    # Microbatch 1 is "b": text only, four lm chunks.
    assert graph.num_pairs == 2 * 2 + 4 + 4
    assert graph.num_tasks == 2 * graph.num_pairs
    first = [tuple(label)[:3] for label in graph.labels or ()][:4]
    assert first == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert graph.duration_ns[graph.forward_of].tolist()[:4] == [4_000_000, 4_000_000, 5_000_000, 5_000_000]
    assert graph.duration_ns[graph.backward_of].tolist()[4:8] == [14_000_000] * 4
    lm = int(graph.forward_of[4])
    rows = slice(graph.predecessor_start[lm], graph.predecessor_start[lm + 1])
    assert sorted(graph.predecessor[rows]) == sorted([graph.forward_of[1], graph.forward_of[3]])
    assert graph.predecessor_delay_ns[rows].tolist() == [500_000, 500_000]
    assert graph.static_bytes.tolist() == [3000, 3000]


@given(st.integers(0, 10_000), st.booleans())
def test_random_graphs_are_closed_and_ordered(seed: int, split: bool) -> None:
    model, layout, packing = random_case(seed)
    graph = build_graph(layout, packing, ToyCosts(model, split=split), backward="split" if split else "whole")
    position = np.empty(graph.num_tasks, dtype=int)
    position[topological_order(graph)] = np.arange(graph.num_tasks)
    assert (position[graph.edge_source] < position[graph.edge_target]).all()
    assert sorted(set(graph.pass_id.tolist())) == list(range(graph.num_passes))
    for pair, label in enumerate(graph.labels or ()):
        chunk = layout.chunks[label.chunk]
        assert graph.rank[graph.forward_of[pair]] == chunk.rank
        assert (graph.backward_of[pair] != NO_TASK) == layout.has_backward(chunk.module)
        assert (graph.weight_of[pair] != NO_TASK) == (split and layout.has_backward(chunk.module))
    # Forwards of a microbatch all precede the backward of its first trained chunk.
    forward = graph.kind == FORWARD
    for m in range(len(packing.microbatches)):
        here = graph.microbatch == m
        last = graph.forward_of[[p for p, x in enumerate(graph.labels or ()) if x.microbatch == m][-1]]
        assert position[here & ~forward].min() > position[last]


def test_labels_say_the_chosen_strategy() -> None:
    model, layout, packing = random_case(3)
    graph = build_graph(layout, packing, ToyCosts(model))
    keep, mixed = Candidate("keep", 1, 1, 0, 1, 0), Candidate("mixed", 1, 2, 0, 0, 0, ("keep", "recompute"))
    alike = Candidate("mixed", 1, 3, 0, 0, 0, ("recompute", "recompute"))
    several = replace(graph, candidates=((keep, mixed, alike),) * graph.num_pairs)
    choice = np.arange(graph.num_pairs) % 3
    labels = several.with_candidates(choice).labels
    assert labels is not None
    assert graph.labels is not None
    words = ["keep", "keep,recompute", "recompute"]
    assert [label.strategy for label in labels] == [words[i] for i in choice]
    assert [label[:3] for label in labels] == [label[:3] for label in graph.labels]
    assert labels[-1] == tuple(labels)[-1]
    assert labels[1:3] == tuple(labels)[1:3]
    assert several.with_candidates(choice).chunk_of.tolist() == [label.chunk for label in graph.labels]


def test_a_packing_without_what_its_modules_read_is_refused() -> None:
    model = vlm_spec(2, 2)
    layout = separate(model, 1, {"vision": ModulePlacement(1, 1), "lm": ModulePlacement(1, 1)}, lambda m, x: 1.0)
    batch = Batch((Sample("a", 3, (2, 2, 2)), Sample("b", 3)))
    packing = pack(batch, model, layout, PackingSpec(50, "first_fit"))
    with pytest.raises(InputError, match=r"packing.reads: has 0 entries for 2 modules; pack with the model"):
        replace(packing, reads=())


class _InstancesAsWorkspace(ToyCosts):
    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        return workload.num_instances

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        return 0


def test_the_workspace_of_equal_sizes_does_not_depend_on_their_order() -> None:
    # Their hashes, and so the order of a set, differ from process to process.
    model = vlm_spec(2, 2)
    layout = separate(model, 1, {"vision": ModulePlacement(1), "lm": ModulePlacement(1)}, lambda m, x: 1.0)
    sizes = [(6,), (1, 5), (2, 2, 2), (3, 3), (4, 2)]
    for order in (sizes, sizes[::-1]):
        batch = Batch(tuple(Sample(str(number), 3, images) for number, images in enumerate(order)))
        packing = pack(batch, model, layout, PackingSpec(9, "first_fit"))
        assert len(packing.microbatches) == len(sizes)
        assert workspace_bytes(layout, packing, _InstancesAsWorkspace(model), 0)[0, 0] == 3


BASE = {
    "name": "t",
    "num_ranks": 2,
    "module_names": ("lm",),
    "kind": [0, 0, 1, 1],
    "rank": [0, 1, 1, 0],
    "duration_ns": [1, 1, 2, 2],
    "pair": [0, 1, 1, 0],
    "pass_id": [0, 0, 1, 1],
    "microbatch": [0] * 4,
    "module": [0] * 4,
    "activation_bytes": [40, 40],
    "weight_gradient_bytes": None,
    "edge_source": [0, 1, 2],
    "edge_target": [1, 2, 3],
    "edge_delay_ns": [0, 0, 0],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration_ns": [1, 1, -2, 2]}, r"tasks.duration_s\[2\]: -2 is negative"),
        ({"rank": [0, 1, 1, 2]}, r"tasks.rank\[3\]: 2 is not below 2"),
        ({"rank": [0, 1, 0, 0]}, r"tasks.rank\[2\]: rank 0, the F of pair 1 is on rank 1"),
        ({"kind": [0, 0, 2, 1], "pass_id": [0, 0, 1, 2]}, "pair 1 has only one of I and W"),
        ({"kind": [1, 0, 1, 1], "pass_id": [2, 0, 1, 1]}, r"pair 0 has a second B"),
        ({"pass_id": [0, 0, 0, 1]}, "segment 0 has both F and B"),
        ({"pair": [0, 1, 1]}, "tasks.pair: has 3 entries, tasks.kind has 4"),
        ({"edge_source": [0, 3], "edge_target": [3, 0], "edge_delay_ns": [0, 0]}, "waits for itself"),
        ({"edge_bytes": [1, 0, 0]}, r"edges.bytes\[0\]: 1 bytes on an edge from rank 0 to rank 1"),
        ({"static_bytes": [1]}, "memory_static_bytes: has 1 entries, expected 2"),
        ({"duration_ns": [1, 2**61, 2**61, 1]}, r"tasks.duration_s: sums to 4.61169e\+09 s, of which entry 1 is 2.3"),
        ({"duration_ns": [1, 2**70, 1, 1]}, r"tasks.duration_s: sums to 1.18059e\+12 s.*must stay below 4.6e\+09 s"),
        ({"edge_delay_ns": [2**61, 2**61, 2**61]}, r"edges.delay_s: sums to .*; give smaller times"),
        ({"activation_bytes": [2**62, 2**62]}, r"pairs.activation_bytes: sums to .* below 2\*\*62 bytes"),
    ],
)
def test_broken_problems_are_refused_by_name(change: dict[str, object], message: str) -> None:
    graph_of_columns(**BASE)
    with pytest.raises(InputError, match=message):
        graph_of_columns(**{**BASE, **change})


@pytest.mark.parametrize("seconds", [4e9, 5e9, float("inf"), float("nan")])
def test_links_too_slow_to_count_are_refused(seconds: float) -> None:
    """Sums beyond 64 bits once crashed the search, or gave half the true makespan."""
    model, layout, packing = random_case(0)
    build_graph(layout, packing, ToyCosts(model, transfer_s=1.0))
    with pytest.raises(InputError, match=r"below 4.6e\+09 s; give smaller times"):
        build_graph(layout, packing, ToyCosts(model, transfer_s=seconds))


@pytest.mark.parametrize(
    ("seconds", "message"), [(1e9, "pairs.candidates|tasks.duration_s"), (5e9, "forward_s: 5e.09")]
)
def test_layers_too_slow_to_count_are_refused(seconds: float, message: str) -> None:
    model, layout, packing = random_case(0)
    costs = ToyCosts(model)
    with pytest.raises(InputError, match=message):
        build_graph(layout, packing, Slow(costs, seconds))


class Slow:
    """Other costs, with forwards of that many seconds."""

    def __init__(self, costs: ToyCosts, seconds: float) -> None:
        self.costs, self.seconds = costs, seconds

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        return tuple(replace(cost, forward_s=self.seconds) for cost in self.costs.chunk_costs(chunk, workload))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.costs, name)


def test_columns_may_be_strided_and_the_graph_has_none() -> None:
    numbers = np.array([[FORWARD, 0, 5, 0, 0, 0, 0, 7], [BACKWARD, 0, 9, 0, 1, 0, 0, 7]])
    names = ("kind", "rank", "duration_ns", "pair", "pass_id", "microbatch", "module")
    columns: dict[str, Any] = dict(zip(names, numbers.T, strict=False))
    sizes = np.array([[3, 4]])
    edge = np.array([[0, 1, 2, 0]])
    graph = make_graph(
        name="strided",
        num_ranks=1,
        tasks=Tasks(module_names=("lm",), **columns),
        pairs=Pairs(activation_bytes=sizes[:, 0], weight_gradient_bytes=sizes[:, 1]),
        edges=Edges(source=edge[:, 0], target=edge[:, 1], delay_ns=edge[:, 2], bytes=edge[:, 3]),
    )
    arrays = [getattr(graph, field.name) for field in fields(graph)]
    assert all(array.flags.c_contiguous for array in arrays if isinstance(array, np.ndarray))
