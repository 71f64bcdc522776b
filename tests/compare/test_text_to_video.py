"""A text encoder before a video decoder: one part of captions feeds every clip's part."""

from __future__ import annotations

import pytest

from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import boundary_shapes, lower, verify
from pipeloom.search import Budget, solve
from pipeloom.spec import Batch, LayerSpec, ModelSpec, ModuleSpec, Sample, TensorShape
from pipeloom.taskgraph import FORWARD, build_graph
from pipeloom.timeline import check
from tests.cases import ToyCosts


@pytest.mark.parametrize("ranks", [1, 2])
def test_captions_feed_every_clip(ranks: int) -> None:
    shape = TensorShape(("tokens", 8))
    text = ModuleSpec("text", "text", (LayerSpec("block", shape, 4),))
    video = ModuleSpec("dit", "videos", (LayerSpec("block", shape, 4),), after=("text",))
    model = ModelSpec("t2v", (text, video))
    samples = tuple(
        Sample(f"s{i}", 3, video_seconds=(1.0,), video_height=(16,), video_width=(16 * (1 + i % 3),)) for i in range(6)
    )
    layout = separate(model, ranks, {"dit": ModulePlacement(1, 1)}, lambda _m, _l: 1.0)
    packing = pack(Batch(samples), model, layout, PackingSpec(12))
    graph = build_graph(layout, packing, ToyCosts(model))
    clips = sum(len(m.parts[1]) for m in packing.microbatches)
    assert clips == 6
    ends = [int(graph.forward_of[p]) for p, label in enumerate(graph.labels or ()) if label.chunk == ranks - 1]
    fed = [
        (int(a), int(b))
        for a, b in zip(graph.edge_source, graph.edge_target, strict=True)
        if a in ends and graph.module[b] == 1 and graph.kind[b] == FORWARD
    ]
    assert len(fed) == clips
    found = solve(graph, budget=Budget(evaluations=50), seed=0)
    assert check(graph, found.schedule, found.timeline) == ()
    plan = lower(graph, found.schedule, found.timeline, layout, packing, boundary_shapes(model, layout))
    verify(plan, layout, packing)
