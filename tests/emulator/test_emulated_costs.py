"""The emulator behind the planner's cost protocol."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.cost import CostModel, rank_static_bytes
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import ParetoSteps
from pipeloom.cost.encoder_dp import EncoderDpCosts
from pipeloom.errors import InfeasibleError, InputError, PlanError
from pipeloom.layout import separate, single_rank, typical_seconds
from pipeloom.packing import Microbatch, Packing, PackingSpec, SubMicrobatch, pack
from pipeloom.plan import Verb, boundary_shapes, lower, verify
from pipeloom.planner import PlanningProblem, plan_batch
from pipeloom.search import Budget, solve
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, Workload
from pipeloom.spec.architecture import (
    Architecture,
    AttentionMixer,
    MLPMixer,
    ModuleArchitecture,
    PatchEmbeddingLayer,
    PatchMergerLayer,
    ProjectorLayer,
    ResidualLayer,
    TokenEmbeddingLayer,
)
from pipeloom.spec.batch import video_tokens
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.datasets import draw_samples, group_clips
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph.build import build_graph
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph, workspace_bytes
from pipeloom.timeline import check


@pytest.fixture(scope="module")
def costs():
    return EmulatedCosts(
        "vlm-s",
        "dip-h800-64",
        Degrees(tensor=4, pipeline=2, data=2),
        ("keep", "selective", "recompute:0.5", "recompute"),
    )


def test_strategies_trade_time_for_memory(costs):
    model: CostModel = costs
    keep, selective, half, full = model.chunk_costs(Chunk("lm", (1, 8), 0), Workload((5000, 3192)))
    assert [c.strategy for c in (keep, selective, half, full)] == ["keep", "selective", "recompute:0.5", "recompute"]
    assert keep.forward_s == selective.forward_s == full.forward_s > 0
    assert keep.backward_s < selective.backward_s < half.backward_s < full.backward_s
    assert keep.activation_bytes > selective.activation_bytes > half.activation_bytes > full.activation_bytes > 0
    assert half.layers == ("recompute",) * 4 + ("keep",) * 4
    for cost in (keep, selective, half, full):
        # Split, the collectives of the input gradient no longer hide behind the weight gradient.
        assert cost.backward_s <= cost.backward_input_s + cost.backward_weight_s <= 1.5 * cost.backward_s


def test_chunks_of_the_same_layers_share_an_answer(costs):
    work = Workload((5000, 3192))
    first, second, longer = (costs.chunk_costs(Chunk("lm", layers, 0), work) for layers in ((1, 8), (9, 16), (9, 17)))
    assert first is second
    assert longer[0].forward_s > first[0].forward_s
    # The chunk that begins with the embeddings has other layers.
    assert costs.chunk_costs(Chunk("lm", (0, 7), 0), work)[0] != first[0]


def test_layers_behind_a_merger_run_on_the_joined_rows():
    embedding = PatchEmbeddingLayer(patch_numbers=588, hidden=64)
    merger = PatchMergerLayer(hidden=64, factor=4, out_width=256)
    rest = (ProjectorLayer(256, 256), ResidualLayer(256, (AttentionMixer(4, 4, 64), MLPMixer(512))))

    def costs_of(*layers):
        text = ModuleArchitecture("lm", "sequence", (TokenEmbeddingLayer(512, 256),), ("vision",))
        model = Architecture("m", "s", (ModuleArchitecture("vision", "images", layers), text))
        return EmulatedCosts(model, "8xH100", Degrees())

    joined, whole = costs_of(embedding, merger, *rest), costs_of(embedding, *rest)
    patches, tokens = Workload((256, 1024)), Workload((64, 256))
    for last in (1, 2):
        behind, alone = Chunk("vision", (2, 1 + last), 0), Chunk("vision", (1, last), 0)
        assert joined.chunk_costs(behind, patches) == whole.chunk_costs(alone, tokens)
        assert joined.workspace_bytes(behind, patches) == whole.workspace_bytes(alone, tokens)
        assert joined.chunk_flops(behind, patches) == whole.chunk_flops(alone, tokens) > 0
        assert joined.boundary_bytes(behind, patches) == whole.boundary_bytes(alone, tokens) == 2 * 320 * 256
    outputs = [layer.output.dims for layer in joined.model_spec.modules[0].layers]
    assert outputs == [("tokens", 64), ("tokens", 64), ("tokens", 64), ("tokens", 64)]


def test_parts_of_backwards_only_where_wanted(costs):
    whole = EmulatedCosts("vlm-s", "dip-h800-64", Degrees(tensor=4, pipeline=2, data=2), ("keep",), split=False)
    here = Chunk("lm", (1, 8), 0), Workload((5000, 3192))
    cost, known = whole.chunk_costs(*here)[0], costs.chunk_costs(*here)[0]
    assert cost.backward_input_s is None
    assert (cost.forward_s, cost.backward_s, cost.activation_bytes) == (
        known.forward_s,
        known.backward_s,
        known.activation_bytes,
    )


def test_costs_add_up_over_chunks(costs):
    work = Workload((2704,) * 6)
    whole = costs.chunk_costs(Chunk("vision", (1, 20), 0), work)[0]
    parts = [costs.chunk_costs(Chunk("vision", (a, b), 0), work)[0] for a, b in ((1, 7), (8, 20))]
    assert sum(p.activation_bytes for p in parts) == whole.activation_bytes
    assert sum(p.forward_s for p in parts) == pytest.approx(whole.forward_s, rel=1e-9)
    assert costs.static_bytes(Chunk("vision", (1, 20), 0)) == pytest.approx(
        20 * costs.static_bytes(Chunk("vision", (3, 3), 0)), abs=20
    )


def test_boundaries_and_transfers(costs):
    work = Workload((8192,))
    assert costs.boundary_bytes(Chunk("lm", (0, 3), 0), work) == 8192 * 4096 * 2 // 4  # sequence parallel
    last = len(costs.architecture.module("vision").flat_layers) - 1
    assert costs.boundary_bytes(Chunk("vision", (last, last), 0), Workload((2704,) * 2)) == 2 * 169 * 4096 * 2 // 4
    assert 0 < costs.transfer_s(0) < costs.transfer_s(10**6) < costs.transfer_s(10**8)
    assert costs.workspace_bytes(Chunk("lm", (1, 1), 0), work) > 0
    assert costs.chunk_flops(Chunk("lm", (1, 1), 0), work) > 6e12 / 3 * 0.2


@pytest.mark.parametrize(
    ("degrees", "inside"),
    [
        (Degrees(tensor=4, pipeline=4), {(0, 1), (2, 3)}),
        (Degrees(tensor=8, pipeline=4), set()),
        (Degrees(tensor=2, pipeline=4), {(a, b) for a in range(4) for b in range(a + 1, 4)}),
        (Degrees(tensor=2, pipeline=4, data=2), {(0, 1), (2, 3)}),
    ],
)
def test_a_message_takes_the_link_between_the_nodes_of_its_ranks(degrees, inside):
    priced = EmulatedCosts("lm-5b", "dip-h800-64", degrees, ("keep",))
    size, nvlink, nic = 10**8, 10**8 / 200e9, 10**8 / 25e9
    for first in range(4):
        for second in range(first + 1, 4):
            seconds = priced.transfer_s(size, priced.link_between(first, second))
            least = nvlink if (first, second) in inside else nic
            assert least < seconds < 2 * least
            assert priced.link_between(second, first) == priced.link_between(first, second)
            reported = priced.rank.transfer_s(size, priced.rank.link_between(first, second))
            assert least <= reported < 1.1 * least
    # Without a number, the slowest.
    assert priced.transfer_s(size) == max(priced.transfer_s(size, link) for link in (0, 1))


def test_wrong_chunks_are_reported(costs):
    with pytest.raises(InputError, match=r"module 'audio': is unknown; the model has vision, lm"):
        costs.chunk_costs(Chunk("audio", (0, 0), 0), Workload((1,)))
    with pytest.raises(InputError, match=r"\[0, 99\] goes beyond layer 33"):
        costs.chunk_costs(Chunk("lm", (0, 99), 0), Workload((1,)))


def test_the_planners_view_of_model_and_cluster(costs):
    spec = costs.model_spec
    assert [m.name for m in spec.modules] == ["vision", "lm"]
    assert len(spec.module("lm").flat_layers) == len(costs.architecture.module("lm").flat_layers)
    block = spec.module("lm").layers[1]
    assert block.num_parameters * 4 > costs.static_bytes(Chunk("lm", (1, 1), 0)) / 18
    assert block.output.num_bytes(Workload((8192,))) == 8192 * 4096 * 2
    assert costs.rank.memory_capacity_bytes == 80 * 2**30 - 5 * 10**9
    assert costs.rank.host_capacity_bytes == 256 * 10**9 * 4 // 5 // 8


def test_a_task_graph_is_built_from_emulated_costs(costs):
    vision, lm = (len(costs.architecture.module(n).flat_layers) for n in ("vision", "lm"))
    layout = Layout(
        2,
        (ModuleLayout("vision", sub_microbatch=4), ModuleLayout("lm", ("vision",))),
        (
            Chunk("vision", (0, 31), 0),
            Chunk("vision", (32, vision - 1), 1),
            Chunk("lm", (0, 16), 0),
            Chunk("lm", (17, lm - 1), 1),
        ),
    )
    batch = Batch((Sample("a", 4000, (169,) * 6, (2704,) * 6), Sample("b", 3000)))
    packing = Packing(
        batch,
        ("vision", "lm"),
        (
            Microbatch(
                (0,),
                (
                    (SubMicrobatch(0, 3, Workload((2704,) * 3)), SubMicrobatch(3, 3, Workload((2704,) * 3))),
                    (SubMicrobatch(0, 1, Workload((5014,))),),
                ),
            ),
            Microbatch((1,), ((), (SubMicrobatch(0, 1, Workload((3000,))),))),
        ),
        ("images", "sequence"),
    )
    graph = build_graph(layout, packing, costs, backward="split")
    assert graph.num_pairs == 2 * 2 + 2 * 2
    assert (graph.duration_ns > 0).all()
    assert (graph.activation_bytes > 0).all()
    assert len(graph.candidates[0]) == 4


def test_a_text_to_video_batch_is_packed_planned_and_checked():
    degrees = Degrees(tensor=4, pipeline=2, data=2)
    costs = EmulatedCosts("t2v-s", "dip-h800-64", degrees, ("keep", "selective", "recompute"), split=False)
    model = costs.model_spec
    assert [m.reads for m in model.modules] == ["text", "videos"]
    clips = [clip for group in group_clips(draw_samples("dip-t2v", 24, seed=5)) for clip in group]
    batch = Batch(tuple(clips))
    budget = 2 * max(video_tokens(clip)[0] for clip in clips)
    packed = pack(batch, model, single_rank(model, {}), PackingSpec(budget))
    seconds = typical_seconds(model, costs, [packed])
    layout = separate(model, 2, {}, lambda module, layer: seconds[f"{module}/{layer.kind}"])
    problem = PlanningProblem(model, layout, costs, PackingSpec(budget), memory=MemoryLimit.of(costs.rank))  # type: ignore[arg-type]
    planned = plan_batch(problem, batch, budget=Budget(evaluations=20))
    microbatches = planned.packing.microbatches
    assert sorted(i for m in microbatches for i in m.samples) == list(range(24))
    assert 1 < len(microbatches) <= 24
    for number, microbatch in enumerate(microbatches):
        (captions,) = planned.packing.parts_of(number, "lm")
        (videos,) = planned.packing.parts_of(number, "dit")
        assert captions.workload.lengths == tuple(clips[i].text_tokens for i in microbatch.samples)
        assert videos.workload.lengths == tuple(video_tokens(clips[i])[0] for i in microbatch.samples)
        assert videos.workload.num_tokens <= budget
    assert not check(planned.graph, planned.schedule, planned.timeline)
    assert planned.graph.num_pairs == 2 * 2 * len(microbatches)


def test_tokens_of_videos():
    # 2 s are 32 frames, 4 times 8; 2.1 s begin a fifth; 250 x 100 pixels begin 16 x 7 squares of 16.
    videos = Sample("v", 10, video_seconds=(2.0, 2.1, 0.01), video_height=(250,) * 3, video_width=(100,) * 3)
    assert video_tokens(videos) == (4 * 16 * 7, 5 * 16 * 7, 16 * 7)
    with pytest.raises(InputError, match=r"'v': has 2 video_seconds, 1 video_height and 0 video_width"):
        video_tokens(Sample("v", video_seconds=(1.0, 2.0), video_height=(64,)))


def test_an_emulated_graph_that_recomputes_all_lowers_to_a_plan_that_recomputes():
    costs = EmulatedCosts("vlm-s", "dip-h800-64", Degrees(tensor=4, pipeline=2), ("recompute",), split=False)
    model = costs.model_spec
    layout = separate(model, 2, {}, lambda *_: 1.0)
    batch = Batch((Sample("a", 400, (169,), (2704,)), Sample("b", 600)))
    packing = pack(batch, model, layout, PackingSpec(1000))
    graph = build_graph(layout, packing, costs)
    found = solve(graph, budget=Budget(evaluations=1), seed=0)
    plan = lower(graph, found.schedule, found.timeline, layout, packing, boundary_shapes(model, layout))
    verify(plan, layout, packing)
    for actions in plan.ranks:
        verbs = [action.verb for action in actions]
        assert verbs.count(Verb.RECOMPUTE) == verbs.count(Verb.B) > 0
        assert {action.strategy for action in actions if action.verb is Verb.F} == {"recompute"}
    bare = [tuple(action for action in actions if action.verb is not Verb.RECOMPUTE) for actions in plan.ranks]
    with pytest.raises(PlanError, match="comes without RECOMPUTE, which the strategy of its F needs"):
        verify(msgspec.structs.replace(plan, ranks=tuple(bare)), layout, packing)


def test_emulated_costs_put_aside_memory_as_measured_ones_do(costs):
    model, batch = costs.model_spec, Batch((Sample("a", 400, (169,), (2704,)), Sample("b", 600)))
    layout = separate(model, 2, {}, lambda *_: 1.0)
    packing = pack(batch, model, layout, PackingSpec(1000))
    limit = MemoryLimit(10**11)
    graph = iteration_graph(layout, packing, costs, "each", limit).graph
    work = workspace_bytes(layout, packing, costs, limit.num_messages)
    assert graph.capacity_bytes.tolist() == (10**11 - work[0]).tolist()
    assert work[0].min() < work[0].max()
    # Copies to the host and back are inside passes here, so that these alone could need more.
    staged = [0, 0] if graph.staging_bytes is None else graph.staging_bytes.tolist()
    assert staged == (work[1] - work[0]).tolist()
    # Backwards may be split, and every strategy is there with a whole backward too.
    assert graph.weight_of.min() >= 0
    assert {len(row) for row in graph.candidates} == {2 * len(costs.strategies)}
    even = iteration_graph(layout, packing, costs, "even", MemoryLimit(10**11, 0, even=True), or_whole=False).graph
    assert set(even.capacity_bytes.tolist()) == {10**11 - workspace_bytes(layout, packing, costs, 0)[0].max()}
    assert {len(row) for row in even.candidates} == {len(costs.strategies)}
    with pytest.raises(InfeasibleError, match="the largest computation"):
        iteration_graph(layout, packing, costs, "small", MemoryLimit(int(graph.static_bytes.max()) + 1))


@pytest.fixture(scope="module")
def mixing():
    alone = msgspec.structs.replace(load_cluster("dip-h800-64"), host_bytes_per_s=0.0)
    return EmulatedCosts("vlm-s", alone, Degrees(tensor=4, pipeline=4), split=False, pareto_steps=ParetoSteps())


@pytest.mark.parametrize("layers", [(0, 0), (0, 7), (1, 8), (20, 33)])
def test_mixtures_cost_what_the_emulator_says_of_them(mixing, layers):
    """Whatever layers they are of: as long as their layers compute, and no shorter than their copies."""
    chunk, work = Chunk("lm", layers, 0), Workload((5000, 3192))
    found = mixing.chunk_costs(chunk, work)
    assert len(found) == 10
    assert found[0].backward_s == min(cost.backward_s for cost in found)
    for cost in found:
        computed = tuple("keep" if each == "offload" else each for each in cost.layers)
        alone = mixing._chunks.stage(chunk, computed).cost(work, ("F", "B"))
        known = mixing._chunks.stage(chunk, cost.layers).cost(work, ())
        assert (cost.activation_bytes, cost.host_bytes) == (known.activation_bytes, known.host_bytes)
        copies = cost.host_bytes / (64e9 * 0.85)
        assert cost.forward_s >= max(alone.duration_ps["F"] / 1e12, copies) * (1 - 1e-9)
        assert cost.backward_s >= max(alone.duration_ps["B"] / 1e12, copies) * (1 - 1e-9)
        if not cost.host_bytes:
            assert cost.backward_s == pytest.approx(alone.duration_ps["B"] / 1e12)


def test_offloading_some_layers_is_free_and_offloading_all_is_not(mixing):
    found = mixing.chunk_costs(Chunk("lm", (1, 8), 0), Workload((5000, 3192)))
    keep, *others = found
    free = [
        cost
        for cost in others
        if cost.host_bytes and cost.forward_s + cost.backward_s == keep.forward_s + keep.backward_s
    ]
    assert free
    assert all(cost.activation_bytes < keep.activation_bytes for cost in free)
    assert found[-1].layers == ("offload",) * 8
    assert found[-1].forward_s > 1.3 * keep.forward_s


def test_room_is_kept_for_what_is_on_its_way_to_the_host(mixing):
    plain = EmulatedCosts("vlm-s", "dip-h800-64", Degrees(tensor=4, pipeline=4), split=False)
    chunk, work = Chunk("lm", (1, 8), 0), Workload((5000, 3192))
    whole = plain.chunk_costs(chunk, work)[-1].host_bytes
    assert mixing.workspace_bytes(chunk, work) == plain.workspace_bytes(chunk, work)
    assert mixing.staging_bytes(chunk, work) == plain.staging_bytes(chunk, work) + 4 * whole // 8


def test_folder_replicas_of_all_devices_share_the_memory_of_their_host():
    cluster = load_cluster("dip-h800-64")
    assert cluster.copy_bytes_per_s == 400e9 / 8 / 2 < cluster.device.pcie_bytes_per_s
    alone = msgspec.structs.replace(cluster, host_bytes_per_s=0.0)
    assert alone.copy_bytes_per_s == cluster.device.pcie_bytes_per_s
    chunk, work = Chunk("lm", (1, 4), 0), Workload((8192,))
    shared, free = (
        EmulatedCosts("lm-5b", each, Degrees(tensor=4), ("offload",)).chunk_costs(chunk, work)[0]
        for each in (cluster, alone)
    )
    assert shared.forward_s > free.forward_s
    assert shared.host_bytes == free.host_bytes > 0


def test_a_device_without_a_link_to_the_host_offloads_nothing():
    cluster = load_cluster("dip-h800-64")
    cut_off = msgspec.structs.replace(cluster, device=msgspec.structs.replace(cluster.device, pcie_bytes_per_s=0.0))
    costs = EmulatedCosts("vlm-s", cut_off, Degrees(tensor=4, pipeline=4), split=False, pareto_steps=ParetoSteps())
    found = costs.chunk_costs(Chunk("lm", (1, 8), 0), Workload((5000, 3192)))
    assert len(found) == ParetoSteps().free
    assert not any(cost.host_bytes for cost in found)
    assert costs.workspace_bytes(Chunk("lm", (1, 8), 0), Workload((5000, 3192))) > 0


def test_an_optimizer_on_the_host_leaves_the_sums_of_gradients_to_the_devices():
    update_s = {
        (host, data): EmulatedCosts(
            "lm-5b",
            "dip-h800-64",
            Degrees(data=data, zero=0),
            ("keep",),
            trainer=msgspec.structs.replace(load_trainer("fused"), host_optimizer=host),
        ).update_s([Chunk("lm", (1, 4), 0)])
        for host in (False, True)
        for data in (1, 8)
    }
    sums_s = update_s[False, 8] - update_s[False, 1]
    assert update_s[True, 8] - update_s[True, 1] == pytest.approx(sums_s, rel=1e-6)
    assert sums_s > 0


def test_all_chunks_of_a_rank_share_the_whole_layers_of_zero_3():
    costs = EmulatedCosts("llama-3.1-70b", "h100-64", Degrees(pipeline=2, data=32, zero=3), ("keep",), split=False)
    modules = tuple(ModuleLayout.of(module) for module in costs.model_spec.modules)
    few = (Chunk("lm", (0, 40), 0), Chunk("lm", (41, 81), 1))
    many = tuple(Chunk("lm", (10 * n + (n > 0), 10 * n + 10 + (n == 7)), n % 2) for n in range(8))
    one, four = (rank_static_bytes(costs, Layout(2, modules, chunks)) for chunks in (few, many))
    assert four.tolist() == pytest.approx(one.tolist(), abs=2)
    under_layout = EncoderDpCosts(costs, frozenset(["vision"]), 1)
    assert rank_static_bytes(under_layout, Layout(2, modules, many)).tolist() == four.tolist()


@pytest.mark.parametrize("name", ["qwen2.5-3b", "qwen3-0.6b"])
def test_a_rank_with_a_tied_head_has_a_copy_of_the_embedding(name):
    one, two = (EmulatedCosts(name, "8xH100", Degrees(pipeline=n), ("keep",), split=False) for n in (1, 2))
    last = len(two.architecture.module("lm").flat_layers) - 1
    table = two.static_bytes(Chunk("lm", (0, 0), 0))
    head = Chunk("lm", (last, last), 1)
    assert two.static_bytes(head) - one.static_bytes(head) == table
    assert two.update_s([head]) > one.update_s([head])
    # The last rank of this layout has the embedding too.
    whole = Chunk("lm", (0, last), 1)
    assert two.static_bytes(whole) == one.static_bytes(whole)
    assert two.model_spec == one.model_spec


def test_the_host_launches_only_the_experts_of_its_device():
    trainer = load_trainer("megatron")
    alone, eight = (
        EmulatedCosts("gpt-oss-120b", "64xH100", Degrees(data=8, expert=n), ("keep",), split=False, trainer=trainer)
        for n in (1, 8)
    )
    block, short = Chunk("lm", (1, 1), 0), Workload((8,))
    assert alone.chunk_costs(block, short)[0].forward_s > 2 * eight.chunk_costs(block, short)[0].forward_s
    layer = eight.architecture.module("lm").flat_layers[1]
    assert eight.chunk_costs(block, short)[0].forward_s == pytest.approx(trainer.host_s(layer, 8) / 3)


def test_context_parallelism_shards_weights_too():
    """torchtitan and others shard over both; the messages do not depend on which of the two there are."""
    data, context = (
        EmulatedCosts("llama3-8b", "8xH100", degrees, ("keep",), split=False)
        for degrees in (Degrees(data=8, zero=3), Degrees(context=8, zero=3))
    )
    block = Chunk("lm", (1, 1), 0)
    assert data.static_bytes(block) == context.static_bytes(block)
    for costs in (data, context):
        (template,) = costs._chunks.layers(block)
        kinds = [cost.kind for cost in template.passes["keep"].programs["B"].costs]
        assert kinds[:2] == ["all_gather", "reduce_scatter"]
