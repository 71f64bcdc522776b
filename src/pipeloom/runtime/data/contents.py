"""Digests of batches: of the samples' ids and sizes, and of their contents, which differ where tokens do."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipeloom.spec import Batch


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def batch_digest(batch: Batch) -> str:
    """Return the digest of a batch's ids and sizes. The number of the iteration does not count."""
    content = msgspec.json.encode(msgspec.structs.replace(batch, iteration=0))
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def contents_digest(samples: Sequence[Any]) -> str:
    """Digest of all tensors, arrays, texts and numbers in samples, however deep in lists, mappings and objects.

    What is none of these counts by its type alone. Samples of a `Dataset` are not loaded for it.
    """
    digest = hashlib.blake2b(digest_size=12)
    _add(digest, list(samples), set())
    return digest.hexdigest()


def _add(digest: _Hash, value: Any, within: set[int]) -> None:
    digest.update(f"{type(value).__name__}\0".encode())
    if isinstance(value, Tensor):
        found = value.detach().cpu().contiguous()
        digest.update(f"{found.dtype}{tuple(found.shape)}".encode())
        digest.update(found.flatten().view(torch.uint8).numpy().tobytes())
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
