"""The plan store: who can reach it, and whose values count."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pipeloom.errors import InputError, PlannerError
from pipeloom.planner.service import STOP, answer_key
from pipeloom.runtime import TcpPlanStore


def foreign(store: TcpPlanStore) -> Any:
    """A connection of somebody who knows the port and not the secret."""
    host, _, port = store.address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=5))


def write(store: TcpPlanStore, stranger: Any, key: str, value: bytes) -> None:
    """Set a key by a name that has become known, and wait until it is: a store answers no write."""
    stranger.set(store.name_of(key), value)
    assert bytes(stranger.get(store.name_of(key))) == value


def test_only_the_host_asked_for_is_listened_on() -> None:
    store = TcpPlanStore.host("127.0.0.1")
    port = int(store.address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    # The whole of 127/8 is this machine: where all addresses are listened on, this one answers too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=1.0).close()


def test_values_pass_between_those_who_know_the_secret() -> None:
    store = TcpPlanStore.host()
    other = TcpPlanStore.connect(store.address, store.secret)
    for value in (b"", b"x", bytes(range(256)) * 50):
        other.put("key", value)
        assert other.peek("key") == value
        assert store.peek("key") == value
        assert store.take("key") == value
        assert store.peek("key") is None


def test_what_a_foreign_process_writes_counts_as_nothing() -> None:
    store = TcpPlanStore.host()
    stranger = foreign(store)
    write(store, stranger, STOP, b"1")
    assert store.peek(STOP) is None
    write(store, stranger, "short", b"")
    assert store.take("short") is None
    # Another secret is no secret.
    guess = TcpPlanStore.connect(store.address, "guess")
    guess.put(STOP, b"1")
    assert guess.peek(STOP) == b"1"
    assert store.peek(STOP) is None
    assert TcpPlanStore.connect(store.address, "").peek(STOP) is None


def test_a_key_has_another_name_under_every_secret() -> None:
    store, other = TcpPlanStore.host(), TcpPlanStore.host()
    assert len({store.name_of(STOP), other.name_of(STOP), store.name_of(answer_key(3)), STOP}) == 4
    store.put(answer_key(3), b"plan")
    stranger = foreign(store)
    stranger.set(answer_key(3), b"nonsense")
    stranger.delete_key(answer_key(3))
    assert store.take(answer_key(3)) == b"plan"


def test_a_value_serves_under_its_own_key_alone() -> None:
    store = TcpPlanStore.host()
    store.put(answer_key(3), b"plan")
    stranger = foreign(store)
    write(store, stranger, answer_key(5), bytes(stranger.get(store.name_of(answer_key(3)))))
    assert store.take(answer_key(5)) is None
    assert store.take(answer_key(3)) == b"plan"
    store.put(answer_key(3), b"plan")
    signed = bytearray(stranger.get(store.name_of(answer_key(3))))
    signed[-1] ^= 1
    write(store, stranger, answer_key(3), bytes(signed))
    assert store.take(answer_key(3)) is None


def test_an_address_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match="'nowhere' is not host:port"):
        TcpPlanStore.connect("nowhere", "")


def test_a_store_that_is_not_there_is_reported_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PlannerError, match=rf"^no plan store answers at 127.0.0.1:{port}: [^\n]*$"):
        TcpPlanStore.connect(f"127.0.0.1:{port}", "")
