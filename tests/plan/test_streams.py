"""Streams in plans: from the layer that emits them straight to those that take them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import (
    Unit,
    Verb,
    boundary_shapes,
    check_shapes,
    from_msgpack,
    from_text,
    lower,
    make_routes,
    to_msgpack,
    to_text,
    verify,
)
from pipeloom.plan.dryrun import dry_run
from pipeloom.spec import (
    Batch,
    Chunk,
    EmittedStream,
    LayerSpec,
    Layout,
    ModelSpec,
    ModuleLayout,
    ModuleSpec,
    Sample,
    StreamEnd,
    TensorShape,
)
from pipeloom.taskgraph import build_graph

from .cases import EVERY_STRATEGY, Case, RandomCosts, earliest, random_case, random_model, random_schedule, with_streams

SEEDS = st.integers(0, 10**9)
WIDE = TensorShape(("tokens", 8), "float64")


def streaming_case(seed: int, num_ranks: int | None = None, **options: Any) -> Case:
    """A random iteration of a model with streams."""
    rng = random.Random(f"streams {seed}")
    model = with_streams(rng, random_model(rng))
    return random_case(seed, num_ranks, model=model, **options)


@given(SEEDS)
def test_every_plan_with_streams_verifies(seed: int) -> None:
    case = streaming_case(seed, strategies=EVERY_STRATEGY)
    plan = case.plan
    verify(plan, case.layout, case.packing)
    verify(case.serial_plan, case.layout, case.packing, single_communicator=True)
    assert dry_run(plan, "gloo") is None
    check_shapes(plan, case.model, case.layout, case.packing)
    assert from_text(to_text(plan)) == plan
    assert from_msgpack(to_msgpack(plan)) == plan
    assert plan.format == ("pipeloom.plan/3" if " stream=" in to_text(plan) else "pipeloom.plan/2")


@given(SEEDS)
def test_a_dropped_message_of_a_stream_is_caught(seed: int) -> None:
    case = streaming_case(seed)
    plan = case.plan
    found = [(r, s) for r, actions in enumerate(plan.ranks) for s, a in enumerate(actions) if a.stream]
    if not found:
        return
    rank, step = random.Random(seed).choice(found)
    ranks = [list(actions) for actions in plan.ranks]
    del ranks[rank][step]
    with pytest.raises(PlanError):
        verify(msgspec.structs.replace(plan, ranks=tuple(map(tuple, ranks))), case.layout, case.packing)


@given(SEEDS)
def test_the_graph_has_an_edge_for_every_transfer_and_no_other(seed: int) -> None:
    case = streaming_case(seed)
    graph = case.graph
    assert graph.labels is not None
    pair_of = {Unit(*label[:3]): pair for pair, label in enumerate(graph.labels)}
    wanted = []
    for transfer in make_routes(case.layout, case.packing, pair_of).transfers:
        above, below = pair_of[transfer.producer], pair_of[transfer.consumer]
        wanted.append((graph.forward_of[above], graph.forward_of[below]))
        if transfer.gradient:
            wanted.append((graph.backward_of[below], graph.backward_of[above]))
    assert sorted(wanted) == sorted(zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True))


def deepstack(frozen: bool = False) -> ModelSpec:
    """Three features of vision layers, each for one of the first language layers."""
    narrow = TensorShape(("tokens", 4), "float64")
    feature = TensorShape(("tokens/4", 8), "float64")
    vision = ModuleSpec(
        "vision",
        "images",
        (LayerSpec("vit", narrow, 7), LayerSpec("merger", feature)),
        frozen=frozen,
        emits=tuple(EmittedStream(f"deep{i}", 2 * i + 1, feature) for i in range(3)),
    )
    takes = tuple(StreamEnd(f"deep{i}", i) for i in range(3))
    return ModelSpec(
        "deepstack", (vision, ModuleSpec("lm", "sequence", (LayerSpec("gpt", WIDE, 4),), ("vision",), takes=takes))
    )


def deepstack_plan(model: ModelSpec, parts: int | None = None) -> tuple[Any, Layout, Any]:
    """On two ranks, each with a half of either module."""
    modules = (ModuleLayout.of(model.modules[0], parts), ModuleLayout.of(model.modules[1]))
    cuts = (("vision", (0, 3), 0), ("vision", (4, 7), 1), ("lm", (0, 1), 0), ("lm", (2, 3), 1))
    return planned(model, Layout(2, modules, tuple(Chunk(*cut) for cut in cuts)))


def planned(model: ModelSpec, layout: Layout) -> tuple[Any, Layout, Any]:
    """A random schedule of two samples, one without an image."""
    batch = Batch((Sample("a", 3, (2, 3), (8, 12)), Sample("b", 5)))
    packing = pack(batch, model, layout, PackingSpec(9))
    graph = build_graph(layout, packing, RandomCosts(1, False))
    schedule = random_schedule(random.Random(0), graph)
    plan = lower(graph, schedule, earliest(graph, schedule), layout, packing, boundary_shapes(model, layout))
    verify(plan, layout, packing)
    return plan, layout, packing


@given(SEEDS)
def test_a_feature_travels_once_and_only_between_ranks(seed: int) -> None:
    rng = random.Random(f"cuts {seed}")
    model, num_ranks = deepstack(), rng.randint(1, 4)
    chunks = []
    for module in model.modules:
        last = len(module.flat_layers) - 1
        ends = [*sorted(rng.sample(range(last), rng.randint(0, last))), last]
        for first, end in zip((0, *(end + 1 for end in ends)), ends, strict=False):
            chunks.append(Chunk(module.name, (first, end), rng.randrange(num_ranks)))
    modules = (ModuleLayout.of(model.modules[0], rng.randint(1, 3)), ModuleLayout.of(model.modules[1]))
    plan, _, packing = planned(model, Layout(num_ranks, modules, tuple(chunks)))

    def rank(module: int, layer: int) -> int:
        name = model.modules[module].name
        return next(c.rank for c in chunks if c.module == name and c.layers[0] <= layer <= c.layers[1])

    rows = sum(part.workload.num_tokens // 4 for m in packing.microbatches for part in m.parts[0])
    assert rows == (8 + 12) // 4
    for emitted, taken in zip(model.modules[0].emits, model.modules[1].takes, strict=True):
        crosses = rank(0, emitted.layer) != rank(1, taken.layer)
        for verb in (Verb.SEND_F, Verb.SEND_B):
            sent = [a.shape for r in plan.ranks for a in r if a.verb == verb and a.stream == emitted.stream]
            assert sum(shape[0] for shape in sent) == crosses * rows
            assert {shape[1] for shape in sent} <= {8}


def test_streams_go_from_the_emitting_chunk_to_the_taking_one() -> None:
    plan, _, packing = deepstack_plan(deepstack())
    image = next(i for i, m in enumerate(packing.microbatches) if 0 in m.samples)
    sent = {(a.stream, a.chunk, a.peer, a.shape) for r in plan.ranks for a in r if a.verb == Verb.SEND_F and a.stream}
    # deep0 is emitted on rank 0 for layer 0 there; deep2 on rank 1 for layer 2 there: neither travels between ranks.
    assert sent == set()
    names = {(a.stream, a.chunk, a.microbatch) for r in plan.ranks for a in r if a.verb == Verb.SEND_F}
    assert ("", "vision.1", image) in names


def test_a_stream_is_cut_for_the_parts_that_take_it_and_joined_from_those_that_emit_it() -> None:
    model = deepstack()
    lm = msgspec.structs.replace(model.modules[1], takes=tuple(StreamEnd(f"deep{i}", 3 - i) for i in range(3)))
    crossed = msgspec.structs.replace(model, modules=(model.modules[0], lm))
    plan, _, packing = deepstack_plan(crossed, parts=1)
    image = next(i for i, m in enumerate(packing.microbatches) if 0 in m.samples)
    sent = sorted(
        (a.stream, a.chunk, a.microbatch, a.sub_microbatch, a.shape)
        for r in plan.ranks
        for a in r
        if a.verb == Verb.SEND_F and a.stream
    )
    # Patches over four, image by image: layers 3 and 2 are on rank 1, layer 1 on rank 0.
    assert sent == [
        ("deep0", "vision.0", image, 0, (2, 8)),
        ("deep0", "vision.0", image, 1, (3, 8)),
        ("deep1", "vision.0", image, 0, (2, 8)),
        ("deep1", "vision.0", image, 1, (3, 8)),
        ("deep2", "vision.1", image, 0, (2, 8)),
        ("deep2", "vision.1", image, 1, (3, 8)),
    ]
    back = [a for r in plan.ranks for a in r if a.verb == Verb.SEND_B and a.stream]
    assert len(back) == len(sent)


def test_no_gradient_goes_back_to_what_is_frozen() -> None:
    model = deepstack(frozen=True)
    lm = msgspec.structs.replace(model.modules[1], takes=tuple(StreamEnd(f"deep{i}", 3 - i) for i in range(3)))
    plan, _, _ = deepstack_plan(msgspec.structs.replace(model, modules=(model.modules[0], lm)))
    assert {a.verb.direction for r in plan.ranks for a in r if a.stream} == {"F"}


def test_an_extent_may_be_a_part_of_every_instance() -> None:
    from pipeloom.spec import Workload

    shape = TensorShape(("tokens/4", 8))
    assert shape.resolve(Workload((8, 9, 3))) == (2 + 3 + 1, 8)
    assert shape.num_bytes(Workload((8,))) == 2 * 8 * 4
    for wrong in ("token", "tokens/0", "tokens/", "4/tokens"):
        with pytest.raises(InputError, match="is not an extent"):
            TensorShape((wrong, 8))


def a_module(name: str, **options: Any) -> ModuleSpec:
    return ModuleSpec(name, "sequence", (LayerSpec("gpt", WIDE, 3),), **options)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        (
            [a_module("lm", takes=(StreamEnd("x", 1),))],
            r"module 'lm'.takes\[1\]: no layer emits 'x'; emitted are: none",
        ),
        ([a_module("lm", emits=(EmittedStream("x", 1, WIDE),))], r"emits\[1\]: no layer takes 'x'"),
        (
            [a_module("lm", emits=(EmittedStream("x", 1, WIDE),), takes=(StreamEnd("x", 1),))],
            r"takes\[1\]: 'x' is emitted by layer 1 of 'lm', which comes no earlier",
        ),
        (
            [a_module("a", takes=(StreamEnd("x", 2),)), a_module("lm", emits=(EmittedStream("x", 0, WIDE),))],
            r"module 'a'.takes\[2\]: 'x' is emitted by layer 0 of 'lm', which comes no earlier",
        ),
        ([a_module("lm", emits=(EmittedStream("a b", 1, WIDE),))], "'a b' is not a valid keyword argument"),
        (
            [
                a_module("a", emits=(EmittedStream("x", 0, TensorShape((2, 8))),)),
                a_module("lm", takes=(StreamEnd("x", 0),)),
            ],
            r"module 'a'.emits\[0\]: dimension 0 of 'x' does not grow",
        ),
        (
            [a_module("lm", emits=(EmittedStream("x", 0, WIDE), EmittedStream("x", 1, WIDE)))],
            "a stream 'x' is emitted twice",
        ),
    ],
)
def test_streams_that_make_no_sense_are_refused(modules: list[ModuleSpec], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        ModelSpec("wrong", tuple(modules))


def test_an_end_outside_of_its_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"'x' is at layer 3, the module has layers 0\.\.2"):
        a_module("lm", takes=(StreamEnd("x", 3),))


def test_layouts_with_streams_are_of_the_second_version() -> None:
    from pipeloom.io.layout import layout_document, layout_from_document

    model = deepstack()
    _, layout, _ = deepstack_plan(model)
    document = layout_document(layout)
    assert document["format"] == "pipeloom.layout/2"
    assert layout_from_document(document) == layout
    with pytest.raises(InputError, match=r"'pipeloom\.layout/1' has no streams"):
        layout_from_document(document | {"format": "pipeloom.layout/1"})
    plain = Layout(1, (ModuleLayout("lm"),), (Chunk("lm", (0, 2), 0),))
    assert layout_document(plain)["format"] == "pipeloom.layout/1"
    assert "emits" not in layout_document(plain)["modules"][0]


def test_a_plan_of_the_second_version_has_no_streams() -> None:
    lm = msgspec.structs.replace(deepstack().modules[1], takes=tuple(StreamEnd(f"deep{i}", 3 - i) for i in range(3)))
    plan, _, _ = deepstack_plan(msgspec.structs.replace(deepstack(), modules=(deepstack().modules[0], lm)))
    with pytest.raises(InputError, match=r"stream=deep\d in a pipeloom.plan/2"):
        from_text(to_text(plan).replace("pipeloom.plan/3", "pipeloom.plan/2"))
