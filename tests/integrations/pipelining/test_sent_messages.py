"""Sent messages of a step that is called from other schedules, without ranks."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import torch

from pipeloom.integrations.steps import running


def test_the_oldest_of_many_sent_messages_is_waited_for():
    rank = SimpleNamespace(queues=SimpleNamespace(device=torch.device("cpu")), leaving=deque())
    waited: list[int] = []
    for number in range(20):
        handle = SimpleNamespace(wait=lambda number=number: waited.append(number))
        message = SimpleNamespace(handle=handle, tensor=torch.empty(1))
        running.StepIteration.sent(cast(Any, rank), cast(Any, message))
        assert message.tensor is None
    assert len(rank.leaving) == running._MOST_LEAVING
    assert waited == list(range(20 - running._MOST_LEAVING))
