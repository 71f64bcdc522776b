"""Static schedules by name. All commands, baselines and integrations use this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pipeloom.errors import InputError
from pipeloom.search.static_orders import gpipe, interleaved_as_megatron, interleaved_one_f_one_b, one_f_one_b
from pipeloom.search.zero_bubble import zero_bubble_h1
from pipeloom.spec.current_run import RunSchedule
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

Order = Callable[[TaskGraph], Schedule]


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of a trainer in addition to the name of a schedule.

    Attributes
    ----------
    group : int or None
        Number of consecutive microbatches that a stage takes in an interleaved schedule. None: the default.
    as_megatron : bool
        Whether the default group is the smallest that Megatron accepts. Otherwise it is the number of ranks, as in
        PyTorch.
    """

    group: int | None = None
    as_megatron: bool = False


@dataclass(frozen=True)
class NamedSchedule:
    """A static schedule.

    Attributes
    ----------
    orders : callable
        Return the variants of the schedule for a number of ranks and settings. The fastest variant is used.
    pytorch : str
        Name in PyTorch, in lower case. Empty: a torchtitan file with this schedule is an error.
    stages : int
        Default number of stages of each rank.
    splits_backward : bool
        Whether input and weight gradients are separate tasks.
    """

    orders: Callable[[int, ScheduleSettings], list[Order]]
    pytorch: str = ""
    stages: int = 1
    splits_backward: bool = False


def _interleaved(_num_ranks: int, settings: ScheduleSettings) -> list[Order]:
    if settings.group is None and settings.as_megatron:
        return [interleaved_as_megatron]
    return [partial(interleaved_one_f_one_b, group_size=settings.group)]


def _zero_bubble(num_ranks: int, _settings: ScheduleSettings) -> list[Order]:
    # The best lag of weight gradients, in microbatches, depends on the memory.
    return [partial(zero_bubble_h1, most_behind=behind) for behind in range(num_ranks)]


SCHEDULES: dict[RunSchedule, NamedSchedule] = {
    "gpipe": NamedSchedule(lambda _ranks, _settings: [gpipe], "gpipe"),
    "1f1b": NamedSchedule(lambda _ranks, _settings: [one_f_one_b], "1f1b"),
    "interleaved": NamedSchedule(_interleaved, "interleaved1f1b", stages=2),
    "zero_bubble": NamedSchedule(_zero_bubble, splits_backward=True),
}
"""Static schedules by the name used in files and options."""

_NAMES: dict[str, RunSchedule] = {
    word: name for name, schedule in SCHEDULES.items() for word in (name, schedule.pytorch) if word
}


def schedule_name(word: str, entity: str = "schedule") -> RunSchedule:
    """Return the name of a schedule from its name here or in PyTorch. Case does not matter.

    Raises
    ------
    InputError
        No schedule has this name.
    """
    if word.lower() not in _NAMES:
        raise InputError(entity, f"{word!r} is none of {', '.join(_NAMES)}")
    return _NAMES[word.lower()]
