"""A run's numbers as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.errors import InputError
from pipeloom.training.callbacks import Callback
from pipeloom.training.record import Row, Summary

if TYPE_CHECKING:
    from pipeloom.runtime.train.evaluate import Evaluated

SCALARS = {
    "loss": "loss/training",
    "gradient_norm": "loss/gradient_norm",
    "learning_rate": "loss/learning_rate",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "step_s": "speed/step_s",
    "planned_s": "speed/planned_s",
    "measured_s": "speed/measured_s",
    "planned_bubble_share": "schedule/planned_bubble_share",
    "measured_bubble_share": "schedule/measured_bubble_share",
    "gap": "schedule/gap",
    "lead_s": "schedule/lead_s",
}
"""Fields of a row, and under which name they are shown."""


def check_tensorboard() -> None:
    """Refuse a run that could not write event files.

    Raises
    ------
    InputError
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(
            "log.tensorboard", f"needs a package that is missing ({error})", "install pipeloom[tensorboard]"
        ) from error


class TensorBoardLog(Callback):
    """Writes event files.

    Parameters
    ----------
    folder : Path
    first_iteration : int
        With which this start begins: what an earlier one wrote of it and later ones is not shown any more.
    """

    def __init__(self, folder: Path, first_iteration: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_iteration or None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def on_step(self, row: Row) -> None:
        """Write an iteration."""
        for field, name in SCALARS.items():
            value = getattr(row, field)
            if value is not None:
                self._writer.add_scalar(name, value, row.iteration)
        self._writer.flush()

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Write an evaluation, at the iteration before it."""
        self._writer.add_scalar("loss/evaluation", evaluated.loss, evaluated.iteration - 1)
        self._writer.flush()

    def on_end(self, summary: Summary) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()
