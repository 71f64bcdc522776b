"""Batches that are read ahead, their digests, and the assignment of samples to replicas."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipeloom.errors import located
from pipeloom.plan import Delivery
from pipeloom.runtime.data.prefetch import Describe, batch_of, next_samples
from pipeloom.runtime.launch.coordination import broadcast_bytes, together
from pipeloom.runtime.model.model import user_code
from pipeloom.spec import Batch


@dataclass(frozen=True)
class UpcomingBatch:
    """A global batch of this rank's loader. Its metadata is computed on first use."""

    samples: Sequence[Any]
    iteration: int
    describe: Describe | None

    @cached_property
    def batch(self) -> Batch:
        """Metadata of the batch. Raises `InputError`, which names the iteration, if the metadata is invalid."""
        with located(f"iteration {self.iteration}"):
            return batch_of(self.samples, self.describe, self.iteration)

    @cached_property
    def digest(self) -> str:
        """Digest by which ranks compare the ids and sizes that they have read."""
        return batch_digest(self.batch)

    def compared(self, contents: bool) -> str:
        """Return the digest by which ranks compare the batch, with the contents of its samples if requested."""
        if not contents:
            return self.digest
        whole = f"{self.digest} {contents_digest(self.samples)}"
        return hashlib.blake2b(whole.encode(), digest_size=12).hexdigest()


class ReadAhead:
    """Reads batches in order, ``more`` of them beyond the one that is taken, and none from iteration ``end`` on.

    With ``end`` None, all batches are read.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Any]],
        first_iteration: int,
        describe: Describe | None,
        more: int,
        end: int | None = None,
    ) -> None:
        with user_code("batches"):
            self.source = iter(batches)
        self._next, self._describe, self._more, self._end = first_iteration, describe, more, end
        self._read: deque[UpcomingBatch] = deque()
        self._ended = False

    @property
    def following(self) -> UpcomingBatch | None:
        """The batch after the last taken one, if it has been read already."""
        return self._read[0] if self._read else None

    def take(self) -> UpcomingBatch | None:
        """Return the next batch, or None after the last."""
        while not self._ended and (self._end is None or self._next < self._end) and len(self._read) <= self._more:
            with user_code(f"iteration {self._next}: batches"):
                samples = next_samples(self.source, f"iteration {self._next}")
            if samples is None:
                self._ended = True
            else:
                self._read.append(UpcomingBatch(samples, self._next, self._describe))
                self._next += 1
        return self._read.popleft() if self._read else None


# A replica number for each of some thousands of samples.
_AT_ONCE = 8 * 1024


def broadcast_assignment(delivery: Delivery | None, iteration: int) -> tuple[int, ...]:
    """Broadcast the planner's assignment of the next batch's samples to replicas from rank 0 to all ranks.

    ``delivery`` is the planner's for this iteration, on rank 0. Returns the replica of every sample. Empty if the
    planner did not assign them.
    """
    assignment = None if delivery is None else msgspec.msgpack.encode(delivery.answer.replica_of_sample)
    with together(f"iteration {iteration}: assigning the next batch to replicas"):
        data = broadcast_bytes(assignment, at_once=_AT_ONCE)
    return msgspec.msgpack.decode(data, type=tuple[int, ...])


def batch_digest(batch: Batch) -> str:
    """Return the digest of a batch's ids and sizes. It does not depend on the iteration number."""
    content = msgspec.json.encode(msgspec.structs.replace(batch, iteration=0))
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def contents_digest(samples: Sequence[Any]) -> str:
    """Return the digest of all tensors, arrays, texts and numbers in samples, nested in lists, mappings and objects.

    Other values count by their type only. Samples of a `Dataset` are not loaded.
    """
    digest = hashlib.blake2b(digest_size=12)
    _add(digest, list(samples), set())
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, value: Any, within: set[int]) -> None:
    digest.update(f"{type(value).__name__}\0".encode())
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, bytes | bytearray):
        digest.update(f"{len(value)}\0".encode() + bytes(value))
    elif value is None or isinstance(value, str | int | float | complex | np.generic):
        digest.update(f"{value!r}\0".encode())
    elif id(value) not in within:
        inner: list[Any]
        if isinstance(value, Mapping):
            inner = [each for pair in value.items() for each in pair]
        elif isinstance(value, list | tuple):
            inner = list(value)
        elif dataclasses.is_dataclass(value):
            inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
        else:
            inner = [each for pair in getattr(value, "__dict__", {}).items() for each in pair]
        digest.update(f"{len(inner)}\0".encode())
        for each in inner:
            _add(digest, each, within | {id(value)})
