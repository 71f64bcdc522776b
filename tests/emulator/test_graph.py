"""Operator graphs by hand and against a slow, separate reckoning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.emulator.graph import Amounts, GraphBuilder, emulate_graph
from pipeloom.emulator.rules import Device, Efficiency
from pipeloom.errors import InputError

GPU = Device("gpu", flops_per_s=1e9, memory_bytes_per_s=1e6)
LINK = Device("link", network_bytes_per_s=1e6, latency_s=1e-6)
HBM = Device("hbm", memory_bytes_per_s=1e6, capacity_bytes=10**6)


def test_latency_is_the_largest_of_the_three_metrics():
    builder = GraphBuilder([GPU, LINK])
    builder.operator("a", "matmul", "gpu", Amounts(flops=2e6, memory_bytes=1e3))  # 2 ms of work, 1 ms of memory
    builder.operator("b", "norm", "gpu", Amounts(flops=2e6, memory_bytes=5e3))  # memory 5 ms
    builder.operator("c", "all_reduce", "link", Amounts(network_bytes=3e3, steps=2))  # 3 ms and two messages
    run = emulate_graph(builder.build())
    assert (run.end_ps - run.start_ps).tolist() == [2 * 10**9, 5 * 10**9, 3 * 10**9 + 2 * 10**6]
    assert run.start_ps.tolist() == [0, 2 * 10**9, 0]  # one at a time on the GPU, overlap with the link


def test_what_has_anything_to_do_takes_its_launch():
    builder = GraphBuilder([Device("gpu", flops_per_s=1e9, memory_bytes_per_s=1e9, launch_s=5e-6)])
    for flops in (0.0, 1.0, 5e3, 1e4):
        builder.operator("m", "matmul", "gpu", Amounts(flops=flops))
    run = emulate_graph(builder.build())
    assert (run.end_ps - run.start_ps).tolist() == [0, 5 * 10**6, 5 * 10**6, 10**7]


def test_efficiency_depends_on_kind_and_size_and_may_be_overridden():
    device = Device(
        "gpu",
        flops_per_s=1e9,
        memory_bytes_per_s=1e12,
        efficiency={"matmul": Efficiency(flops=((2.0**10 / 1e9, 0.25), (2.0**20 / 1e9, 0.75)))},
        overrides={"special": lambda counts: 1e-3 + counts.flops * 1e-9},
    )
    builder = GraphBuilder([device])
    for exponent in (8, 15, 30):
        builder.operator("m", "matmul", "gpu", Amounts(flops=2.0**exponent))
    builder.operator("s", "special", "gpu", Amounts(flops=1e6))
    run = emulate_graph(builder.build())
    ps = (run.end_ps - run.start_ps).tolist()
    assert ps[0] == round(2**8 / 1e9 / 0.25 * 1e12)
    assert ps[1] == round(2**15 / 1e9 / 0.5 * 1e12)  # halfway in log2
    assert ps[2] == round(2**30 / 1e9 / 0.75 * 1e12)
    assert ps[3] == 2 * 10**9


def test_network_bytes_on_a_compute_device_are_an_error():
    builder = GraphBuilder([GPU])
    builder.operator("x", "all_reduce", "gpu", Amounts(network_bytes=1.0))
    with pytest.raises(InputError, match=r"operator 0 \(all_reduce\).*network.*'gpu' has none"):
        emulate_graph(builder.build())
    with pytest.raises(InputError, match="both network throughput and compute"):
        Device("both", flops_per_s=1.0, network_bytes_per_s=1.0)


def test_tensor_lifetimes_give_the_memory_curve():
    builder = GraphBuilder([GPU, HBM])
    weight = builder.tensor("w", "hbm", 100, kept=True)
    x = builder.tensor("x", "hbm", 10)
    a = builder.operator("a", "norm", "gpu", Amounts(memory_bytes=1e3), reads=[x])
    y = builder.tensor("y", "hbm", 20, producer=a)
    b = builder.operator("b", "matmul", "gpu", Amounts(flops=2e6), reads=[y, weight])
    builder.tensor("z", "hbm", 40, producer=b, kept=True)
    run = emulate_graph(builder.build())
    curve = run.memory("hbm")
    # x and w from 0; y with a; at 1 ms x goes and z comes; at 3 ms y goes.
    assert curve.time_ps.tolist() == [0, 10**9, 3 * 10**9]
    assert curve.num_bytes.tolist() == [130, 160, 140]
    assert curve.peak_bytes == 160
    assert run.graph.tensor(2).readers == (1,)
    assert run.graph.operator(1).after == (0,)


@st.composite
def graphs(draw):
    builder = GraphBuilder([GPU, LINK, HBM])
    tensors = [builder.tensor("x", "hbm", draw(st.integers(0, 99)))]
    for i in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(tensors), max_size=3, unique=True))
        after = draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        if draw(st.booleans()):
            op = builder.operator(
                f"o{i}", "matmul", "gpu", Amounts(flops=draw(st.integers(0, 99)) * 1e3), reads=reads, after=after
            )
        else:
            op = builder.operator(
                f"o{i}", "send", "link", Amounts(network_bytes=draw(st.integers(0, 99))), reads=reads, after=after
            )
        tensors.append(builder.tensor(f"t{i}", "hbm", draw(st.integers(0, 99)), producer=op, kept=draw(st.booleans())))
    return builder.build()


@given(graphs())
def test_times_and_memory_hold_by_definition(graph):
    run = emulate_graph(graph)
    free: dict[str, int] = {}
    for i in range(graph.num_operators):
        op = graph.operator(i)
        earliest = max([free.get(op.device, 0), *(int(run.end_ps[p]) for p in op.after)])
        assert run.start_ps[i] == earliest
        free[op.device] = int(run.end_ps[i])
    curve = run.memory("hbm")
    for t in {0, *run.start_ps.tolist(), *run.end_ps.tolist()}:
        alive = 0
        for k in range(len(graph.tensor_names)):
            tensor = graph.tensor(k)
            begin = int(run.start_ps[tensor.producer]) if tensor.producer >= 0 else 0
            users = [u for u in (tensor.producer, *tensor.readers) if u >= 0]
            end = max((int(run.end_ps[u]) for u in users), default=0)
            if begin <= t and (tensor.kept or t < end):
                alive += tensor.num_bytes
        level = curve.num_bytes[np.searchsorted(curve.time_ps, t, side="right") - 1] if curve.time_ps[0] <= t else 0
        assert level == alive
