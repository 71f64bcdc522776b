"""Schedules of `torch.distributed.pipelining` that are planned for every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.integrations.pipelining.schedule import PlannedSchedule
    from pipeloom.integrations.steps.planning import Planning

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = ["PlannedSchedule", "Planning"]
