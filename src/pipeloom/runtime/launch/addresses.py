"""Addresses and network interfaces of this host by which other hosts reach it."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def address_towards(other: str) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the address by which another host, or this one, reaches this host.

    Raises
    ------
    OSError
        There is no route to the other host.
    """
    family, _, _, _, target = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # nothing is sent
        return family, probe.getsockname()[0]


def interface_towards(other: str) -> str | None:
    """Return the name of the network interface with that address, or None if it is unknown.

    Supports IPv4 on Linux. By default gloo uses the interface of the host's own name, which is often the loopback
    device.
    """
    try:
        family, own = address_towards(other)
        if family != socket.AF_INET:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == own), None)
    except OSError:
        return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
