"""Microbenchmarks run and give a usable device table; how good it is depends on the machine, so not here."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pipeloom.errors import InputError  # noqa: E402
from pipeloom.runtime.measure.microbench import Bench, calibrate  # noqa: E402
from pipeloom.spec.catalog import device_toml, load_device  # noqa: E402


# Of every change: the command, in `tests/cli/test_emulate.py`.
@pytest.mark.full
@pytest.mark.ranks
def test_calibration_on_the_cpu(tmp_path):
    lines: list[str] = []
    threads = torch.get_num_threads()
    found = calibrate("cpu", name="here", repeats=1, small=True, progress=lines.append)
    assert torch.get_num_threads() == threads
    assert any("all_reduce" in line for line in lines), "links between processes are measured too"
    assert len(lines) == 4
    assert found.device.basis == "measured"
    assert {"matmul", "attention", "causal_attention_backward", "norm", "activation", "add", "*"} <= set(
        found.device.efficiency["compute"]
    )
    rows = (*found.operators, *found.layers)
    assert len(found.layers) == 2
    assert all(row.predicted_s > 0 and row.measured_s > 0 for row in rows)
    path = tmp_path / "cpu.toml"
    path.write_text(device_toml(found.device))
    assert load_device(str(path)).flops_per_s == found.device.flops_per_s


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported():
    with pytest.raises(InputError, match="'cuda' is not available here"):
        Bench("cuda")
