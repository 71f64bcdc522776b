"""Detection of lost ranks on several hosts, at once and by name, and the addresses by which hosts reach each other.

A rank waits for a message as long as the message timeout. An idle connection detects a loss earlier: the operating
system closes it when the process ends for any reason, and probes every other second whether the host is still
reachable. This needs no turn of the interpreter, which compiling can hold for long.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from pipeloom.errors import ExecutionError, PipeloomError
from pipeloom.printing import print_error

_ADDRESS = "watch"
_SECRET_BYTES, _MESSAGE_BYTES = 32, 4
# Control messages: the number of a lost rank, the number of a failed rank plus `_FAILED`, or the regular end of a rank.
_FAILED, _ENDED = 1 << 31, (1 << 32) - 1
# Seconds of silence, seconds between probes, and unanswered probes until a host counts as lost.
_QUIET_S, _ASK_S, _MOST_ASKED = 2, 2, 3
_JOIN_S = 120.0
# Largest number of connections that have not yet identified themselves.
_MAX_UNIDENTIFIED = 1024
_GRACE_S = 1.0


class FailureDetector:
    """Detects the loss of other ranks of a job.

    Rank 0 has a connection to every other rank and reports a lost rank to all others. Then every rank exits.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._connections: dict[int, socket.socket] = {}
        self._ends = False
        self._lost = threading.Event()

    @property
    def others(self) -> Collection[int]:
        """Ranks at the other ends of the connections."""
        return self._connections.keys()

    def add(self, rank: int, connection: socket.socket) -> None:
        """Watch the rank at the other end of a connection."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", _QUIET_S), ("TCP_KEEPINTVL", _ASK_S), ("TCP_KEEPCNT", _MOST_ASKED)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(None)
        self._connections[rank] = connection

    def start(self) -> None:
        """Start watching."""
        if self._connections:
            threading.Thread(target=self._run, name="failure detector", daemon=True).start()

    def end(self) -> None:
        """End regularly. From now on this rank neither reports others nor is reported."""
        self._ends = True
        self._send(_ENDED)

    def fail(self, error: PipeloomError) -> str:
        """Return this rank's message for an error. Empty if another rank caused it, which has been reported.

        The other ranks then exit without a message about this rank.
        """
        if isinstance(error, ExecutionError) and self._connections and self._lost.wait(_GRACE_S):
            return ""
        self._ends = True
        self._send(_FAILED + self.rank)
        return str(error)

    def _send(self, message: int, but: int = -1) -> None:
        for rank, connection in self._connections.items():
            if rank != but:
                # A lost rank needs no message.
                with suppress(OSError):
                    connection.sendall(message.to_bytes(_MESSAGE_BYTES, "big"))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    data = _read(key.fileobj, _MESSAGE_BYTES)
                    message = int.from_bytes(data, "big") if len(data) == _MESSAGE_BYTES else key.data
                    if message == _ENDED:
                        selector.unregister(key.fileobj)
                    else:
                        self._handle_loss(message, key.data)
                        return

    def _handle_loss(self, message: int, source: int) -> None:
        if self._ends:
            return
        # A failed rank prints its own error. A lost rank is reported once by rank 0, or by all if rank 0 is lost.
        if message < _FAILED and (self.rank == 0 or message == 0):
            problem = "is lost: its process or its host has ended, or cannot be reached"
            print_error(f"rank {message} {problem}")
        if self.rank == 0:
            self._send(message, but=source)
        self._lost.set()
        # The main thread may notice too and exit with a better message.
        threading.Timer(2 * _GRACE_S, self._exit).start()

    def _exit(self) -> None:
        if not self._ends:
            os._exit(2)


def detect_failures(store: Any, rank: int, size: int) -> FailureDetector:
    """Start to watch the other ranks. All ranks call it together, with a store that only they can reach.

    Raises `ExecutionError` if rank 0 cannot be reached.
    """
    detector = FailureDetector(rank)
    if size == 1:
        return detector
    if rank == 0:
        secret = secrets.token_bytes(_SECRET_BYTES)
        family, own = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        with socket.create_server((own, 0), family=family, backlog=size) as listening:
            host, port = listening.getsockname()[:2]
            store.set(_ADDRESS, f"{host} {port} {secret.hex()}")
            for rank_there, connection in _arrivals(listening, secret):
                if 0 < rank_there < size:
                    detector.add(rank_there, connection)
                if len(detector.others) == size - 1:
                    break
            else:
                missing = sorted(set(range(1, size)) - set(detector.others))
                raise ExecutionError(f"rank 0: ranks {missing} did not reach this host within {_JOIN_S:g} s")
    else:
        host, port, secret_text = store.get(_ADDRESS).decode().split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=_JOIN_S)
            connection.sendall(bytes.fromhex(secret_text) + rank.to_bytes(_MESSAGE_BYTES, "big"))
        except OSError as error:
            raise ExecutionError(f"rank {rank}: rank 0 does not answer at {host}:{port}: {error}") from error
        detector.add(0, connection)
    detector.start()
    return detector


def _arrivals(listening: socket.socket, secret: bytes) -> Iterator[tuple[int, socket.socket]]:
    """Yield ranks that connect and prove that they know the secret, until the time is over.

    A connection without the secret is rejected. It cannot block others by sending slowly or not at all.
    """
    pending: dict[socket.socket, bytes] = {}
    deadline = time.monotonic() + _JOIN_S
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is listening:
                        connection = _accepted(listening)
                        if connection is None:
                            continue
                        if len(pending) >= _MAX_UNIDENTIFIED:
                            oldest = next(iter(pending))
                            selector.unregister(oldest)
                            del pending[oldest]
                            oldest.close()
                        pending[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]
                    if connection not in pending:
                        continue
                    piece = _piece(connection, _SECRET_BYTES + _MESSAGE_BYTES - len(pending[connection]))
                    received = pending[connection] = pending[connection] + piece
                    if piece and len(received) < _SECRET_BYTES + _MESSAGE_BYTES:
                        continue
                    selector.unregister(connection)
                    del pending[connection]
                    if piece and hmac.compare_digest(received[:_SECRET_BYTES], secret):
                        yield int.from_bytes(received[_SECRET_BYTES:], "big"), connection
                    else:
                        connection.close()
        finally:
            for connection in pending:
                connection.close()


def _accepted(listening: socket.socket) -> socket.socket | None:
    """Return a new connection, or None if the other end has closed it again."""
    try:
        connection, _ = listening.accept()
    except OSError:
        return None
    connection.setblocking(False)
    return connection


def _piece(connection: socket.socket, most: int) -> bytes:
    """Return the received bytes, or none if the connection has ended."""
    try:
        return connection.recv(most)
    except OSError:  # that nobody answered for too long is a TimeoutError
        return b""


def _read(connection: Any, size: int) -> bytes:
    """Read a number of bytes, or fewer if the connection ends."""
    data = b""
    while len(data) < size and (piece := _piece(connection, size - len(data))):
        data += piece
    return data


_SIOCGIFADDR = 0x8915


def address_towards(other: str) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the address by which another host, or this one, reaches this host.

    Raises `OSError` if there is no route to the other host.
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
