"""Agreement: all ranks see that they are about to train on one and the same batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.runtime.waiting import together

_MARK_BYTES = 12


class SameBatch:
    """Compares the fingerprints of a batch over all ranks of all replicas.

    Every rank makes one for every batch, and one after the last. What it sends travels while the iteration before is
    run, so that `check` finds it there.

    Parameters
    ----------
    fingerprint : str or None
        Of the global batch as this rank's loader gave it, see `resume.fingerprint`; None: the loader has no more.
    """

    def __init__(self, fingerprint: str | None) -> None:
        mark = bytes(_MARK_BYTES) if fingerprint is None else bytes.fromhex(fingerprint)
        self._mine = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        self._all = [torch.empty_like(self._mine) for _ in range(dist.get_world_size())]
        with together("comparing the batches of all ranks"):
            self._work = dist.all_gather(self._all, self._mine, async_op=True)

    def check(self, iteration: int) -> None:
        """Return where all ranks have the same batch, or none has one.

        Raises
        ------
        InputError
            On all ranks alike, naming those that have another batch than rank 0: they would take inputs from one
            batch and targets from another.
        """
        if self._work is not None:
            with together(f"iteration {iteration}: comparing the batches of all ranks"):
                self._work.wait()
        marks = [each.numpy().tobytes() for each in self._all]
        others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        if not others:
            return
        ended = [rank for rank, mark in enumerate(marks) if not any(mark)]
        if ended:
            raise InputError(
                f"iteration {iteration}", f"{_ranks(ended)} no more batches, but other ranks have",
                "give all ranks the same batches: none of them takes a part of the data for itself",
            )  # fmt: skip
        raise InputError(
            f"iteration {iteration}", f"{_ranks(others)} other samples than rank 0, or in another order",
            "give all ranks the same batches: seed what shuffles them alike, divide no data by rank, and let "
            "`describe` return ids that name a sample in every process",
        )  # fmt: skip


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"
