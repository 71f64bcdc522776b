"""Measured iterations move the sustained share of a device."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pipeloom.calibration import Evidence, blend
from pipeloom.calibration.iterations import _expressed
from pipeloom.errors import InputError
from pipeloom.spec.catalog import load_cluster, load_device
from pipeloom.validation import predict, published_runs
from pipeloom.validation.express import express
from pipeloom.validation.runs import PublishedRun
from pipeloom.validation.unstated import complete

H100 = load_device("h100")


def runs_of(device: str, count: int) -> list[PublishedRun]:
    found = [run for run in published_runs() if run.device == device and run.source == "dgxc" and run.kind == "dense"]
    return found[:: max(1, len(found) // count)][:count]


def timed(table, count: int, seed: int = 0) -> Evidence:
    """Return evidence of iterations with the times of a table, with noise of 2 %."""
    rng, evidence = np.random.default_rng(seed), Evidence(H100)
    for run in runs_of("H100", count):
        seconds = predict(run, table=table).seconds * float(np.exp(rng.normal(0, 0.02)))
        evidence.runs.append(("mine.csv", replace(run, iteration_s=seconds, tokens_s_gpu=None)))
    return evidence


def test_iterations_of_a_slower_machine_lower_its_sustained_share():
    generation = msgspec.structs.replace(H100.generation, sustained=0.65)
    truth = msgspec.structs.replace(H100, generation=generation)
    blended = blend(H100, timed(truth, 9))
    assert 0.62 < blended.device.sustained < 0.73
    assert np.median(blended.blended_errors) < 0.6 * np.median(blended.base_errors)
    (row,) = blended.rows
    assert (row.num_observations, row.num_held) == (9, 3)
    (one,) = blend(H100, timed(truth, 1)).rows
    assert row.blended < one.blended < H100.sustained


def test_iterations_that_agree_keep_it():
    assert blend(H100, timed(H100, 6)).device.sustained == pytest.approx(H100.sustained, rel=0.03)


@pytest.mark.parametrize("count", [3, 4])
def test_equal_iterations_are_held_out_one_by_one(count):
    evidence = timed(H100, 1)
    evidence.runs *= count
    (row,) = blend(H100, evidence).rows
    assert (row.num_observations, row.num_held) == (count, 1)


def test_iterations_on_a_slow_network_are_predicted_on_the_cluster_of_the_evidence():
    slow = load_cluster("2x4xh100 ib25")
    evidence, assumed = Evidence(H100, cluster=slow), Evidence(H100)
    run = next(one for one in runs_of("H100", 99) if (one.gpus or 0) >= 16)
    known = complete(run).run
    expressed = express(known)
    nodes = {"devices_per_node": 4, "num_nodes": known.gpus // 4}
    network = {"nic_bytes_per_s": slow.nic_bytes_per_s, "nic_latency_s": slow.nic_latency_s}
    own = msgspec.structs.replace(expressed.cluster, **nodes, **network)
    measured = replace(run, iteration_s=replace(expressed, cluster=own).predict()[0], tokens_s_gpu=None)
    assert measured.iteration_s > 1.05 * expressed.predict()[0]
    for each in (evidence, assumed):
        each.runs = [("mine.csv", measured)] * 2
        assert each.uses_network
    assert blend(H100, evidence).device.sustained == pytest.approx(H100.sustained, rel=1e-3)
    assert blend(H100, assumed).device.sustained < 0.99 * H100.sustained


def test_a_stated_size_of_nodes_wins_over_that_of_the_cluster():
    evidence = Evidence(H100, cluster=load_cluster("2x4xh100 ib25"))
    run = replace(next(one for one in runs_of("H100", 99) if (one.gpus or 0) >= 16), per_node=8)
    assert _expressed(run, evidence).cluster.devices_per_node == 8


def test_racks_are_whole_without_a_cluster():
    run, base = replace(runs_of("H100", 1)[0], per_node=4), load_device("gb200")
    assert Evidence(base).devices_per_node(run) == 72
    assert Evidence(base, cluster=load_cluster("16x4xgb200")).devices_per_node(run) == 4
    assert Evidence(H100).devices_per_node(run) == 4


def test_iterations_between_nodes_of_a_device_that_the_zoo_lacks_need_a_cluster():
    base, cluster = msgspec.structs.replace(H100, name="Own"), load_cluster("2x8xh100 ib25")
    run = next(one for one in runs_of("H100", 99) if (one.gpus or 0) == 16)
    evidence = Evidence(base, runs=[("mine.csv", replace(run, device=""))])
    with pytest.raises(InputError, match="1 x run between nodes, of a device whose network the zoo lacks; give --clus"):
        blend(base, evidence)
    for known in (Evidence(base, cluster=cluster, runs=evidence.runs), Evidence(base, per_node=16, runs=evidence.runs)):
        assert blend(base, known).rows[0].num_observations == 1


def test_runs_that_cannot_be_used_are_counted():
    evidence = timed(H100, 2)
    good = evidence.runs[0][1]
    for change in (
        {"device": "A100-80"},
        {"layers": None, "model": ""},
        {"iteration_s": good.measured_s * 60},
        {"faults": ("layers: 'x' is not a number",)},
    ):
        evidence.runs.append(("mine.csv", replace(good, **change)))
    assert blend(H100, evidence).rows[0].num_observations == 2
    found = [reason for _, reason in evidence.unusable]
    assert any("another device (A100-80)" in reason for reason in found)
    assert any("more than 4 times off" in reason for reason in found)
    assert len(found) == 4
    evidence.runs = evidence.runs[2:]
    with pytest.raises(InputError, match="has nothing usable"):
        blend(H100, evidence)


def test_a_table_of_another_device_does_not_count():
    run = runs_of("H100", 1)[0]
    assert predict(run, table=load_device("b200")).seconds == predict(run).seconds
    slower = msgspec.structs.replace(H100, flops_per_s=H100.flops_per_s / 2, fp8_flops_per_s=0.0)
    assert predict(run, table=slower).seconds > 1.3 * predict(run).seconds
