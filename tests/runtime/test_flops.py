"""Operations are counted in one iteration and reckoned for all others."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.runtime import ExecutionOptions, Executor, ThreadHub, run_undivided
from pipeloom.runtime.model.flops import known_peak
from tests.runtime.test_streams import BATCH, CUTS, SAMPLES, run_of, skipping


@pytest.mark.parametrize("strategy", ["keep", "recompute", "selective"])
def test_operations_are_three_times_those_of_the_forward_whatever_is_recomputed(strategy: str) -> None:
    model = skipping()
    with FlopCounterMode(display=False) as forward:
        run_undivided(model, BATCH, SAMPLES, backward=False)
    wanted = 3 * forward.get_total_flops()
    assert wanted > 0
    run = run_of(model, CUTS["one chunk"], strategy, False)
    options = ExecutionOptions(count_flops=True)
    executor = Executor(model, run.case.layout, 0, ThreadHub().transport(0), options=options)
    flops = executor.flops
    assert flops is not None
    assert flops.wants(0)
    for _ in range(2):
        executor.run(run.case.plan, run.case.packing, run.documents)
        assert flops.of(run.case.plan.ranks[0], run.case.packing) == pytest.approx(wanted, rel=1e-9)
        assert not flops.wants(0)
    # Another packing of the same samples, reckoned.
    other = run_of(model, CUTS["one chunk"], strategy, False, budget=20)
    assert flops.of(other.case.plan.ranks[0], other.case.packing) == pytest.approx(wanted, rel=1e-9)


def test_the_peak_of_a_processor_is_not_known() -> None:
    assert known_peak(torch.device("cpu"), torch.bfloat16) is None


def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA T4"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        found[name] = known_peak(torch.device("cuda"), torch.bfloat16)
    assert list(found.values()) == [989.4e12, 312e12, None, 989.4e12, None]
    assert known_peak(torch.device("cuda"), torch.float32) is None
