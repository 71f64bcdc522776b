"""TcpPlanStore: the planner's key-value protocol over `torch.distributed.TCPStore` (which its stubs leave out)."""

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

# Every call is answered at once or the store is gone; this bounds how long a gone store can hold us up.
_TIMEOUT = timedelta(seconds=30)
_ANSWER_S = 10.0
_MARK_BYTES = 32


class TcpPlanStore:
    """Keys and values in the memory of the process that hosts them.

    It is hosted by the training side, so that the planner may die and come back without taking them along.

    Whoever reaches the port may write into it. So every value carries a mark that only those who know the secret can
    make, of the key and the value; a value without the right mark counts as none. Nor are keys known to others: what
    they are called in the store is such a mark as well, so that nobody overwrites a plan by its number.

    Attributes
    ----------
    address : str
        ``host:port`` by which another process reaches it.
    secret : str
        What the other process must know too.
    """

    def __init__(self, store: Any, address: str, secret: str) -> None:
        self._store = store
        self.address, self.secret = address, secret

    @classmethod
    def host(cls, host: str = "127.0.0.1") -> TcpPlanStore:
        """Host a store at a free port of this address of the machine, with a new secret."""
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        # Asked for a host, torch listens on all addresses; so it is given a socket, which it owns from here on.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listening.detach()
        )
        return cls(store, f"{host}:{port}", secrets.token_hex(32))

    @classmethod
    def connect(cls, address: str, secret: str) -> TcpPlanStore:
        """Reach the store that another process hosts, whose secret is known.

        Raises
        ------
        InputError
            When the address is not ``host:port``.
        PlannerError
            When nothing answers there.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError("store", f"{address!r} is not host:port", "give the address that the trainer printed")
        try:
            # torch tries a closed port for longer than its timeout, and prints where in its code it stands.
            socket.create_connection((host, int(port)), _ANSWER_S).close()
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise PlannerError(f"no plan store answers at {address}: {reason}") from error
        return cls(store, address, secret)

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        with self._reached():
            self._store.set(self.name_of(key), self._mark(key, value) + value)

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key and leave it; None at once where there is none, or not by one of us."""
        name = self.name_of(key)
        with self._reached():
            found = bytes(self._store.get(name)) if self._store.check([name]) else b""
        mark, value = found[:_MARK_BYTES], found[_MARK_BYTES:]
        return value if hmac.compare_digest(mark, self._mark(key, value)) else None

    def take(self, key: str) -> bytes | None:
        """Return and remove the value of a key; None at once where there is none. One taker a key."""
        value = self.peek(key)
        if value is not None:
            with self._reached():
                self._store.delete_key(self.name_of(key))
        return value

    def name_of(self, key: str) -> str:
        """What a key is called in the store."""
        return hmac.digest(self.secret.encode(), b"name\0" + key.encode(), hashlib.sha256).hex()

    def _mark(self, key: str, value: bytes) -> bytes:
        """What only those who know the secret can make; of the key too, so that no value serves under another key."""
        return hmac.digest(self.secret.encode(), key.encode() + b"\0" + value, hashlib.sha256)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all that torch raises for a store that is gone or silent
            reason = str(error).partition("\n")[0]
            raise PlannerError(f"the plan store at {self.address} is gone or silent: {reason}") from error
