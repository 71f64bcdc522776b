"""MegaScale-Omni's way: encoders on every rank, dealt by time; microbatches made anew; the joint pipeline."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pipeloom.compare.baseline import SIZES, by_time
from pipeloom.compare.baselines import optimus
from pipeloom.compare.baselines.megascale_omni import assigned_in_groups, joint_pipeline, megascale_omni
from pipeloom.compare.baselines.megatron import megatron_1f1b
from pipeloom.compare.baselines.optimus import optimus_bubbles
from pipeloom.compare.baselines.optimus_orders import optimus_coarse
from pipeloom.compare.baselines.replicated_encoders import LongShortCosts
from pipeloom.compare.model_on_cluster import LEVELS, assignable_of, draw_iteration, graph_of, put_on_cluster, resized
from pipeloom.compare.repacking import Reordering, reordered
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.search import Budget
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import to_ns
from pipeloom.timeline import check, simulate
from tests.compare.cases import vlm_on_h800


@pytest.fixture(scope="module")
def setting():
    return vlm_on_h800(Degrees(tensor=2, pipeline=4), vision=8, lm=10)


@pytest.fixture(scope="module")
def typical(setting):
    return [draw_iteration(setting, 6, 100)]


@pytest.fixture(scope="module")
def made(setting, typical):
    return megascale_omni(setting, typical)


@pytest.fixture(scope="module")
def layout(setting, typical):
    places = {"vision": ModulePlacement(1, 4), "lm": ModulePlacement(2)}
    return replicated(separate(setting.model, setting.num_ranks, places, by_time(setting, typical)), ["vision"])


def test_it_is_sound_and_ahead_of_what_it_builds_on(setting, typical, made):
    groups = draw_iteration(setting, 6, 0)
    found = made.run(groups, Budget(evaluations=1), 0)
    assert check(found.graph, found.schedule, found.timeline) == ()
    assert (found.timeline.peak_bytes <= found.graph.capacity_bytes).all()
    assert found.layout.module("vision").on_ranks == "replicated"
    assert found.after_s == 0
    assert found.iteration_s < optimus_bubbles(setting, typical).run(groups, Budget(evaluations=1), 0).iteration_s


def test_every_image_is_encoded_once(setting, made):
    """However microbatches were made anew, the work is that of the samples given."""
    groups = draw_iteration(setting, 6, 1)
    found = made.run(groups, Budget(evaluations=1), 0)
    parts = {
        (label.microbatch, label.sub_microbatch) for label in found.graph.labels if label.chunk < setting.num_ranks
    }
    images = sum(len(s.image_tokens) for group in groups for s in group)
    size = found.layout.module("vision").sub_microbatch
    assert images / size <= len(parts) <= images


@pytest.mark.full
def test_what_does_not_fit_whole_on_every_device_runs_in_another_way(setting, typical, made):
    groups = draw_iteration(setting, 6, 0)
    whole = int(made.run(groups, Budget(evaluations=1), 0).graph.static_bytes.max())
    small = replace(setting, capacity_bytes=int(0.95 * whole))
    found = megascale_omni(small, typical).run(groups, Budget(evaluations=1), 0)
    assert check(found.graph, found.schedule, found.timeline) == ()
    assert found.graph.static_bytes.max() < whole
    with pytest.raises(InfeasibleError):
        megascale_omni(replace(setting, capacity_bytes=10**9), typical).run(groups, Budget(evaluations=1), 0)


def test_groups_are_encoded_around_the_backbones_passes_of_them(setting, typical, layout):
    graph = graph_of(setting, layout, draw_iteration(setting, 8, 2), "joint", setting.levels)
    orders = {size: joint_pipeline(graph, size) for size in (1, 4, 8)}
    for order in orders.values():
        timeline = simulate(graph, order)
        assert check(graph, order, timeline) == ()
    # One group is what Optimus does.
    assert simulate(graph, orders[8]).makespan_ns == simulate(graph, optimus_coarse(graph)).makespan_ns
    start = simulate(graph, orders[4]).start_ns
    encodes, first = graph.module == 0, graph.microbatch < 4
    # The backbone begins before the second group is encoded, and then less is held.
    assert start[~encodes].min() < start[encodes & ~first & (graph.kind == 0)].max()
    assert simulate(graph, orders[4]).peak_bytes.max() <= simulate(graph, orders[8]).peak_bytes.max()
    with pytest.raises(InputError, match="group_size"):
        joint_pipeline(graph, 0)


def test_every_group_is_assigned_evenly(setting, layout):
    assigned = assigned_in_groups(
        assignable_of(setting, layout, draw_iteration(setting, 8, 2), "dealt", setting.levels), 4
    ).graph
    encodes = assigned.module == 0
    for group in (0, 1):
        mine = encodes & (assigned.microbatch // 4 == group)
        load = np.bincount(assigned.rank[mine], weights=assigned.duration_ns[mine], minlength=4)
        assert load.max() - load.min() <= 2 * assigned.duration_ns[mine].max()


def test_short_images_are_assigned_to_devices_and_long_ones_divided(setting):
    costs = LongShortCosts(setting)
    chunk = Chunk("vision", (0, 8), 0)
    short, one = Workload((256,) * 8), Workload((16384,))
    divided = setting.levels.chunk_costs(chunk, short)[0]
    assigned = costs.chunk_costs(chunk, short)[0]
    assert assigned.forward_s + assigned.backward_s < divided.forward_s + divided.backward_s
    # A single image cannot be dealt, so it is divided; and the backbone is as it was.
    assert costs.chunk_costs(chunk, one) == setting.levels.chunk_costs(chunk, one)
    backbone = Chunk("lm", (0, 3), 0)
    assert costs.chunk_costs(backbone, short) == setting.levels.chunk_costs(backbone, short)
    assert costs.static_bytes(backbone) == setting.levels.static_bytes(backbone)
    # Whole on every device, but for the optimiser's state.
    assert costs.static_bytes(chunk) > 0.5 * setting.levels.static_bytes(chunk)


def test_alone_on_a_device_encoders_cost_what_they_did():
    setting = vlm_on_h800(Degrees(pipeline=2), vision=4, lm=4)
    chunk, workload = Chunk("vision", (0, 4), 0), Workload((256, 1024))
    assert LongShortCosts(setting).chunk_costs(chunk, workload) == setting.levels.chunk_costs(chunk, workload)


def test_reordering_keeps_all_samples_and_is_even(setting):
    groups = draw_iteration(setting, 8, 3)
    made = Reordering(setting, groups)
    for number in (8, 12):
        packed = made.even(number)
        assert sorted(s.id for g in packed for s in g) == sorted(s.id for g in groups for s in g)
        assert len(packed) >= number
        tokens = [sum(s.sequence_tokens for s in g) for g in packed]
        assert max(tokens) <= made.spec.token_budget
    # As many as eight of the given ones together, as ours may have.
    assert made.spec.token_budget == 8 * max(sum(s.sequence_tokens for s in g) for g in groups)
    # Of images and text together, as given and made anew.
    work = made.loads.backbone + made.loads.encoder
    place = {id(sample): i for i, sample in enumerate(made.samples)}
    given, again = ([sum(work[place[id(s)]] for s in g) for g in each] for each in (groups, made.even(12)))
    assert max(again) < max(given)
    assert sum(again) == pytest.approx(sum(given))


def test_a_reordered_system_is_no_slower(setting, typical):
    groups = draw_iteration(setting, 6, 4)
    plain = replace(megatron_1f1b(setting, typical, "time"), choice=None)
    found = reordered(plain, setting).run(groups, Budget(evaluations=1), 0)
    sized = [plain.run(resized(groups, size), Budget(evaluations=1), 0) for size in SIZES]
    assert setting.iteration_s(found) <= min(map(setting.iteration_s, sized))
    with pytest.raises(InfeasibleError):
        reordered(megatron_1f1b(replace(setting, capacity_bytes=10**9), []), setting).run(
            groups, Budget(evaluations=1), 0
        )


def test_encoders_on_every_rank_are_updated_as_they_are_stored(setting, typical, made, monkeypatch):
    """Each device reduces, updates and gathers the share of the encoders whose state it holds, once."""
    monkeypatch.setattr(optimus, "in_turn", lambda _name, options, *_, **__: options[-1])
    groups = draw_iteration(setting, 6, 0)
    found, fine = (each.run(groups, Budget(evaluations=1), 0) for each in (made, optimus_bubbles(setting, typical)))
    whole = EmulatedCosts(setting.architecture, setting.cluster, Degrees(data=8), LEVELS, split=False)
    divided = EmulatedCosts(setting.architecture, setting.cluster, Degrees(tensor=2, data=4), LEVELS, split=False)
    for result, apart in ((found, whole), (fine, divided)):
        assert result.layout.module("vision").on_ranks == "replicated"
        for rank in range(setting.num_ranks):
            chunks = [chunk for chunk in result.layout.chunks if chunk.rank == rank]
            encoders = [chunk for chunk in chunks if chunk.module == "vision"]
            backbone = [chunk for chunk in chunks if chunk.module != "vision"]
            update_s = setting.levels.update_s(backbone) + apart.update_s(encoders)
            assert result.update_ns[rank] == to_ns(update_s)
            static = sum(map(setting.levels.static_bytes, backbone)) + sum(map(apart.static_bytes, encoders))
            assert result.graph.static_bytes[rank] == static
        assert result.after_s == 0
        assert setting.iteration_s(result) <= result.iteration_s + max(result.update_ns) / 1e9


def test_a_frozen_encoder_has_no_update(setting, layout):
    modules = [msgspec.structs.replace(m, frozen=m.name == "vision") for m in setting.architecture.modules]
    frozen = msgspec.structs.replace(setting.architecture, modules=tuple(modules))
    costs = LongShortCosts(put_on_cluster(frozen, setting.cluster, setting.degrees))
    assert costs.update_s([chunk for chunk in layout.chunks if chunk.module == "vision"]) == 0.0
