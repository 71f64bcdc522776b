"""`export`: a checkpoint of a training run as a folder that the model's own library reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime import Model
from pipeloom.runtime.checkpoint.checkpoint import SavedWeights, Weights
from pipeloom.runtime.checkpoint.resume import Checkpoints, read_state
from pipeloom.runtime.checkpoint.safetensors_files import SHARD_BYTES, ShardWriter
from pipeloom.runtime.checkpoint.save_pretrained import add, begin, discard, finish, partial_of, pretrained_of
from pipeloom.runtime.model.pretrained import Pretrained

_AT_ONCE_BYTES = 10**9
_REMEDY = "give the folder that the model came from, by --source or source="


def export(
    checkpoint: Path | str,
    folder: Path | str,
    source: Path | str | None = None,
    *,
    weights: Weights = "trained",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights of a checkpoint as the model's own library has them, a few at a time.

    Parameters
    ----------
    checkpoint : path
        A checkpoint, the folder of checkpoints, or that of the run: of these the newest is taken that is not damaged.
    folder : path
        New or empty; gets safetensors with the library's keys, its configuration, and the source's files of processor
        and tokenizer.
    source : path or None
        The folder that the model came from, or one with its config.json; None: as the run noted it.
    weights : "trained" or "ema"
        Those of the last iteration, or their average.
    shard_bytes : int
        Most bytes of one file.

    Returns
    -------
    Path
        The checkpoint that was taken.

    Raises
    ------
    InputError
        When there is no checkpoint, it is of another model or damaged, nothing says which library's model it is, or the
        folder is not empty.
    """
    found, target = _newest(Path(checkpoint)), Path(folder)
    # Before anything is read.
    begin(target)
    try:
        model = _model(found, source)
        pretrained = pretrained_of(model)
        writer = ShardWriter(partial_of(target), "0", shard_bytes)
        for piece in _pieces(SavedWeights(found, model.saved_tensors(), weights), pretrained, shard_bytes):
            add(writer, [pretrained.saved(piece)])
        add(writer, pretrained.others())
        finish(target, pretrained, writer.close())
    except BaseException:
        discard(target)
        raise
    return found


def _newest(path: Path) -> Path:
    """The checkpoint that is meant."""
    if (path / ".metadata").exists():
        return path
    for folder in (path, path / "checkpoints"):
        newest = Checkpoints(folder).newest()
        if newest is not None:
            return newest
    raise InputError(str(path), "is no checkpoint, and has none in it", "give a folder step-N of a run's checkpoints")


def _model(checkpoint: Path, source: Path | str | None) -> Model:
    """The shapes of the model that was trained."""
    for file in checkpoint.rglob("*"):
        # A library that opens a pipe would wait for ever.
        if not (file.is_file() or file.is_dir()):
            raise InputError(str(file), "is not a regular file", "remove it")
    if source is not None:
        return _KINDS[_kind_of(Path(source))](str(source))
    try:
        origin = read_state(checkpoint).origin
    except InputError:
        origin = ""
    kind, _, folder = origin.partition(":")
    if kind not in _KINDS:
        raise InputError(str(checkpoint), "does not say from which folder its model came", _REMEDY)
    if folder and not Path(folder).is_dir():
        remedy = f"{_REMEDY}, or {checkpoint} for weights and config.json alone"
        raise InputError(folder, "is not there any more, and the model came from it", remedy)
    # A model that was made otherwise than from a folder: the checkpoint has its configuration.
    return _KINDS[kind](folder or str(checkpoint))


def _kind_of(folder: Path) -> str:
    """Which library a folder is of."""
    if (folder / "model_index.json").is_file() or (folder / "transformer").is_dir():
        return "diffusers"
    config = folder / "config.json"
    if config.is_file():
        return "diffusers" if '"_class_name"' in config.read_text(encoding="utf-8") else "transformers"
    raise InputError(str(folder), "has no config.json", "give a folder that the model's library saved it in")


def _transformers(folder: str) -> Model:
    from pipeloom.integrations.transformers.build import shapes

    return shapes(folder)


def _diffusers(folder: str) -> Model:
    from pipeloom.integrations.diffusers.build import from_diffusers

    return from_diffusers(folder, device="meta")


_KINDS: dict[str, Callable[[str], Model]] = {"transformers": _transformers, "diffusers": _diffusers}
"""From the first word of `Pretrained.origin` to what builds the model's shapes from the folder behind it."""


def _pieces(weights: SavedWeights, pretrained: Pretrained, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Weights that are saved together, read some pieces at a time."""
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
