"""Decide what all ranks run in a step, after each has reported; a failure ends the step on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.integrations.steps.control import ControlChannel, StepMessage, StepReport

Decide = Callable[[Sequence[StepReport]], StepMessage]
"""Returns what all ranks run from their reports, by rank of the group; called on the rank that broadcasts."""


def agree(control: ControlChannel, report: StepReport, failure: Exception | None, decide: Decide) -> StepMessage:
    """Return what all ranks will run. All ranks of the channel call it together.

    ``failure`` is why this rank cannot take part, as in its report. It is raised once the other ranks know it, which
    raise `ExecutionError`.
    """
    reports = control.gather(report)
    if failure is None:
        return control.broadcast(_decided(control, reports, decide) if control.broadcasts else None)
    if control.broadcasts:
        control.broadcast(_failed(control, failure))
    else:
        # This rank reports its own failure, whatever the message says.
        with suppress(ExecutionError):
            control.broadcast(None)
    raise failure


def check_reports(
    control: ControlChannel, reports: Sequence[StepReport], trains: bool, count: int, remedy: str
) -> None:
    """Raise `InputError` if a rank runs another kind of step, or has another number of microbatches, than this rank.

    ``remedy`` is what to do if some ranks train and some run forwards only.
    """
    for place, report in enumerate(reports):
        rank = f"rank {control.global_rank(place)}"
        if report.trains != trains:
            kinds = {True: "a training step", False: "forwards only"}
            problem = f"runs {kinds[report.trains]}, the rank of the first stage {kinds[trains]}"
            raise InputError(rank, problem, remedy)
        if report.count not in (0, count):
            problem = f"has {report.count} microbatches, the step {count}"
            raise InputError(f"{rank}: {report.name}", problem, "give one for each")


def _decided(control: ControlChannel, reports: Sequence[StepReport], decide: Decide) -> StepMessage:
    """Decide what all ranks will run. A failure is broadcast, and raised here."""
    try:
        for place, report in enumerate(reports):
            if report.failure:
                raise ExecutionError(f"rank {control.global_rank(place)}: {report.failure}")
        modes = [report.mode for report in reports]
        return replace(decide(reports), modes=modes[0] if len(set(modes)) == 1 else ",".join(modes))
    except Exception as error:
        control.broadcast(_failed(control, error))
        raise


def error_text(error: Exception) -> str:
    """Return an error as text for other ranks."""
    return str(error) if isinstance(error, PipeloomError) else f"{type(error).__name__}: {error}"


def _failed(control: ControlChannel, error: Exception) -> StepMessage:
    """Return a failure as a message that names the rank."""
    text = error_text(error)
    if not text.startswith("rank "):
        text = f"rank {control.source}, of the first stage: {text}"
    return StepMessage(failure=text.partition("\n")[0])
