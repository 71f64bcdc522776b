"""Pretrained: what a model knows of weights that lie in files of another library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

Saved = Mapping[str, Mapping[str, Tensor]]
"""Tensors as a library saves them: from the stem of the files, relative to the folder, to key and tensor."""


class Pretrained(Protocol):
    """Where a model's weights come from, and the form in which another library reads them again.

    Names are ``module.layer.parameter``, of parameters and of buffers that are saved. `Model.pretrained` has one.
    """

    origin: str
    """Library and folder, ``"transformers:/its/folder"``, as checkpoints note it; there may be no folder."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights into tensors of the right shapes, and read nothing else.

        Raises
        ------
        InputError
            When they cannot be read.
        """
        ...

    def pieces(self) -> Sequence[tuple[str, ...]]:
        """All names that are saved, those together of which the library saves joint tensors."""
        ...

    def saved(self, piece: Mapping[str, Tensor]) -> Saved:
        """Return the tensors of one piece as the library saves them."""
        ...

    def others(self) -> Iterator[Saved]:
        """Yield, one by one, what is saved and belongs to no layer."""
        ...

    def kept(self) -> Mapping[str, str]:
        """Return small files that every checkpoint keeps, by name: what says of which shapes the model is."""
        ...

    def write_beside(self, folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
        """Write what the library wants beside weights, configuration and the like; dtypes are of files, by stem."""
        ...
