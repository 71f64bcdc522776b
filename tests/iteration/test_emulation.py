"""Emulated iterations of random models: their passes are their operators, and the textbook's times come out."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.subgraph import NUM_PORTS
from pipeloom.emulator.tape import NUM_DEVICES
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.iteration import Points, emulate, even_pipeline, fastest_step, pack_microbatches, sweep
from pipeloom.search import gpipe, one_f_one_b
from pipeloom.spec import Chunk, Sample, Workload
from pipeloom.spec import architecture as a
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import BACKWARD, build_graph, with_microbatch
from pipeloom.timeline import check, checkpoint, resume, simulate
from tests.emulator.cases import ATTENTION, architectures, machine
from tests.emulator.expand import expand


def draw_samples(data, count):
    return [
        [
            Sample(f"{i}.{k}", 4 * data.draw(st.integers(1, 30)), (9,) * (n := data.draw(st.integers(0, 4))), (36,) * n)
            for k in range(data.draw(st.integers(1, 2)))
        ]
        for i in range(count)
    ]


def written_out_ns(costs, chunk, workload, part):
    """Time of a pass, operator by operator, on idle devices."""
    flat = expand(costs._chunks.stage(chunk, costs.strategies[0]), workload, part)
    return round(max(flat.run([0] * NUM_DEVICES, [0] * NUM_PORTS)) / 1000)


@settings(deadline=None, max_examples=25)
@given(
    architectures(),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from(["keep", "recompute", "offload"]),
    st.data(),
)
def test_passes_of_an_iteration_equal_their_operators_written_out(architecture, tensor, pipeline, strategy, data):
    microbatches = draw_samples(data, data.draw(st.integers(1, 4)))
    cluster = msgspec.structs.replace(machine(), host_memory_bytes=10**13)
    costs = EmulatedCosts(architecture, cluster, Degrees(tensor=tensor, pipeline=pipeline), (strategy,), split=False)
    try:
        sizes = {module.name: 2 for module in architecture.modules if module.name == "vision"}
        layout = even_pipeline(costs, microbatches, sizes, {})
    except InputError:  # fewer layers than ranks
        return
    step = fastest_step(costs, layout, microbatches)
    assert not check(step.graph, step.schedule)
    np.testing.assert_array_equal(simulate(step.graph, step.schedule).end_ns, step.timeline.end_ns)
    packing = pack_microbatches(costs.model_spec, layout, microbatches)
    modules = [module.name for module in layout.modules]
    for task in range(step.graph.num_tasks):
        label = step.graph.labels[step.graph.pair[task]]
        chunk = layout.chunks[label.chunk]
        parts = packing.microbatches[label.microbatch].parts[modules.index(chunk.module)]
        part = "B" if step.graph.kind[task] == BACKWARD else "F"
        expected = written_out_ns(costs, chunk, parts[label.sub_microbatch].workload, part)
        assert step.timeline.end_ns[task] - step.timeline.start_ns[task] == expected
    # Another microbatch of as many parts in the place of one.
    number = data.draw(st.integers(0, len(microbatches) - 1))
    longer = [msgspec.structs.replace(s, text_tokens=s.text_tokens + 8) for s in microbatches[number]]
    usable = costs.cluster.device.usable_bytes
    graphs = (
        build_graph(layout, pack_microbatches(costs.model_spec, layout, groups), costs, capacity_bytes=usable)
        for groups in ([*microbatches[:number], longer, *microbatches[number + 1 :]], [longer])
    )
    whole, one = (g if g.candidates is None else g.with_candidates([0] * g.num_pairs) for g in graphs)
    whole = replace(whole, capacity_bytes=step.graph.capacity_bytes)
    changed = with_microbatch(step.graph, number, one)
    for name in ("duration_ns", "activation_bytes", "edge_delay_ns", "edge_bytes", "predecessor_delay_ns"):
        np.testing.assert_array_equal(getattr(changed, name), getattr(whole, name))
    resumed = resume(checkpoint(step.graph, step.schedule), changed)
    np.testing.assert_array_equal(resumed.timeline.end_ns, simulate(whole, step.schedule).end_ns)


def plain_model(num_layers, hidden=32):
    layer = a.ResidualLayer(hidden=hidden, mixers=(ATTENTION, a.MLPMixer(inner=64)), count=num_layers)
    return a.Architecture("plain", "made up", (a.ModuleArchitecture("lm", "sequence", (layer,)),))


def plain_step(model, cluster, degrees, tokens=(64,), count=3, strategy="keep"):
    samples = [[Sample(f"{i}.{k}", n) for k, n in enumerate(tokens)] for i in range(count)]
    return emulate(model, cluster, degrees, batch=samples, strategy=strategy)


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 4), (4, 4), (4, 9)])
def test_equal_stages_make_a_textbook_pipeline(ranks, count):
    """With equal stages and no transfer time an iteration takes (microbatches + ranks - 1) (F + B)."""
    spec, degrees = machine(nvlink_latency_s=0.0, nvlink_bytes_per_s=1e30), Degrees(pipeline=ranks)
    result = plain_step(plain_model(ranks), spec, degrees, count=count)
    assert result.layers == tuple({"lm": ((rank, rank),)} for rank in range(ranks))
    # The first layer has no input to differentiate, so the middle of the pipeline sets the pace.
    costs, work = EmulatedCosts(plain_model(ranks), spec, degrees, ("keep",)), Workload((64,))
    (last,), (first,) = (costs.chunk_costs(Chunk("lm", (i, i), 0), work) for i in (ranks - 1, 0))
    assert first.backward_s <= last.backward_s
    full = (count + ranks - 1) * (last.forward_s + last.backward_s)
    assert full - (last.backward_s - first.backward_s) * count - 1e-7 <= result.pipeline_s <= full + 1e-7
    assert 0 <= result.bubble < 1
    assert 1 <= result.in_flight <= min(count, 2 * ranks)
    # No more than twice as many microbatches as ranks are held, and what is held is what the stage keeps.
    held, work_bytes = last.activation_bytes, costs.workspace_bytes(Chunk("lm", (0, 0), 0), work)
    assert result.peak_bytes[-1] - result.static_bytes[-1] <= 2 * ranks * held + work_bytes


def test_zero_levels_change_time_as_well_as_memory():
    times, memory = {}, {}
    for zero in (0, 1, 3):
        result = plain_step(plain_model(16), machine(), Degrees(data=4, pipeline=2, zero=zero), count=2)
        times[zero], memory[zero] = result.iteration_s, max(result.static_bytes)
    assert memory[0] > memory[1] > memory[3]
    assert len(set(times.values())) == 3


@pytest.mark.parametrize("data", [1, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_an_iteration_ends_with_the_last_update(data, zero):
    degrees = Degrees(data=data, pipeline=2, zero=zero)
    result = plain_step(plain_model(5), machine(), degrees)
    costs = EmulatedCosts(plain_model(5), machine(), degrees, ("keep",))
    ends = [
        int(result.timeline.end_ns[result.graph.rank == chunk.rank].max()) / 1e9 + costs.update_s([chunk])
        for chunk in result.layout.chunks
    ]
    assert result.iteration_s == pytest.approx(max(ends), rel=1e-9, abs=2e-9)
    assert result.iteration_s > result.pipeline_s


def test_strategies_that_do_not_fit():
    tight, loose, model = machine(memory_bytes=2_000_000), machine(), plain_model(2)
    with pytest.raises(InfeasibleError, match=r"needs .*iB on a device at best, .* are usable; raise tensor"):
        plain_step(model, tight, Degrees(), (4000,), 1, None)
    anyway = plain_step(model, tight, Degrees(), (4000,), 1)
    assert not anyway.fits
    fitting = plain_step(model, loose, Degrees(), (4000,), 1, None)
    assert fitting.strategy == "keep"
    assert fitting.iteration_s == anyway.iteration_s
    squeezed = machine(memory_bytes=int(fitting.peak_bytes[0]) - 1)
    chosen = plain_step(model, squeezed, Degrees(), (4000,), 1, None)
    assert chosen.fits
    assert chosen.strategy != "keep"
    with pytest.raises(InputError, match="has 2 layers for 4 ranks x 1 segments"):
        plain_step(model, loose, Degrees(pipeline=4))
    with pytest.raises(InputError, match="is 16, 'test' has 8 devices"):
        plain_step(model, loose, Degrees(tensor=4, data=4))


def test_segments_are_chunks_of_a_rank():
    samples = [[Sample(str(i), 64)] for i in range(4)]
    result = emulate(plain_model(4), machine(), Degrees(pipeline=2), batch=samples, strategy="keep", segments={"lm": 2})
    assert result.layers == ({"lm": ((0, 0), (2, 2))}, {"lm": ((1, 1), (3, 3))})
    assert 0 < result.mfu < 1
    assert result.num_tokens == 4 * 64


def test_an_iteration_keeps_the_order_that_it_is_given():
    microbatches = [[Sample(f"{m}", 4096)] for m in range(16)]
    costs = EmulatedCosts("llama2-7b", "dip-h800-64", Degrees(pipeline=4), ("keep", "recompute"), split=False)
    layout = even_pipeline(costs, microbatches, {}, {})
    fixed = fastest_step(costs, layout, microbatches, order=one_f_one_b)
    expected = one_f_one_b(fixed.graph)
    assert [list(tasks) for tasks in fixed.schedule.order] == [list(tasks) for tasks in expected.order]
    assert fastest_step(costs, layout, microbatches).iteration_s <= fixed.iteration_s
    # GPipe holds all microbatches, so it must recompute where 1F1B need not.
    assert fixed.strategy == "keep"
    assert fastest_step(costs, layout, microbatches, order=gpipe).strategy == "recompute"
    with pytest.raises(InfeasibleError, match="usable"):
        fastest_step(costs.with_strategies(("keep",)), layout, microbatches, order=gpipe)


def test_no_more_is_offloaded_than_the_host_holds():
    model, samples, degrees = plain_model(4), [[Sample(str(i), 64)] for i in range(4)], Degrees(pipeline=2)
    free = msgspec.structs.replace(machine(), host_memory_bytes=10**12)
    step = emulate(model, free, degrees, batch=samples, strategy="offload")
    most = int(step.host_bytes.max())
    assert step.fits
    assert most > 0
    assert emulate(model, free, degrees, batch=samples, strategy="keep").host_bytes.max() == 0
    for host, share in ((most, "are usable"), (0, "the cluster does not declare host_memory_bytes")):
        limited = msgspec.structs.replace(machine(), host_memory_bytes=host)
        beyond = emulate(model, limited, degrees, batch=samples, strategy="offload")
        assert not beyond.fits
        assert share in beyond.host_excess
        costs = EmulatedCosts(model, limited, degrees, ("offload",), split=False)
        layout = even_pipeline(costs, samples, {}, {})
        with pytest.raises(InfeasibleError, match=r"offloads .* per device to the host, .*; use another strategy"):
            fastest_step(costs, layout, samples)
        assert fastest_step(costs.with_strategies(("offload", "keep")), layout, samples).strategy == "keep"


@pytest.mark.parametrize("sizes", [{"sub_microbatch": {"vison": 2}}, {"segments": {"llm": 2}}])
def test_sizes_of_unknown_modules_are_refused(sizes):
    (name,) = next(iter(sizes.values()))
    with pytest.raises(InputError, match=f"module {name!r}: is unknown; the model has vision, lm"):
        emulate("vlm-s", "dip-h800-64", Degrees(tensor=8), batch=[[Sample("a", 64)]], **sizes)


def test_a_sweep_refuses_sizes_of_unknown_modules():
    with pytest.raises(InputError, match="module 'vison': is unknown; the model has vision, lm"):
        sweep("vlm-s", "dip-h800-64", points=Points(num_devices=8), sub_microbatch={"vison": 2})
