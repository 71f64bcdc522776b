"""Clusters in a few words."""

from __future__ import annotations

import pytest

from pipeloom.errors import InputError
from pipeloom.spec.catalog import load_cluster, names


@pytest.mark.parametrize("device", names("devices"))
def test_every_device_of_the_zoo_makes_a_cluster(device: str) -> None:
    cluster = load_cluster(f"16x{device.upper()}")
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.device.basis == "datasheet"
    each = {"a100-40gb": 125, "gh200": 480}.get(device, 250)
    assert cluster.host_memory_bytes == 8 * each * 1_000_000_000
    assert "assumed" in cluster.source


@pytest.mark.parametrize("device", names("devices"))
def test_no_network_is_faster_than_the_bus_that_it_is_on(device: str) -> None:
    cluster = load_cluster(f"2x8x{device}")
    assert cluster.nic_bytes_per_s <= cluster.device.pcie_bytes_per_s


def test_words() -> None:
    cluster = load_cluster("2x8xB200 ib800 ram1000")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.name) == (2, 8, "2x8xB200 ib800 ram1000")
    assert cluster.device.name.startswith("B200")
    assert cluster.nic_bytes_per_s == 100e9
    assert cluster.host_memory_bytes == 1_000_000_000_000
    assert "assumed" not in cluster.source
    assert load_cluster("64xH200").num_nodes == 8
    assert load_cluster("6xL40S").devices_per_node == 6
    assert load_cluster("3x4xA100").num_devices == 12
    assert load_cluster("16xA100").nic_bytes_per_s == 25e9
    assert load_cluster("2x8xB300").nic_bytes_per_s == 100e9
    # The same as the zoo's own, but for what it is called.
    assert load_cluster("64xH100").nic_bytes_per_s == load_cluster("h100-64").nic_bytes_per_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH1000", r"device 'h1000' is unknown; known are .*b200"),
        ("4x4090", r"device '4090' is unknown; known are .*h100"),
        ("2x8x5090 ib400", r"device '5090' is unknown; known are .*h100"),
        ("12xH100", r"12 devices do not fill hosts of 8; give the number of hosts, as in 3x4xH100"),
        ("8H100", r"'8H100' is not a number of devices; write 8xH100"),
        ("0xH100", r"0 is below 1"),
        ("8xH100 nvlink", r"'nvlink' is not a network or memory size"),
        ("8xH100 ib0", r"'ib0' is not a network or memory size"),
        ("99999999999999999999xH100", r"is not a number of devices"),
    ],
)
def test_what_is_no_cluster_is_named(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        load_cluster(text)
    assert text in str(refused.value)
