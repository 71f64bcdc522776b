"""Weights of a pipeline of the `diffusers` library: transformer and text encoder, each in its own folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.checkpoint.safetensors_files import TensorFiles
from pipeloom.runtime.model.pretrained import Pretrained, Saved

KIND = "diffusers"
CONFIG = "config.json"
INDEX = "model_index.json"
STEM = "diffusion_pytorch_model"
NAMES = "library_names.json"
"""File of a checkpoint with the library's names of its tensors. Which layer has a parameter depends on tests with
samples, so a process without these samples cannot find the names again.
"""


def read_names(checkpoint: Path) -> dict[str, str]:
    """Return the library's names of a checkpoint's tensors. Raise `InputError` if the file is damaged."""
    try:
        return msgspec.json.decode((checkpoint / NAMES).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(str(checkpoint / NAMES), f"cannot be read ({error})", "export another checkpoint") from error


def checked_files(model: Any, folder: Path) -> TensorFiles:
    """Open a transformer's files. Raise `InputError` if their tensors differ from its parameters."""
    files, state = TensorFiles(folder, STEM), model.state_dict()
    remedy = "use config.json and weights of the same model"
    wanted, found = set(state), set(files.tensors)
    for problem, keys in (("is in none of the files", wanted - found), ("is too many", found - wanted)):
        if keys:
            raise InputError(f"{folder}: {min(keys)}", problem, remedy)
    for key, tensor in state.items():
        shape = files.tensors[key].shape
        if tensor.shape != shape:
            raise InputError(f"{folder}: {key}", f"has the shape {shape}, the model's is {tuple(tensor.shape)}", remedy)
    return files


def load_into(model: Any, folder: Path) -> None:
    """Load all weights of a folder into a transformer on the meta device, in torch's default dtype.

    The library's own loader needs another package for some families.
    """
    files, dtype = checked_files(model, folder), torch.get_default_dtype()
    model.load_state_dict({key: files.read(key, dtype) for key in files.tensors}, assign=True)


class TransformerWeights:
    """Implement `Pretrained` for a transformer, whose files have parameter names as keys.

    ``names`` maps each saved tensor ``module.layer.name`` to the library's name. Weights are read from ``folder``, if
    any.
    """

    def __init__(self, model: Any, names: Mapping[str, str], folder: Path | None) -> None:
        self.model, self.names, self.origin = model, dict(names), ""
        self._files = None if folder is None else checked_files(model, folder)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Pretrained`."""
        assert self._files is not None
        for name, tensor in tensors.items():
            self._files.read_into(self.names[name], tensor)

    def pieces(self) -> Sequence[tuple[str, ...]]:
        """As `Pretrained`."""
        return [(ours,) for ours in {theirs: ours for ours, theirs in self.names.items()}.values()]

    def saved(self, piece: Mapping[str, Tensor]) -> Saved:
        """As `Pretrained`."""
        return {STEM: {self.names[name]: tensor for name, tensor in piece.items()}}

    def others(self) -> Iterator[Saved]:
        """As `Pretrained`: every parameter is in a layer."""
        return iter(())

    def kept(self) -> Mapping[str, str]:
        """As `Pretrained`."""
        return {CONFIG: self.model.to_json_string()}

    def write_beside(self, folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
        """As `Pretrained`."""
        del dtypes
        self.model.save_config(str(folder))


class PartWeights(Pretrained, Protocol):
    """Weights of one part, with the names of its parameters."""

    names: dict[str, str]


@dataclass(eq=False)
class DiffusersWeights:
    """Implement `Pretrained` for a pipeline, with one entry for each of its subfolders.

    Attributes
    ----------
    parts : mapping of str to PartWeights
        Weights by subfolder, such as ``"transformer/"``. The key is ``""`` for a transformer without a pipeline.
    names : mapping of str to str
        The library's name of each saved tensor, which begins with ``transformer.`` or ``text_encoder.``.
    folder : Path or None
        Folder from which the transformer was loaded.
    origin : str
        As in `Pretrained`.
    unread : frozenset of str
        Subfolders without weights to read.
    beside : mapping of str to str
        Contents of the pipeline's small files, by name.
    others_of : tuple of str
        Subfolders that are not trained. They are copied.
    """

    parts: Mapping[str, PartWeights]
    names: Mapping[str, str]
    folder: Path | None
    origin: str
    unread: frozenset[str] = frozenset()
    beside: Mapping[str, str] = field(default_factory=dict)
    others_of: tuple[str, ...] = ()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Pretrained`."""
        for place, part in self.parts.items():
            mine = {name: tensor for name, tensor in tensors.items() if name in part.names}
            if mine and place in self.unread:
                where = "belongs to no folder" if self.folder is None else f"{self.folder / place} has no safetensors"
                remedy = "give pl.from_diffusers a folder with weights"
                raise InputError(f"parameter {next(iter(mine))!r}", f"is on meta, and {where}", remedy)
            if mine:
                part.fill(mine)

    def pieces(self) -> Sequence[tuple[str, ...]]:
        """As `Pretrained`."""
        return [piece for part in self.parts.values() for piece in part.pieces()]

    def saved(self, piece: Mapping[str, Tensor]) -> Saved:
        """As `Pretrained`."""
        first = next(iter(piece))
        return next(_at(place, part.saved(piece)) for place, part in self.parts.items() if first in part.names)

    def others(self) -> Iterator[Saved]:
        """As `Pretrained`."""
        for place, part in self.parts.items():
            for each in part.others():
                yield _at(place, each)

    def kept(self) -> Mapping[str, str]:
        """As `Pretrained`."""
        parts = {place + name: text for place, part in self.parts.items() for name, text in part.kept().items()}
        return {**self.beside, **parts, NAMES: json.dumps(self.names)}

    def write_beside(self, folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
        """As `Pretrained`."""
        for name in self.others_of:
            assert self.folder is not None
            shutil.copytree(self.folder / name, folder / name)
        for name, text in self.beside.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        for place, part in self.parts.items():
            own = {stem.removeprefix(place): dtype for stem, dtype in dtypes.items() if stem.startswith(place)}
            part.write_beside(folder / place, own)


def _at(place: str, saved: Saved) -> Saved:
    return {place + stem: tensors for stem, tensors in saved.items()}
