"""Pretrained: weights of a model in files of another library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

Saved = Mapping[str, Mapping[str, Tensor]]
"""Tensors in a library's format: by stem of the file, relative to the folder, then by key."""


class Pretrained(Protocol):
    """Source of a model's weights, and the format in which another library reads them again.

    Names are ``module.layer.parameter``, of parameters and persistent buffers. See `Model.pretrained`.
    """

    origin: str
    """Library and folder, ``"transformers:/its/folder"``, as stored in checkpoints. The folder may be empty."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights into tensors of the right shapes, and read nothing else. Raises `InputError` on failure."""
        ...

    def pieces(self) -> Sequence[tuple[str, ...]]:
        """Return all saved names, grouped if the library saves joint tensors of them."""
        ...

    def saved(self, piece: Mapping[str, Tensor]) -> Saved:
        """Return the tensors of one piece in the library's format."""
        ...

    def others(self) -> Iterator[Saved]:
        """Yield, one by one, the saved tensors that belong to no layer."""
        ...

    def kept(self) -> Mapping[str, str]:
        """Return small files by name that every checkpoint keeps. They describe the shapes of the model."""
        ...

    def write_beside(self, folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
        """Write the library's other files, such as the configuration. ``dtypes`` are those of weight files, by stem."""
        ...
