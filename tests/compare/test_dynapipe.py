"""DynaPipe's microbatches against all cuts there are, its schedule against 1F1B, and both on a case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pipeloom.compare.baseline import by_time
from pipeloom.compare.baselines.dynapipe import RECOMPUTED, dynapipe, stage_loads
from pipeloom.compare.baselines.dynapipe_batches import StageLoads, dynamic_microbatches, memory_aware_1f1b
from pipeloom.compare.baselines.megatron import megatron_1f1b
from pipeloom.compare.model_on_cluster import draw_iteration, graph_of
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import chain_of_stages
from pipeloom.search import Budget, one_f_one_b
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import check, simulate
from tests.compare.cases import vlm_on_h800


def _cost(loads: StageLoads, cuts: tuple[tuple[int, int], ...]) -> float:
    times = [(loads.fixed_s + loads.seconds[:, a:b].sum(axis=1)).max() for a, b in cuts]
    return (len(loads.fixed_s) - 1) * max(times) + sum(times)


def _every_cut(count: int):
    for inner in itertools.product((False, True), repeat=count - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(inner) if cut), count]
        yield tuple(itertools.pairwise(ends))


@pytest.mark.parametrize("seed", range(8))
def test_microbatches_are_nearly_the_best_of_all_cuts(seed):
    """Longest times are tried on a grid, so a cut may be missed that is better by less than the grid's step."""
    random = np.random.default_rng(seed)
    held = random.uniform(1, 3, (3, 9))
    loads = StageLoads(random.uniform(0.1, 1, (3, 9)), random.uniform(0, 0.5, 3), held, np.full(3, 8.0))
    fitting = [c for c in _every_cut(9) if all((held[:, a:b].sum(axis=1) <= 8.0).all() for a, b in c)]
    found = dynamic_microbatches(loads)
    assert found in fitting
    assert _cost(loads, found) <= 1.03 * min(_cost(loads, cuts) for cuts in fitting)


def test_what_a_microbatch_costs_in_itself_makes_them_larger():
    def number(fixed: float) -> int:
        return len(
            dynamic_microbatches(StageLoads(np.ones((4, 32)), np.full(4, fixed), np.ones((4, 32)), np.full(4, 99)))
        )

    assert number(0.0) == 32
    assert number(0.0) > number(1.0) > number(30.0) >= 1
    with pytest.raises(InfeasibleError, match="sample 0 alone"):
        dynamic_microbatches(StageLoads(np.ones((1, 2)), np.zeros(1), np.ones((1, 2)), np.zeros(1)))


@pytest.fixture(scope="module")
def setting():
    return vlm_on_h800(Degrees(tensor=2, pipeline=4), vision=8, lm=10)


@pytest.fixture(scope="module")
def graph(setting):
    groups = draw_iteration(setting, 8, 0)
    layout = chain_of_stages(setting.model, 4, 1, by_time(setting, [groups]))
    return graph_of(setting, layout, groups, "dynapipe", setting.levels)


def test_its_schedule_is_sound_and_1f1b_where_as_little_is_held(graph):
    free = memory_aware_1f1b(graph, range(8))
    assert check(graph, free, simulate(graph, free)) == ()
    last = free.order[3].tolist()
    assert last == one_f_one_b(graph).order[3].tolist()


def test_forwards_wait_for_memory(graph):
    free = memory_aware_1f1b(graph, range(8))
    peak = simulate(graph, free).peak_bytes - graph.static_bytes
    # The first ranks hold several microbatches, the last hold one.
    room = (np.array([0.7, 0.8, 1.0, 1.0]) * peak).astype(np.int64)
    tight = memory_aware_1f1b(graph, range(8), room)
    timeline = simulate(graph, tight)
    assert check(graph, tight, timeline) == ()
    assert (timeline.peak_bytes - graph.static_bytes <= room).all()
    with pytest.raises(InfeasibleError, match="does not fit even alone"):
        memory_aware_1f1b(graph, range(8), np.zeros(4, np.int64))


def test_microbatches_go_in_as_requested(graph):
    order = memory_aware_1f1b(graph, [3, 1, 0, 2, 7, 6, 5, 4])
    timeline = simulate(graph, order)
    assert check(graph, order, timeline) == ()
    assert list(dict.fromkeys(graph.microbatch[order.order[3]].tolist())) == [3, 1, 0, 2, 7, 6, 5, 4]


def test_it_takes_one_stage_on_a_rank(setting):
    groups = draw_iteration(setting, 4, 0)
    layout = chain_of_stages(setting.model, 4, 2, by_time(setting, [groups]))
    with pytest.raises(InputError, match="several stages"):
        memory_aware_1f1b(graph_of(setting, layout, groups, "two", setting.levels), range(4))


def test_it_is_sound_and_no_slower_than_1f1b(setting):
    typical, groups = [draw_iteration(setting, 6, 100)], draw_iteration(setting, 6, 0)
    found = dynapipe(setting, typical).run(groups, Budget(evaluations=1), 0)
    assert check(found.graph, found.schedule, found.timeline) == ()
    assert (found.timeline.peak_bytes <= found.graph.capacity_bytes).all()
    plain = megatron_1f1b(setting, typical, "time").run(groups, Budget(evaluations=1), 0)
    assert found.iteration_s < plain.iteration_s
    with pytest.raises(InfeasibleError):
        dynapipe(replace(setting, capacity_bytes=10**9), typical).run(groups, Budget(evaluations=1), 0)


def test_loads_of_samples_add_up_to_what_a_stage_takes(setting):
    groups = draw_iteration(setting, 6, 0)
    samples = [sample for group in groups for sample in group]
    layout = chain_of_stages(setting.model, 4, 1, by_time(setting, [groups]))
    loads = stage_loads(setting, layout, samples, RECOMPUTED[0], 4)
    real = graph_of(setting, layout, groups, "all", setting.levels)
    seconds = np.bincount(real.rank, weights=real.duration_ns, minlength=4) / 1e9
    assert loads.seconds.sum(axis=1) + 6 * loads.fixed_s == pytest.approx(seconds, rel=0.15)
    full = stage_loads(setting, layout, samples, RECOMPUTED[2], 4)
    assert (full.seconds.sum(axis=1) > loads.seconds.sum(axis=1)).all()
    assert (full.size_bytes.sum(axis=1) < loads.size_bytes.sum(axis=1)).all()
