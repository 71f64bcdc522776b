"""TcpPlanStore: the planner's key-value protocol over `torch.distributed.TCPStore` (which its stubs leave out)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipeloom.errors import InputError, PlannerError

# Every call is answered at once or the store is gone; this bounds how long a gone store can hold us up.
_TIMEOUT = timedelta(seconds=30)


class TcpPlanStore:
    """Keys and values in the memory of the process that hosts them.

    It is hosted by the training side, so that the planner may die and come back without taking them along.

    Attributes
    ----------
    address : str
        ``host:port`` by which another process reaches it.
    """

    def __init__(self, store: Any, address: str) -> None:
        self._store = store
        self.address = address

    @classmethod
    def host(cls, host: str = "127.0.0.1") -> TcpPlanStore:
        """Host a store at a free port of this machine."""
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
        return cls(store, f"{host}:{store.port}")

    @classmethod
    def connect(cls, address: str) -> TcpPlanStore:
        """Reach the store that another process hosts.

        Raises
        ------
        InputError
            When the address is not ``host:port``.
        PlannerError
            When nothing answers there.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(
                "store", f"{address!r} is not host:port", "give the address that the trainer printed"
            )
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PlannerError(f"no plan store answers at {address}: {error}") from error
        return cls(store, address)

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        with self._reached():
            self._store.set(key, value)

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key and leave it; None at once where there is none."""
        with self._reached():
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def take(self, key: str) -> bytes | None:
        """Return and remove the value of a key; None at once where there is none. One taker a key."""
        value = self.peek(key)
        if value is not None:
            with self._reached():
                self._store.delete_key(key)
        return value

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all that torch raises for a store that is gone or silent
            reason = str(error).partition("\n")[0]
            raise PlannerError(f"the plan store at {self.address} is gone or silent: {reason}") from error
