"""Names of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def sample_name(sample: Mapping[str, Any], *contents: Any) -> str:
    """Return the ``id`` of a sample, or the digest of its contents if it has none."""
    own = sample.get("id")
    return digest_of(*contents) if own is None else str(own)


def digest_of(*contents: Any) -> str:
    """Return 16 hexadecimal digits for nested values: tensors count by shape and bytes, others by ``repr``."""
    digest = hashlib.sha256()
    for each in tree_flatten(contents)[0]:
        if isinstance(each, Tensor):
            digest.update(str(tuple(each.shape)).encode())
            digest.update(each.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(each).encode())
    return digest.hexdigest()[:16]
