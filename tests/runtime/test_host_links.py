"""Timing the links between hosts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeloom.runtime.launch import host_links


def test_a_slow_first_message_does_not_end_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects two ranks when their first message is sent."""
    sent: list[Any] = []

    def send(tensor: Any, peer: int) -> None:
        if not sent:
            time.sleep(1.25 * host_links._PAIR_S)
        sent.append(tensor)

    monkeypatch.setattr(host_links, "dist", SimpleNamespace(send=send, recv=lambda *_: None))
    timed = host_links._exchange(1, leads=True, device=torch.device("cpu"))
    assert tuple(size for size, _ in timed) == host_links.SIZES
