"""Durations of operators by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipeloom.emulator.rules import Device, RuleTable
from pipeloom.errors import InputError
from pipeloom.spec.hardware import EfficiencySpec

GPU = Device("gpu", flops_per_s=1e9, memory_bytes_per_s=1e6)
LINK = Device("link", network_bytes_per_s=1e6, latency_s=1e-6)


def durations(devices, *operators):
    """Picoseconds of operators: kind, device, operations, memory bytes, network bytes, steps."""
    kinds, device, *amounts, steps = zip(*operators, strict=True)
    table = RuleTable(devices, kinds, np.array(device), np.array(steps, float))
    return table.durations_ps(np.array(amounts, float).T).tolist()


def test_latency_is_the_largest_of_the_three_metrics():
    assert durations(
        (GPU, LINK),
        ("matmul", 0, 2e6, 1e3, 0, 0),  # 2 ms of work, 1 ms of memory
        ("norm", 0, 2e6, 5e3, 0, 0),  # memory 5 ms
        ("all_reduce", 1, 0, 0, 3e3, 2),  # 3 ms and two messages
    ) == [2 * 10**9, 5 * 10**9, 3 * 10**9 + 2 * 10**6]


def test_what_has_anything_to_do_takes_its_launch():
    device = Device("gpu", flops_per_s=1e9, memory_bytes_per_s=1e9, launch_s=5e-6)
    operators = [("matmul", 0, flops, 0, 0, 0) for flops in (0.0, 1.0, 5e3, 1e4)]
    assert durations((device,), *operators) == [0, 5 * 10**6, 5 * 10**6, 10**7]


def test_efficiency_depends_on_kind_and_size_and_may_be_overridden():
    device = Device(
        "gpu",
        flops_per_s=1e9,
        memory_bytes_per_s=1e12,
        efficiency={"matmul": EfficiencySpec(flops=((2.0**10 / 1e9, 0.25), (2.0**20 / 1e9, 0.75)))},
        overrides={"special": lambda counts: 1e-3 + counts.flops * 1e-9},
    )
    products = [("matmul", 0, 2.0**exponent, 0, 0, 0) for exponent in (8, 15, 30)]
    ps = durations((device,), *products, ("special", 0, 1e6, 0, 0, 0))
    assert ps[0] == round(2**8 / 1e9 / 0.25 * 1e12)
    assert ps[1] == round(2**15 / 1e9 / 0.5 * 1e12)  # halfway in log2
    assert ps[2] == round(2**30 / 1e9 / 0.75 * 1e12)
    assert ps[3] == 2 * 10**9


def test_network_bytes_on_a_compute_device_are_an_error():
    with pytest.raises(InputError, match=r"operator 0 \(all_reduce\).*network.*'gpu' has none"):
        durations((GPU,), ("all_reduce", 0, 0, 0, 1.0, 0))
    with pytest.raises(InputError, match="both network throughput and compute"):
        Device("both", flops_per_s=1.0, network_bytes_per_s=1.0)
