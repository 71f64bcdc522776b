"""Read clusters in short notation: ``8xH100``, ``64xH200``, ``2x8xB200 ib400 ram1000``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeloom.errors import InputError, check_count
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec

HOST = 8
"""Default number of devices per host."""
NETWORK_GBIT = 400.0
NETWORK_GBIT_OF = {"a100": 200.0, "a100-40gb": 200.0, "a800": 200.0, "b300": 800.0, "gb300": 800.0, "l40s": 200.0}
"""Default network of each device in Gbit/s, as in the vendor's hosts: 200 in a DGX A100, 400 in a DGX H100 and B200,
800 in a DGX B300 and GB300 NVL72. The PCIe link of an L40S carries 256."""
RAM_GB, RAM_GB_OF = 250.0, {"a100-40gb": 125.0, "gh200": 480.0}
"""Default host memory per device: 2 TB in a DGX A100 640GB, H100, H200 or B200, 1 TB in a DGX A100 320GB; the GH200's
own."""
MEMORY_BYTES_PER_S = 75e9
MEMORY_BYTES_PER_S_OF = {**dict.fromkeys(("a100", "a100-40gb", "a800"), 50e9), "gh200": 500e9}
"""Bandwidth of host memory per device: two sockets of eight channels, DDR5-4800 in a DGX H100 and later, DDR4-3200 in a
DGX A100; the GH200's own."""
FORM = "write 8xH100, or hosts x devices 2x8xB200, and after it ib400 (Gbit/s a device) or ram1000 (GB a host)"

_COUNTS = re.compile(r"(?:(\d{1,6})x)?(\d{1,7})x([a-z\d][\w.-]*)", re.IGNORECASE)
_WORD = re.compile(r"(ib|roce|eth|ram)(\d{1,6}(?:\.\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class PlainCluster:
    """A cluster in short notation."""

    num_nodes: int
    devices_per_node: int
    device: str
    network_gbit: float | None = None
    """Network of each device and direction; None: not declared."""
    ram_gb: float | None = None
    """Memory of each host; None: not declared."""

    def cluster(self, name: str, device: DeviceSpec) -> ClusterSpec:
        """Return the cluster of a device, with what is assumed in its source."""
        gbit = self.network_gbit or NETWORK_GBIT_OF.get(self.device, NETWORK_GBIT)
        ram_gb = self.ram_gb or RAM_GB_OF.get(self.device, RAM_GB) * self.devices_per_node
        assumed = []
        if self.network_gbit is None and self.num_nodes > 1:
            assumed.append(f"{gbit:g} Gbit/s of network a device")
        if self.ram_gb is None:
            assumed.append(f"{ram_gb:g} GB of memory a host")
        return ClusterSpec(
            name=name,
            source="short notation" + (f"; assumed: {', '.join(assumed)}" if assumed else ""),
            device=device,
            devices_per_node=self.devices_per_node,
            num_nodes=self.num_nodes,
            nic_bytes_per_s=gbit * 1e9 / 8,
            host_memory_bytes=int(ram_gb * 1e9),
            host_bytes_per_s=MEMORY_BYTES_PER_S_OF.get(self.device, MEMORY_BYTES_PER_S) * self.devices_per_node,
        )


def is_plain(name: str) -> bool:
    """Return whether a cluster is in short notation, rather than a name or file."""
    return re.match(r"\s*\d", name) is not None and not name.endswith(".toml")


def read_plain(text: str) -> PlainCluster:
    """Read a cluster in short notation.

    Raise `InputError` if the text does not have this form, or more devices than a host has do not fill whole hosts.
    """
    entity = f"cluster {text!r}"
    first, *words = text.split() or [""]
    found = _COUNTS.fullmatch(first)
    if found is None:
        raise InputError(entity, f"{first!r} is not a number of devices", FORM)
    sizes: dict[str, float] = {}
    for word in words:
        one = _WORD.fullmatch(word)
        if one is None or float(one[2]) <= 0:
            raise InputError(entity, f"{word!r} is not a network or memory size", FORM)
        sizes["ram" if one[1].lower() == "ram" else "network"] = float(one[2])
    count = int(found[2])
    hosts = int(found[1] or max(1, count // HOST))
    for number in (hosts, count):
        check_count(entity, number)
    if found[1] is None and count > HOST:
        if count % HOST:
            raise InputError(
                entity,
                f"{count} devices do not fill hosts of {HOST}",
                f"give the number of hosts, as in 3x4x{found[3]}",
            )
        count = HOST
    return PlainCluster(hosts, count, found[3].lower(), sizes.get("network"), sizes.get("ram"))
