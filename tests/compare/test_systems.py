"""Every system on a small case: sound by the independent checker, within memory, and ours ahead."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pipeloom.compare import result
from pipeloom.compare.baseline import SIZES, System, by_parameters, by_time, fixed_system, in_turn, mfu, searched_system
from pipeloom.compare.baselines.dip import dip_layout, our_layout
from pipeloom.compare.baselines.fsdp import fsdp, fsdp_time
from pipeloom.compare.baselines.megatron import megatron_1f1b, megatron_interleaved
from pipeloom.compare.baselines.nnscaler import mean_chain, nnscaler
from pipeloom.compare.baselines.optimus import optimus, optimus_bubbles
from pipeloom.compare.baselines.optimus_orders import optimus_coarse
from pipeloom.compare.baselines.zero_bubble import zero_bubble
from pipeloom.compare.model_on_cluster import (
    assign_microbatches,
    draw_iteration,
    graph_of,
    model_flops,
    most_workspace_bytes,
    pack_microbatches,
    put_on_cluster,
    resized,
)
from pipeloom.compare.recomputation import per_module_recomputation
from pipeloom.compare.result import fastest, uniform_recomputation
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import ModulePlacement, chain_of_stages, separate
from pipeloom.layout.layouts import chunk_counts
from pipeloom.search import Budget, interleaved_one_f_one_b
from pipeloom.spec import Chunk
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import Schedule, check, simulate, within_limits
from tests.compare.cases import vlm_on_h800


@pytest.fixture(scope="module")
def setting():
    return vlm_on_h800(Degrees(tensor=2, pipeline=4), vision=16, lm=18)


@pytest.fixture(scope="module")
def typical(setting):
    return [draw_iteration(setting, 8, 100)]


MAKERS = {
    "1F1B by parameters": lambda c, t: megatron_1f1b(c, t),
    "1F1B by time": lambda c, t: megatron_1f1b(c, t, "time"),
    "interleaved by parameters": lambda c, t: megatron_interleaved(c, t),
    "interleaved by time": lambda c, t: megatron_interleaved(c, t, "time"),
    "zero-bubble H1": zero_bubble,
    "nnScaler*": nnscaler,
    "Optimus coarse": optimus,
    "Optimus fine": optimus_bubbles,
    "ours": lambda c, t: searched_system("ours", c, our_layout(c, t)),
}


@pytest.fixture(scope="module")
def timed(setting, typical):
    groups = draw_iteration(setting, 8, 0)
    return {name: make(setting, typical).run(groups, Budget(evaluations=100), 0) for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_systems_are_sound(timed, name):
    system = timed[name]
    assert system.name == name
    assert check(system.graph, system.schedule, system.timeline) == ()
    assert (system.timeline.peak_bytes <= system.graph.capacity_bytes).all()
    assert system.timeline.makespan_ns >= system.lower_bound.ns


def test_ours_is_ahead_of_all(timed):
    assert min(timed, key=lambda name: timed[name].timeline.makespan_ns) == "ours"


def test_every_part_of_the_data_is_in_every_packing(setting, typical):
    groups = draw_iteration(setting, 8, 3)
    packing = pack_microbatches(setting, our_layout(setting, typical), groups)
    images = [sum(len(s.image_tokens) for s in group) for group in groups]
    assert [sum(p.count for p in m.parts[0]) for m in packing.microbatches] == images
    sizes = [[p.count for p in m.parts[0]] for m in packing.microbatches if m.parts[0]]
    assert all(max(row) - min(row) <= 1 for row in sizes)


def test_flops_and_utilization(setting):
    groups = draw_iteration(setting, 8, 0)
    flops = model_flops(setting, groups)
    tokens = sum(s.sequence_tokens for g in groups for s in g)
    patches = sum(sum(s.patches) for g in groups for s in g)
    # 6 operations a parameter and token, attention on top.
    vision, lm = (sum(layer.num_parameters for layer in m.flat_layers) for m in setting.model.modules)
    assert 1.0 < flops / (6 * (lm * tokens + vision * patches)) < 1.6
    assert mfu(setting, groups, 2.0) == pytest.approx(mfu(setting, groups, 1.0) / 2, rel=0.2)


def test_fsdp_takes_what_its_slowest_replicas_take(setting):
    groups = draw_iteration(setting, 8, 0)
    seconds, strategy = fsdp_time(setting, groups, 8)
    assert seconds > 0
    assert strategy


def test_fsdp_as_a_system_takes_what_its_passes_take(setting, typical):
    """Every device a rank, in step with the others: the checked timeline is as long as the sum of the slowest."""
    groups = draw_iteration(setting, 11, 0)
    found = fsdp(setting, typical).run(groups, Budget(evaluations=1), 0)
    seconds, _ = fsdp_time(setting, groups, 8)
    assert check(found.graph, found.schedule, found.timeline) == ()
    assert found.graph.num_ranks == 8
    assert setting.iteration_s(found) == pytest.approx(seconds, rel=1e-6)
    assert (found.timeline.peak_bytes <= found.graph.capacity_bytes).all()
    tiny = replace(setting, capacity_bytes=int(found.graph.static_bytes[0]) + 1)
    with pytest.raises(InfeasibleError, match="largest microbatch"):
        fsdp(tiny, typical).run(groups, Budget(evaluations=1), 0)


def test_fsdp_uses_all_devices_and_makes_steps_even(setting, typical):
    """Too few microbatches are halved, and those that take about as long run in the same step."""
    samples = sorted((s for group in draw_iteration(setting, 8, 0) for s in group), key=lambda s: s.sequence_tokens)
    system, budget = fsdp(setting, typical), Budget(evaluations=1)
    single = [[sample] for sample in samples[:8]]
    found = system.run(resized(single, 2), budget, 0)
    assert set(found.graph.rank.tolist()) == set(range(8))
    assert found.iteration_s == system.run(single, budget, 0).iteration_s
    short, long = [samples[0]], [samples[-1]]
    even, mixed = (system.run(each, budget, 0) for each in ([short] * 8 + [long] * 8, [short, long] * 8))
    assert mixed.iteration_s == pytest.approx(even.iteration_s)


TIMED = {
    "1F1B": (megatron_1f1b, (1.2, 1.6, 2.2)),
    "interleaved": (megatron_interleaved, (1.6,)),
    "zero-bubble": (zero_bubble, (5.0,)),
}
"""Systems, and devices to run them on: memory in multiples of what 1F1B cut by parameters has for weights."""


@pytest.mark.parametrize("name", TIMED)
def test_stages_of_equal_time_give_way_to_memory(setting, typical, name):
    """Cut by time, a system runs wherever it runs cut by parameters; there are devices where equal times do not fit."""
    make, shares = TIMED[name]
    groups = draw_iteration(setting, 4, 2)
    held = megatron_1f1b(setting, typical).run(groups, Budget(evaluations=1), 0).graph.static_bytes.max()
    load = by_time(setting, typical)
    counts = chunk_counts(setting.num_ranks, setting.model.modules)
    equal = [chain_of_stages(setting.model, setting.num_ranks, v, load).chunks for v in counts]
    unequal = []
    for share in shares:
        small = replace(setting, capacity_bytes=int(share * held))
        try:
            plain = make(small, typical, "parameters").run(groups, Budget(evaluations=1), 0)
        except InfeasibleError:
            continue
        found = make(small, typical, "time").run(groups, Budget(evaluations=1), 0)
        assert check(found.graph, found.schedule, found.timeline) == ()
        assert plain.graph.num_ranks == found.graph.num_ranks
        unequal.append(found.layout.chunks not in equal)
    assert unequal
    # Interleaved, some number of chunks has stages of equal time that fit; where zero-bubble runs, any cut fits.
    assert any(unequal) or name != "1F1B"


@pytest.mark.parametrize("balance", ["parameters", "time"])
def test_interleaved_takes_the_best_number_of_chunks(setting, balance):
    """However many that is, and judged by all sampled iterations, not by the first alone."""
    sampled = [draw_iteration(setting, 6, 100), draw_iteration(setting, 4, 101)]
    load = by_time(setting, sampled) if balance == "time" else by_parameters(setting, sampled)
    means = {}
    for chunks in range(2, sum(len(m.flat_layers) for m in setting.model.modules) // setting.num_ranks + 1):
        layout = chain_of_stages(setting.model, setting.num_ranks, chunks, load)
        fixed = fixed_system("fixed", setting, layout, interleaved_one_f_one_b)
        means[chunks] = np.mean([fixed.run(groups, Budget(evaluations=1), 0).iteration_s for groups in sampled])
    picked = megatron_interleaved(setting, sampled, balance)
    found = np.mean([picked.run(groups, Budget(evaluations=1), 0).iteration_s for groups in sampled])
    assert found <= min(means.values())
    if balance == "parameters":
        assert min(means, key=means.get) > 4
        assert found < min(means[chunks] for chunks in (2, 3, 4))


def test_optimus_takes_the_best_number_of_chunks(setting, typical):
    backbone = setting.model.modules[-1]
    layouts = [
        separate(setting.model, setting.num_ranks, {backbone.name: ModulePlacement(chunks)}, by_time(setting, typical))
        for chunks in range(1, len(backbone.flat_layers) // setting.num_ranks + 1)
    ]
    assert len(layouts) > 4
    options = [fixed_system("coarse", setting, one, optimus_coarse, per_module_recomputation) for one in layouts]
    best = min(setting.iteration_s(option.run(typical[0], Budget(evaluations=1), 0)) for option in options)
    assert setting.iteration_s(optimus(setting, typical).run(typical[0], Budget(evaluations=1), 0)) == best


def test_an_iteration_that_does_not_fit_runs_under_the_next_layout(setting, typical):
    def option(name, seconds, most):
        def run(groups, _budget, _seed):
            if len(groups) > most:
                raise InfeasibleError(f"{name} is full")
            return SimpleNamespace(name=name, iteration_s=seconds)

        return System(name, dip_layout(setting, typical), run)

    options = [option("slow", 3.0, 9), option("fast, one does not fit", 1.0, 3), option("middling", 2.0, 6)]
    sampled = [[()] * 3, [()] * 4]
    picked = in_turn("picked", options, sampled, seconds=lambda found: found.iteration_s)
    assert [picked.run([()] * n, Budget(evaluations=1), 0).name for n in (2, 6, 9)] == ["middling", "middling", "slow"]
    with pytest.raises(InfeasibleError, match="middling is full"):
        picked.run([()] * 10, Budget(evaluations=1), 0)


def test_microbatches_of_any_size_have_all_samples(setting):
    groups = draw_iteration(setting, 7, 5)
    names = sorted(s.id for g in groups for s in g)
    for together in SIZES:
        other = resized(groups, together)
        assert sorted(s.id for g in other for s in g) == names
        assert all(other)
    assert [len(resized(groups, n)) for n in (1, 2, 4)] == [7, 4, 2]
    assert len(resized(groups, 0)) > 7


def test_what_does_not_fit_is_reported(setting, typical):
    with pytest.raises(InfeasibleError, match="optimizer state"):
        megatron_1f1b(replace(setting, capacity_bytes=10**9), []).run(typical[0], Budget(evaluations=1), 0)
    with pytest.raises(InputError, match="need 128 devices"):
        put_on_cluster("vlm-s", "dip-h800-64", Degrees(tensor=8, pipeline=16))


def test_two_settings_are_the_best_of_all_pairs(setting, typical):
    """One walk down both ladders finds what trying every pair finds, on a device that is nearly full."""
    layout = our_layout(setting, typical)
    graph = graph_of(setting, layout, draw_iteration(setting, 6, 1), "pairs", setting.levels)
    tight = replace(graph, capacity_bytes=graph.static_bytes + 12_000_000_000)
    schedule = optimus_coarse(tight)
    found = per_module_recomputation("pairs", layout, tight, schedule)
    backbone = tight.module[tight.forward_of] == 1
    best = None
    for encoders, level in itertools.product(range(len(tight.candidates[0])), repeat=2):
        choice = np.where(backbone, level, encoders)
        chosen = Schedule(schedule.order, choice)
        timeline = simulate(tight, chosen)
        if within_limits(tight, chosen, timeline):
            best = min(best or timeline.makespan_ns, timeline.makespan_ns)
    assert found.timeline.makespan_ns == pytest.approx(best, rel=1e-3)
    none = replace(graph, capacity_bytes=graph.static_bytes + 1)
    with pytest.raises(InfeasibleError, match="even with full recomputation"):
        uniform_recomputation("none", layout, none, schedule)


def test_equally_fast_settings_recompute_as_little_as_possible(setting, typical):
    layout = our_layout(setting, typical)
    graph = graph_of(setting, layout, typical[0], "ties", setting.levels)
    order = optimus_coarse(graph)
    levels = range(len(graph.candidates[0]))
    plain, *others = (result.timed("ties", layout, graph, order, np.full(graph.num_pairs, level)) for level in levels)
    barely = [replace(one, after_s=plain.iteration_s - one.iteration_s - 1e-7) for one in others]
    assert all(one.iteration_s < plain.iteration_s for one in barely)
    assert fastest("ties", [*barely, plain]) is plain
    faster = replace(barely[-1], after_s=barely[-1].after_s - 0.01 * plain.iteration_s)
    assert fastest("ties", [*barely, plain, faster]) is faster


def test_assignment_evens_out_the_replicas(setting):
    groups = draw_iteration(setting, 16, 5)
    assigned = assign_microbatches(setting, groups, 4)
    assert sorted(s.id for replica in assigned for g in replica for s in g) == sorted(s.id for g in groups for s in g)
    in_turn = [groups[r::4] for r in range(4)]
    assert max(model_flops(setting, r) for r in assigned) <= 1.02 * max(model_flops(setting, r) for r in in_turn)


def test_stages_of_nnscaler_share_the_layers_that_are_whole_under_zero3() -> None:
    setting = vlm_on_h800(Degrees(pipeline=2, data=8, zero=3), vision=4, lm=6)
    microbatches = draw_iteration(setting, 4, 100)
    chain = mean_chain(setting, [microbatches])
    plain = chain_of_stages(setting.model, setting.num_ranks, 1, by_parameters(setting, [microbatches]))
    need = most_workspace_bytes(setting.levels, plain, pack_microbatches(setting, plain, microbatches))
    every = [Chunk(module, (i, i), 0) for module, i in chain.layers]
    together = setting.levels.static_bytes_together(every)
    alone = sum(setting.levels.static_bytes(chunk) for chunk in every)
    whole = together - chain.static_bytes.sum()
    assert chain.static_bytes.sum() < together < alone / 2
    assert chain.workspace_bytes == need + whole
    assert whole > together / 4
