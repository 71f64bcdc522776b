"""Blending evidence that a known table makes: it returns that table, as far as the evidence reaches."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pipeloom.calibration import Evidence, blend
from pipeloom.calibration.evidence import AttentionShape
from pipeloom.calibration.model import TableModel
from pipeloom.emulator.fit import predict
from pipeloom.spec.catalog import device_toml, load_cluster, load_device
from pipeloom.spec.hardware import EfficiencySpec, GenerationSpec

H100 = load_device("h100")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")


def sized(rng: np.random.Generator, low: int, high: int) -> int:
    return int(2 ** rng.uniform(low, high)) // 8 * 8


def collect(rng: np.random.Generator, base=H100, count: int = 60, hot: bool = False) -> Evidence:
    """Return evidence of random sizes, whose times do not count yet."""
    evidence = Evidence(base)
    for _ in range(count):
        evidence.product([sized(rng, 8, 14) for _ in "mnk"], 0.5, "bf16", hot=hot)
        length = sized(rng, 9, 14)
        shape = AttentionShape(int(rng.integers(1, 5)), length, length, 32, 8, 128, 128, True)
        evidence.attention(shape, 0.5, "bf16", hot=hot)
        evidence.moved("norm", sized(rng, 22, 30), 0.5, hot=hot)
        name = COLLECTIVES[int(rng.integers(4))]
        evidence.collective(name, sized(rng, 16, 30), 0.5, 8, hot=hot)
    return evidence


def timed(evidence: Evidence, device, rng: np.random.Generator, noise: float = 0.03) -> Evidence:
    """Give observations the times of a device, with noise; those that a benchmark could not show are left out."""
    cool = msgspec.structs.replace(device, generation=GenerationSpec("hopper", flash2=device.generation.flash2))
    kept = []
    for one in evidence.observations:
        (seconds,) = predict(device if one.hot else cool, [one.measurement])
        if seconds > evidence.base.launch_s * 1.2:
            seconds *= float(np.exp(rng.normal(0, noise)))
            kept.append(one._replace(measurement=msgspec.structs.replace(one.measurement, seconds=seconds)))
    evidence.observations = kept
    return evidence


def slower(device, shares: dict[str, float], **more):
    """Return a table with other efficiencies: those of entries that begin with a name, times a share."""

    def times(spec: EfficiencySpec, share: float) -> EfficiencySpec:
        values = {
            metric: points * share if isinstance(points, float) else tuple((x, y * share) for x, y in points)
            for metric in ("flops", "memory", "network")
            if (points := getattr(spec, metric)) != 1.0
        }
        return msgspec.structs.replace(spec, **values)

    tables = {
        part: {
            name: times(spec, next((s for start, s in shares.items() if f"{part}.{name}".startswith(start)), 1.0))
            for name, spec in table.items()
        }
        for part, table in device.efficiency.items()
    }
    return msgspec.structs.replace(device, efficiency=tables, **more)


def times_of(device, evidence: Evidence) -> np.ndarray:
    cool = msgspec.structs.replace(device, generation=GenerationSpec("hopper"))
    return np.array(predict(cool, [one.measurement for one in evidence.observations]))


@pytest.mark.parametrize("seed", range(4))
def test_evidence_of_a_known_table_returns_it(seed):
    rng = np.random.default_rng(seed)
    shares = {name: float(rng.uniform(0.7, 1.1)) for name in ("compute.matmul", "compute.causal_attention", "nvlink.")}
    shares["compute.*"] = float(rng.uniform(0.6, 1.0))
    truth = slower(H100, shares)
    blended = blend(H100, timed(collect(rng), truth, rng))
    fresh = timed(collect(np.random.default_rng(100 + seed)), truth, rng, noise=0.0)
    error = np.abs(times_of(blended.device, fresh) / times_of(truth, fresh) - 1)
    before = np.abs(times_of(H100, fresh) / times_of(truth, fresh) - 1)
    assert np.median(error) < 0.03
    assert np.quantile(error, 0.9) < 0.1
    assert np.median(error) < 0.4 * np.median(before)
    # What the command prints of the held-out measurements says the same.
    assert np.median(blended.blended_errors) < 0.05
    assert np.median(blended.blended_errors) < np.median(blended.base_errors)
    assert blended.device.basis == "blended"
    assert blended.device.name == H100.name
    assert "none of them fitted" in blended.device.error


@pytest.mark.parametrize("seed", range(3))
def test_the_base_table_is_kept_where_evidence_agrees_with_it(seed):
    rng = np.random.default_rng(seed)
    blended = blend(H100, timed(collect(rng), H100, rng))
    fresh = timed(collect(np.random.default_rng(50 + seed)), H100, rng, noise=0.0)
    assert np.abs(times_of(blended.device, fresh) / times_of(H100, fresh) - 1).max() < 0.06


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_few_observations_hardly_move_a_value_and_many_move_it_wholly(share):
    moved = {}
    for count in (1, 3, 10, 100):
        rng = np.random.default_rng(7)
        evidence = Evidence(H100)
        for _ in range(count):
            evidence.product([sized(rng, 11, 13) for _ in "mnk"], 0.5, "bf16")
        truth = slower(H100, {"compute.matmul": share})
        (row,) = blend(H100, timed(evidence, truth, rng)).rows
        moved[count] = (row.blended / row.shipped - 1) / (row.evidence / row.shipped - 1)
        assert row.num_observations == count
    assert moved[1] < 0.15
    assert moved[1] < moved[3] < moved[10] < moved[100]
    assert moved[100] > 0.9


def test_outliers_do_not_bend_the_table():
    rng = np.random.default_rng(3)
    evidence = timed(collect(rng, count=30), H100, rng)
    for i in range(0, len(evidence.observations), 10):
        one = evidence.observations[i]
        longer = msgspec.structs.replace(one.measurement, seconds=one.measurement.seconds * 5)
        evidence.observations[i] = one._replace(measurement=longer)
    blended = blend(H100, evidence)
    fresh = timed(collect(np.random.default_rng(9)), H100, rng, noise=0.0)
    assert np.median(np.abs(times_of(blended.device, fresh) / times_of(H100, fresh) - 1)) < 0.04


def test_kernels_of_training_move_the_sustained_share_only_if_cool_kernels_contradict():
    """Cool kernels pin the efficiencies, so slower kernels in training can only come from power-limited clocks."""
    rng = np.random.default_rng(5)
    generation = msgspec.structs.replace(H100.generation, sustained=0.65)
    truth = msgspec.structs.replace(H100, generation=generation)
    evidence = collect(rng)
    evidence.observations += collect(rng, hot=True).observations
    blended = blend(H100, timed(evidence, truth, rng))
    assert blended.device.sustained == pytest.approx(0.65, rel=0.05)
    assert any("sustained" in row.name for row in blended.rows)


def test_entries_that_are_copies_follow_and_other_widths_get_their_own():
    rng = np.random.default_rng(2)
    truth = slower(H100, {"compute.matmul": 0.8, "compute.causal_attention": 0.8})
    evidence = Evidence(H100)
    for _ in range(40):
        evidence.product([sized(rng, 10, 14) for _ in "mnk"], 0.5, "bf16")
        length = sized(rng, 10, 14)
        evidence.attention(AttentionShape(1, length, length, 32, 32, 96, 96, True), 0.5, "bf16")
    table = blend(H100, timed(evidence, truth, rng)).device.efficiency["compute"]
    assert table["grouped_matmul"] == table["matmul"] != H100.efficiency["compute"]["matmul"]
    assert table["causal_attention@96"] != H100.efficiency["compute"]["causal_attention"]
    assert table["causal_attention@128"] == H100.efficiency["compute"]["causal_attention@128"]
    assert table["matmul@fp8"] == H100.efficiency["compute"]["matmul@fp8"]


@pytest.mark.parametrize("seed", range(3))
def test_predictions_and_slopes_are_those_of_the_emulator(seed):
    rng = np.random.default_rng(seed)
    evidence = collect(rng, count=10)
    evidence.observations += collect(rng, count=10, hot=True).observations
    for hot in (False, True):
        other = Evidence(H100)
        other.product((4096, 4096, 8192), 0.5, "fp8", hot=hot)
        evidence.observations += other.observations
    timed(evidence, H100, rng, noise=0.0)
    model = TableModel(H100, evidence.observations, evidence.devices)
    start = np.zeros(model.num_values)
    seconds, slopes = model.predict(start)
    assert seconds == pytest.approx([one.measurement.seconds for one in evidence.observations], rel=1e-6)
    for place in rng.choice(model.num_values, 12, replace=False):
        other = start.copy()
        other[place] = 1e-6
        numeric = (np.log(model.predict(other)[0]) - np.log(seconds)) / 1e-6
        assert slopes[:, place] == pytest.approx(numeric, abs=1e-4)


def test_a_blended_table_is_read_back(tmp_path):
    rng = np.random.default_rng(1)
    blended = blend(H100, timed(collect(rng, count=5), H100, rng), name="mine").device
    path = tmp_path / "mine.toml"
    path.write_text(device_toml(blended))
    assert load_device(str(path)) == blended
    assert blended.name == "mine"


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("name", ["2x8xH100", "2x8xH100 ib100"])
def test_links_between_nodes_move_the_table_of_the_network(name, share):
    """Times are those of the emulator on the same cluster: its rate, and its latency at every step."""
    rng, cluster = np.random.default_rng(4), load_cluster(name)
    truth = slower(H100, {"nic.": share})
    evidence = Evidence(H100, cluster=cluster if "ib" in name else None)
    for _ in range(40):
        evidence.collective("all_reduce", sized(rng, 16, 30), 0.5, 16, nodes=2)
    network = (cluster.nic_bytes_per_s, cluster.nic_latency_s)
    for i, one in enumerate(evidence.observations):
        (seconds,) = predict(truth, [one.measurement], *network)
        evidence.observations[i] = one._replace(measurement=msgspec.structs.replace(one.measurement, seconds=seconds))
    blended = blend(H100, evidence)
    found = predict(blended.device, [one.measurement for one in evidence.observations], *network)
    assert found == pytest.approx([one.measurement.seconds for one in evidence.observations], rel=0.05)
    assert blended.device.efficiency["nvlink"] == H100.efficiency["nvlink"]


def test_a_declared_cluster_tells_the_devices_of_a_node():
    cluster = load_cluster("4x4xH100")
    assert (Evidence(H100).per_node, Evidence(H100, cluster=cluster).per_node) == (8, 4)
    assert Evidence(H100, 16, cluster).per_node == 16
