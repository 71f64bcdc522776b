"""Fitting device tables to measurements made from a known device."""

from __future__ import annotations

import numpy as np
import pytest

from pipeloom.emulator.fit import CalibrationRow, Measurement, compare, fit_device, mean_error, predict
from pipeloom.errors import InputError
from pipeloom.spec.catalog import convert, device_toml
from pipeloom.spec.hardware import DeviceSpec


def measured(kind, size, seconds, **more):
    metric = "flops" if "matmul" in kind or "attention" in kind else "memory_bytes"
    return Measurement(kind, f"{kind} {size}", seconds, **({metric: float(size)} | more))


def products(noise):
    """A device of 1e12 operations a second that reaches x / (x + 1e7) of them."""
    sizes = np.geomspace(1e6, 1e10, 25)
    return [measured("matmul", s, (s + 1e7) / 1e12 * n) for s, n in zip(sizes, noise, strict=True)]


def moves():
    return [measured("norm", s, s / 1e11) for s in (1e5, 1e6, 1e7)]


@pytest.mark.parametrize("seed", range(5))
def test_a_known_device_is_recovered_through_noise(seed):
    noise = np.random.default_rng(seed).uniform(0.98, 1.02, 25)
    noise[7] = 3.0  # one disturbed measurement
    device = fit_device([*products(noise), *moves()], name="x", source="made up", memory_bytes=10**9)
    assert device.basis == "measured"
    between = [measured("matmul", s, (s + 1e7) / 1e12) for s in np.geomspace(3e6, 5e9, 12)]
    rows = compare(device, between)
    assert mean_error(rows) < 0.08
    assert [row.measured_s for row in rows] == [m.seconds for m in between]
    assert predict(device, moves()) == pytest.approx([m.seconds for m in moves()])


def test_products_are_paced_by_operations_alone_and_the_rest_by_bytes():
    device = fit_device([*products(np.ones(25)), *moves()], name="x", source="made up", memory_bytes=10**9)
    plain = measured("matmul", 1e9, 1.0)
    loaded = measured("matmul", 1e9, 1.0, memory_bytes=1e12)
    assert predict(device, [plain]) == predict(device, [loaded])
    unknown = measured("gelu", 1e6, 1.0, flops=1e9)
    assert predict(device, [unknown])[0] == pytest.approx(1e6 / 1e11)


def test_links_are_fitted_too_and_tables_round_trip(tmp_path):
    copies = [
        Measurement("load", str(n), n / 2e10 + 1e-6, network_bytes=float(n), part="pcie") for n in (10**4, 10**6, 10**8)
    ]
    device = fit_device([*products(np.ones(25)), *moves(), *copies], name="x", source="made up", memory_bytes=10**9)
    assert device.pcie_bytes_per_s == pytest.approx(2e10, rel=0.01)
    assert predict(device, copies) == pytest.approx([m.seconds for m in copies], rel=0.01)
    path = tmp_path / "device.toml"
    path.write_text(device_toml(device))
    from pipeloom.spec import catalog

    assert catalog.load_device(str(path)) == convert(catalog.read("devices", str(path)), DeviceSpec, "x")
    assert predict(catalog.load_device(str(path)), copies) == predict(device, copies)


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_of_a_known_link_are_recovered_through_noise(seed):
    rng = np.random.default_rng(seed)
    latency, per_s = 10 ** rng.uniform(-6, -4), 10 ** rng.uniform(9, 11)
    extra = {"send": 1.0, "all_reduce": 1.6, "all_gather": 1.2}

    def message(kind, size, noise=1.0):
        steps = 2 if kind == "all_reduce" else 1
        seconds = (latency * steps + size / per_s) * extra[kind]
        return Measurement(
            kind, f"{kind} {size}", seconds * noise, network_bytes=float(size), part="nvlink", steps=float(steps)
        )

    sizes = [1 << k for k in range(10, 25, 2)]
    messages = [message(kind, size, rng.uniform(0.97, 1.03)) for kind in extra for size in sizes]
    messages[4] = message("send", sizes[4], 5.0)  # one disturbed measurement
    device = fit_device([*products(np.ones(25)), *moves(), *messages], name="x", source="made up", memory_bytes=10**9)
    assert 0.8 * latency < device.nvlink_latency_s < latency + 1024 / per_s
    assert 0.9 * per_s < device.nvlink_bytes_per_s < 1.2 * per_s
    between = [message(kind, 3 << k) for kind in extra for k in range(10, 23)]
    assert mean_error(compare(device, between)) < 0.05
    assert all(abs(row.error) < 0.15 for row in compare(device, between))


def test_too_little_is_reported():
    with pytest.raises(InputError, match="have no matrix product"):
        fit_device(moves(), name="x", source="", memory_bytes=1)
    with pytest.raises(InputError, match="have no operator that moves memory"):
        fit_device(products(np.ones(25)), name="x", source="", memory_bytes=1)
    with pytest.raises(InputError, match=r"measurement 'norm 1'.seconds: 0.0 is not positive"):
        measured("norm", 1, 0.0)
    assert CalibrationRow("a", 1.1, 1.0).error == pytest.approx(0.1)
