"""Stages and whole iterations of random models: reuse equals no reuse, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.build import Placement, layer_template, module_templates
from pipeloom.emulator.expand import expand
from pipeloom.emulator.kernels import issue
from pipeloom.emulator.pipeline import PipelineModel, split_evenly, work_of
from pipeloom.emulator.schedule import PipelineTask, list_schedule
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.static import static_bytes
from pipeloom.emulator.step import Step
from pipeloom.emulator.subgraph import Composite
from pipeloom.emulator.sweep import fastest_step
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.spec import STRATEGIES, Chunk, Sample, Workload
from pipeloom.spec import architecture as a
from pipeloom.spec.parallelism import Degrees
from tests.emulator.cases import ATTENTION, architectures, machine

workloads = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(lambda n: Workload(tuple(4 * k for k in n)))


@settings(deadline=None, max_examples=40)
@given(architectures(), st.sampled_from([1, 2, 4]), workloads, st.sampled_from(STRATEGIES), st.data())
def test_a_stage_equals_its_operators_written_out(architecture, tensor, work, strategy, data):
    placement = Placement(machine(), Degrees(tensor=tensor))
    module = architecture.modules[-1]
    layers = module_templates(architecture, module, placement)
    each = [data.draw(st.sampled_from([strategy, "keep"])) for _ in layers]
    stage = Stage(runs_of(layers, each))
    for part in stage.parts:
        graph = stage.graph(work, part)
        slow = Composite(graph.num_devices, graph.num_inputs, graph.calls, graph.outputs)
        np.testing.assert_array_equal(graph.matrix, slow.matrix)
        flat = expand(graph)
        assert flat.num_operators >= graph.num_operators  # tensor-parallel peers are operators of their own
        for free, ready in (([0, 0, 0, 0], [0, 0]), ([5_000, 70_000_000, 0, 9], [10**6, 10**6])):
            state = np.zeros(flat.num_devices, np.int64)
            state[:4] = free
            end = issue(flat.device, flat.predecessor_start, flat.predecessor, flat.duration_ps, state, np.array(ready))
            out = [ready[-1 - o] if o < 0 else int(end[o]) for o in flat.outputs]
            reused = (graph.matrix + np.array([*free, *ready])).max(axis=1)
            assert reused.tolist() == [*state[:4].tolist(), *out]


def draw_samples(data, count):
    return [
        [
            Sample(f"{i}.{k}", 4 * data.draw(st.integers(1, 30)), (9,) * (n := data.draw(st.integers(0, 4))), (36,) * n)
            for k in range(data.draw(st.integers(1, 2)))
        ]
        for i in range(count)
    ]


@settings(deadline=None, max_examples=25)
@given(
    architectures(),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from(["keep", "recompute", "offload"]),
    st.data(),
)
def test_an_iteration_equals_its_operators_written_out(architecture, tensor, pipeline, strategy, data):
    placement = Placement(machine(), Degrees(tensor=tensor, pipeline=pipeline))
    samples = draw_samples(data, data.draw(st.integers(1, 4)))
    works = [work_of(architecture, pack, {"vision": 2}) for pack in samples]
    try:
        model = PipelineModel(architecture, placement, works[0])
    except InputError:  # fewer layers than ranks
        return
    step = Step(model, works, strategy, in_flight=data.draw(st.integers(1, 3)))
    result = step.run()
    free = step.session.run()

    def flat_times():
        flat = expand(step.session.as_subgraph())
        state = np.zeros(flat.num_devices, np.int64)
        issue(flat.device, flat.predecessor_start, flat.predecessor, flat.duration_ps, state, np.zeros(1, np.int64))
        return state[: len(free)].tolist()

    assert free.tolist() == flat_times()
    assert round(result.pipeline_s * 1e12) >= max(free.tolist()[0::6])
    # Another microbatch of the same parts in the place of one.
    number = data.draw(st.integers(0, len(works) - 1))
    longer = {name: tuple(Workload((*w.lengths, 8)) for w in parts) for name, parts in works[number].items()}
    step.replace_microbatch(number, longer)
    free = step.session.run()
    assert step.session.num_reused > 0 or number == 0
    assert free.tolist() == flat_times()


def plain_model(num_layers, hidden=32):
    layer = a.ResidualLayer(hidden=hidden, mixers=(ATTENTION, a.MLPMixer(inner=64)), count=num_layers)
    return a.Architecture("plain", "made up", (a.ModuleArchitecture("lm", "sequence", (layer,)),))


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 4), (4, 4), (4, 9)])
def test_equal_stages_make_a_textbook_pipeline(ranks, count):
    """With equal stages and no transfer time an iteration takes (microbatches + ranks - 1) (F + B)."""
    architecture = plain_model(ranks)
    spec = machine(nvlink_latency_s=0.0, nvlink_bytes_per_s=1e30)
    placement = Placement(spec, Degrees(pipeline=ranks))
    work = {"lm": (Workload((64,)),)}
    model = PipelineModel(architecture, placement, work)
    assert model.cuts["lm"] == tuple(range(ranks + 1))
    step = Step(model, [work] * count, "keep", in_flight=ranks)
    result = step.run()
    # The first layer has no input to differentiate, so the middle of the pipeline sets the pace.
    stage = model.stages("keep")["lm"][-1]
    forward, backward = (stage.duration_ps(Workload((64,)), p) for p in "FB")
    first = model.stages("keep")["lm"][0].duration_ps(Workload((64,)), "B")
    assert first <= backward
    full = (count + ranks - 1) * (forward + backward)
    assert full - (backward - first) * count <= round(result.pipeline_s * 1e12) <= full
    assert 0 <= result.bubble < 1
    for rank, split in enumerate(result.ranks):
        busy = sum(int(result.end_ps[i] - result.start_ps[i]) for i, t in enumerate(result.tasks) if t.rank == rank)
        assert split.compute_s * 1e12 == pytest.approx(busy, rel=1e-9)
        assert split.total_s == pytest.approx(
            split.compute_s + split.transfer_s + split.bubble_s - split.overlap_s, abs=1e-12
        )
        curve = step.memory(rank, result.start_ps, result.end_ps)
        assert curve.num_bytes[-1] == model.static_bytes[rank]
        assert model.static_bytes[rank] < curve.peak_bytes <= result.peak_bytes[rank]
    # No more than as many microbatches as ranks are held, and what is held is what the stage keeps.
    held = stage.cost(Workload((64,)), ("F",)).activation_bytes
    assert result.peak_bytes[-1] - model.static_bytes[-1] <= ranks * held + stage.workspace_bytes(Workload((64,)))


@given(st.data())
def test_list_schedules_respect_edges_and_ranks(data):
    ranks, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    tasks: list[PipelineTask] = []
    for microbatch in range(count):
        chain = [*range(ranks), *reversed(range(ranks))]
        for k, rank in enumerate(chain):
            before = [(len(tasks) - 1, data.draw(st.integers(0, 5)))] if k else []
            tasks.append(PipelineTask(rank, microbatch, k >= ranks, data.draw(st.integers(1, 9)), 1, before))
    limit = data.draw(st.integers(1, count))
    order, start = list_schedule(tasks, ranks, limit)
    assert sorted(order) == list(range(len(tasks)))
    end = [s + t.duration_ps for s, t in zip(start, tasks, strict=True)]
    for i, task in enumerate(tasks):
        for source, delay in task.before:
            assert start[i] >= end[source] + delay
            assert order.index(source) < order.index(i)
    for rank in range(ranks):
        spans = sorted((start[i], end[i]) for i, t in enumerate(tasks) if t.rank == rank)
        assert all(b >= e for (_, e), (b, _) in itertools.pairwise(spans))
    for t in start:
        inside = {
            task.microbatch
            for task in tasks
            if min(start[i] for i, u in enumerate(tasks) if u.microbatch == task.microbatch)
            <= t
            < max(end[i] for i, u in enumerate(tasks) if u.microbatch == task.microbatch)
        }
        assert len(inside) <= limit


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_chains_are_split_as_evenly_as_can_be(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    cuts = split_evenly(weights, parts)
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    assert all(x < y for x, y in itertools.pairwise(cuts))

    def best(begin, left):
        if left == 1:
            return sum(weights[begin:])
        return min(max(sum(weights[begin:k]), best(k, left - 1)) for k in range(begin + 1, len(weights) - left + 2))

    assert max(sum(weights[x:y]) for x, y in itertools.pairwise(cuts)) == best(0, parts)


def test_tasks_taken_over_give_the_same_step():
    architecture, work = plain_model(4), {"lm": (Workload((64,)), Workload((40, 12)))}
    model = PipelineModel(architecture, Placement(machine(), Degrees(pipeline=2, tensor=2)), work)
    first = Step(model, [work] * 3, "keep")
    alone, like = Step(model, [work] * 3, "recompute"), Step(model, [work] * 3, "recompute", like=first)
    assert alone.order == like.order
    a, b = alone.run(), like.run()
    assert (a.iteration_s, a.peak_bytes, a.mfu, a.ranks) == (b.iteration_s, b.peak_bytes, b.mfu, b.ranks)
    assert a.iteration_s > first.run().iteration_s


def test_static_memory_by_hand():
    layer = a.ResidualLayer(hidden=32, mixers=(a.MLPMixer(inner=64),))

    def bytes_of(**degrees):
        d = Degrees(**degrees)
        return static_bytes([layer_template(layer, Placement(machine(), d))] * 3, d)

    count = 3 * 32 * 64 + 32
    assert bytes_of(zero=0) == 3 * count * 18
    assert bytes_of(data=4, zero=0) == 3 * count * 18
    assert bytes_of(data=4, zero=1) == 3 * count * (6 + 3)
    assert bytes_of(data=4, zero=3) == round(3 * count * 18 / 4) + 2 * count * 2  # two layers whole at a time
    assert bytes_of(tensor=2) == 3 * (count // 2 + 16) * 18  # the norm is on both


def test_zero_levels_change_time_as_well_as_memory():
    architecture, work = plain_model(4), {"lm": (Workload((64,)),)}
    times, memory = {}, {}
    for zero in (0, 1, 3):
        placement = Placement(machine(), Degrees(data=4, pipeline=2, zero=zero))
        result = Step(PipelineModel(architecture, placement, work), [work] * 2, "keep").run()
        times[zero], memory[zero] = result.iteration_s, max(result.static_bytes)
    assert memory[0] > memory[1] > memory[3]
    assert len(set(times.values())) == 3


@pytest.mark.parametrize("data", [1, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_an_iteration_ends_with_what_the_costs_say_of_its_ranks(data, zero):
    architecture, work = plain_model(5), {"lm": (Workload((64,)),)}
    degrees = Degrees(data=data, pipeline=2, zero=zero)
    model = PipelineModel(architecture, Placement(machine(), degrees), work)
    result = Step(model, [work] * 3, "keep").run()
    costs, cuts = EmulatedCosts(architecture, machine(), degrees, ("keep",)), model.cuts["lm"]
    ends = [
        max(end for task, end in zip(result.tasks, result.end_ps.tolist(), strict=True) if task.rank == rank) / 1e12
        + costs.update_s([Chunk("lm", (cuts[rank], cuts[rank + 1] - 1), rank)])
        for rank in range(2)
    ]
    assert result.iteration_s == pytest.approx(max(ends), rel=1e-9)


def test_what_does_not_fit_is_said_so():
    architecture, work = plain_model(2), {"lm": (Workload((4000,)),)}
    tight = machine(memory_bytes=2_000_000)
    model = PipelineModel(architecture, Placement(tight, Degrees()), work)
    with pytest.raises(InfeasibleError, match=r"needs .* GiB on a device at best, 0.0 GiB are usable; raise tensor"):
        fastest_step(model, [work])
    roomy = PipelineModel(architecture, Placement(machine(), Degrees()), work)
    assert fastest_step(roomy, [work]).strategy == "keep"
    need = Step(roomy, [work], "keep").run().peak_bytes[0]
    squeezed = PipelineModel(architecture, Placement(machine(memory_bytes=need - 1), Degrees()), work)
    chosen = fastest_step(squeezed, [work])
    assert chosen.fits
    assert chosen.strategy != "keep"
    with pytest.raises(InputError, match="has 2 layers for 4 chunks"):
        PipelineModel(architecture, Placement(machine(), Degrees(pipeline=4)), work)
    with pytest.raises(InputError, match="is 16, 'test' has 8 devices"):
        Placement(machine(), Degrees(tensor=4, data=4))
