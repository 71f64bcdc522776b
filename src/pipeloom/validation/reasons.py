"""Why a published run cannot be expressed."""

from __future__ import annotations

from pipeloom.errors import InputError, PipeloomError


class NotExpressible(InputError):
    """A published run has a part that the emulator does not know, or lacks a size.

    Parameters
    ----------
    run : str
        Id of the run.
    kind : str
        What runs with the same reason have in common. Summaries count kinds.
    detail : str
        The value of this run. It follows the kind in the message.
    """

    def __init__(self, run: str, kind: str, detail: str = "") -> None:
        self.kind, self.detail = kind, detail
        between = (": " if " " in kind or " " in detail else " ") if detail else ""
        super().__init__(run, f"{kind}{between}{detail}")

    def __reduce__(self) -> tuple[type[NotExpressible], tuple[str, str, str]]:
        """Pickle the arguments."""
        return type(self), (self.entity, self.kind, self.detail)


def kind_of(error: PipeloomError) -> str:
    """Return the kind of an error: its own, or the argument or value that it is about."""
    if isinstance(error, NotExpressible):
        return error.kind
    return error.entity if isinstance(error, InputError) else type(error).__name__
