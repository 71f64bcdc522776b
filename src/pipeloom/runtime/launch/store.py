"""TcpPlanStore: the planner's key-value protocol over `torch.distributed.TCPStore`, which torch's stubs leave out."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipeloom.errors import InputError, PlannerError

# Every call is answered at once unless the store is lost. This bounds how long a lost store blocks.
_TIMEOUT = timedelta(seconds=30)
_ANSWER_S = 10.0
_MARK_BYTES = 32


class TcpPlanStore:
    """Keys and values in the memory of the hosting process.

    The training side hosts the store, so that the planner may crash and restart without losing them.

    Any process that reaches the port may write into the store. Every value therefore carries a signature over key and
    value that requires the secret. A value without a valid signature counts as missing. Keys are signed as well, so
    that nobody can overwrite a plan by its number.

    Attributes
    ----------
    address : str
        ``host:port`` by which another process reaches the store.
    secret : str
        Secret that the other process must know.
    """

    def __init__(self, store: Any, address: str, secret: str) -> None:
        self._store = store
        self.address, self.secret = address, secret

    @classmethod
    def host(cls, host: str = "127.0.0.1") -> TcpPlanStore:
        """Host a store at a free port of this address, with a new secret.

        Raises
        ------
        PlannerError
            The system has no socket for it.
        """
        try:
            listening = socket.create_server((host, 0))
            port, own = listening.getsockname()[1], listening.detach()
            # Given a host name, torch listens on all addresses. It therefore gets a socket, which it then owns.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=own
            )
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise PlannerError(f"no plan store can be opened at {host}: {reason}") from error
        return cls(store, f"{host}:{port}", secrets.token_hex(32))

    @classmethod
    def connect(cls, address: str, secret: str) -> TcpPlanStore:
        """Connect to a store that another process hosts.

        Raises
        ------
        InputError
            The address is not ``host:port``.
        PlannerError
            No store answers at the address.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError("store", f"{address!r} is not host:port", "use the address that the trainer printed")
        try:
            # torch retries a closed port for longer than its timeout, and prints a stack trace.
            socket.create_connection((host, int(port)), _ANSWER_S).close()
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise PlannerError(f"no plan store answers at {address}: {reason}") from error
        return cls(store, address, secret)

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        with self._reached():
            self._store.set(self.name_of(key), self._mark(key, value) + value)

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key without removing it, or None at once if it is missing or has no valid signature."""
        name = self.name_of(key)
        with self._reached():
            signed = bytes(self._store.get(name)) if self._store.check([name]) else b""
        mark, value = signed[:_MARK_BYTES], signed[_MARK_BYTES:]
        return value if hmac.compare_digest(mark, self._mark(key, value)) else None

    def take(self, key: str) -> bytes | None:
        """Return and remove the value of a key, or None at once if it is missing. One process takes each key."""
        value = self.peek(key)
        if value is not None:
            with self._reached():
                self._store.delete_key(self.name_of(key))
        return value

    def name_of(self, key: str) -> str:
        """Return the name of a key in the store."""
        return hmac.digest(self.secret.encode(), b"name\0" + key.encode(), hashlib.sha256).hex()

    def _mark(self, key: str, value: bytes) -> bytes:
        """Return the signature of a value. It includes the key, so that no value is valid under another key."""
        return hmac.digest(self.secret.encode(), key.encode() + b"\0" + value, hashlib.sha256)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all that torch raises for a store that is gone or silent
            reason = str(error).partition("\n")[0]
            raise PlannerError(f"the plan store at {self.address} is lost or does not answer: {reason}") from error
