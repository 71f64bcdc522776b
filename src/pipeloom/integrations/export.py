"""`export` converts a checkpoint of a training run to a folder in the format of the model's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.checkpoint.checkpoint import SavedWeights, Weights
from pipeloom.runtime.checkpoint.resume import Checkpoints, read_state
from pipeloom.runtime.checkpoint.safetensors_files import SHARD_BYTES, ShardWriter
from pipeloom.runtime.checkpoint.save_pretrained import add, begin, discard, finish, partial_of, pretrained_of
from pipeloom.runtime.model.pretrained import Pretrained

_AT_ONCE_BYTES = 10**9
_Shapes = tuple[Mapping[str, Tensor], Pretrained]
"""Shapes of the saved tensors by name, and the format in which the model's library reads them."""
_REMEDY = "give the folder that the model came from, by --source or source="


def export(
    checkpoint: Path | str,
    folder: Path | str,
    source: Path | str | None = None,
    *,
    weights: Weights = "trained",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights of a checkpoint in the format of the model's own library.

    Only a few tensors are in memory at a time.

    Parameters
    ----------
    checkpoint : path
        A checkpoint, a folder of checkpoints, or the folder of a run. The newest intact checkpoint is exported.
    folder : path
        New or empty folder for the safetensors files with the library's keys, the configuration, and the source's files
        of processor and tokenizer.
    source : path or None
        Folder of the original model, or one with its config.json. None for the folder that the run recorded.
    weights : "trained" or "ema"
        Weights of the last iteration, or their exponential moving average.
    shard_bytes : int
        Maximum number of bytes per file.

    Returns
    -------
    Path
        The exported checkpoint.

    Raises
    ------
    InputError
        There is no checkpoint, it is damaged or belongs to another model, its library is unknown, or the folder is not
        empty.
    """
    found, target = _newest(Path(checkpoint)), Path(folder)
    # Checks the folder before anything is read.
    begin(target)
    try:
        shapes, pretrained = _shapes(found, source)
        # `save_torch_state_dict` of huggingface_hub needs all tensors in memory at once.
        writer = ShardWriter(partial_of(target), "0", shard_bytes)
        for piece in _pieces(SavedWeights(found, shapes, weights), pretrained, shard_bytes):
            add(writer, [pretrained.saved(piece)])
        add(writer, pretrained.others())
        finish(target, pretrained, writer.close())
    except BaseException:
        discard(target)
        raise
    return found


def _newest(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest one in it."""
    if (path / ".metadata").exists():
        return path
    for folder in (path, path / "checkpoints"):
        newest = Checkpoints(folder).newest()
        if newest is not None:
            return newest
    remedy = "give a folder step-N of a run's checkpoints"
    raise InputError(str(path), "is not a checkpoint and contains none", remedy)


def _shapes(checkpoint: Path, source: Path | str | None) -> _Shapes:
    """Return the shapes of the trained model."""
    for file in checkpoint.rglob("*"):
        # Opening a named pipe would block forever.
        if not (file.is_file() or file.is_dir()):
            raise InputError(str(file), "is not a regular file", "remove it")
    if source is not None:
        return _KINDS[_kind_of(Path(source))](str(source), checkpoint)
    try:
        origin = read_state(checkpoint).origin
    except InputError:
        origin = ""
    kind, _, folder = origin.partition(":")
    if kind not in _KINDS:
        raise InputError(str(checkpoint), "does not say from which folder its model came", _REMEDY)
    if folder and not Path(folder).is_dir():
        remedy = f"{_REMEDY}, or {checkpoint} for weights and config.json alone"
        raise InputError(folder, "does not exist any more, and the model came from it", remedy)
    # If the model was not loaded from a folder, the checkpoint has its configuration.
    return _KINDS[kind](folder or str(checkpoint), checkpoint)


def _kind_of(folder: Path) -> str:
    """Return the library of a model's folder."""
    if (folder / "model_index.json").is_file() or (folder / "transformer").is_dir():
        return "diffusers"
    config = folder / "config.json"
    if config.is_file():
        return "diffusers" if '"_class_name"' in config.read_text(encoding="utf-8") else "transformers"
    raise InputError(str(folder), "has no config.json", "give the folder of a model that its library saved")


def _transformers(folder: str, checkpoint: Path) -> _Shapes:
    from pipeloom.integrations.transformers.build import shapes

    del checkpoint
    model = shapes(folder)
    return model.saved_tensors(), pretrained_of(model)


def _diffusers(folder: str, checkpoint: Path) -> _Shapes:
    from pipeloom.integrations.diffusers.build import from_diffusers, shapes
    from pipeloom.integrations.diffusers.weights import NAMES, read_names

    if (checkpoint / NAMES).exists():
        return shapes(Path(folder), read_names(checkpoint))
    # A checkpoint of an older version.
    model = from_diffusers(folder, device="meta")
    return model.saved_tensors(), pretrained_of(model)


_KINDS: dict[str, Callable[[str, Path], _Shapes]] = {"transformers": _transformers, "diffusers": _diffusers}
"""Functions that build the shapes from the model's folder and the checkpoint, by library in `Pretrained.origin`."""


def _pieces(weights: SavedWeights, pretrained: Pretrained, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield groups of weights that are saved together, reading a limited number of bytes at a time."""
    waiting: list[tuple[str, ...]] = []
    size = 0
    for piece in pretrained.pieces():
        num_bytes = sum(map(weights.num_bytes, piece))
        if waiting and size + num_bytes > min(most_bytes, _AT_ONCE_BYTES):
            yield from _read(weights, waiting)
            waiting, size = [], 0
        waiting.append(piece)
        size += num_bytes
    yield from _read(weights, waiting)


def _read(weights: SavedWeights, pieces: list[tuple[str, ...]]) -> Iterator[dict[str, Tensor]]:
    found = weights.read(name for piece in pieces for name in piece)
    for piece in pieces:
        yield {name: found.pop(name) for name in piece}
