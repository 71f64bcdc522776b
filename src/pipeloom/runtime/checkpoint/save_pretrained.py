"""Trained weights in the form of another library, written piece by piece: no process holds the whole model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.outputs import writing
from pipeloom.runtime.checkpoint.safetensors_files import (
    SHARD_BYTES,
    Shard,
    ShardWriter,
    finish_shards,
    most_common_dtypes,
)
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.launch.coordination import Patience, together
from pipeloom.runtime.model.model import Model
from pipeloom.runtime.model.pretrained import Pretrained, Saved
from pipeloom.runtime.model.sharding import is_dtensor


def pretrained_of(model: Model) -> Pretrained:
    """Return what says how another library has the model.

    Raises
    ------
    InputError
        Nothing does.
    """
    if model.pretrained is None:
        raise InputError(
            f"model {model.name!r}",
            "is of no library that could read it",
            "pl.from_transformers and pl.from_diffusers make models that are; others are read by load_weights",
        )
    return model.pretrained


def check_target(folder: Path) -> None:
    """Refuse to write among other files.

    Raises
    ------
    InputError
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(str(folder), "is there and not empty", "name a new folder, or remove what is in it")


def partial_of(folder: Path) -> Path:
    """Where a folder is written until it is whole."""
    whole = Path(os.path.realpath(folder))
    return whole.with_name(f"{whole.name}.partial")


def begin(folder: Path) -> None:
    """Make the folder that is written; one process does.

    Raises
    ------
    InputError
        When the target is not empty, or cannot be made.
    """
    check_target(folder)
    with writing(folder):
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        partial_of(folder).mkdir(parents=True)


def discard(folder: Path) -> None:
    """Remove what was written of a folder that will not be whole."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)


def add(writer: ShardWriter, saved: Iterable[Saved]) -> None:
    """Write tensors as the library has them."""
    for each in saved:
        for stem, tensors in each.items():
            for key, tensor in tensors.items():
                writer.add(stem, key, tensor)


def finish(folder: Path, pretrained: Pretrained, shards: Sequence[Shard]) -> None:
    """Name the files, write what belongs beside them, and give the folder its name; one process does."""
    partial = partial_of(folder)
    with writing(folder):
        pretrained.write_beside(partial, most_common_dtypes(shards))
        finish_shards(partial, shards)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)


def save_pretrained(
    model: Model, executor: Executor, writes: bool, folder: Path, most_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of all ranks; all processes of the default group call it together.

    Parameters
    ----------
    executor : Executor
        This process's.
    writes : bool
        Whether it is this process, of those that hold the same layers, that writes them.
    folder : Path
        New or empty; all processes share it.
    most_bytes : int
        Of one file.

    Raises
    ------
    InputError
        On all processes alike, when the folder is not empty or the model is of no library.
    """
    pretrained, rank = pretrained_of(model), dist.get_rank()
    _begin_together(folder)
    patience = Patience()
    writer = ShardWriter(partial_of(folder), str(rank), most_bytes)
    mine = _own(executor)
    for piece in pretrained.pieces():
        if piece[0] not in mine:
            continue
        # What lies in shards is gathered by all processes that have one.
        whole = {name: _whole(mine[name]) for name in piece}
        if writes:
            add(writer, [pretrained.saved(whole)])
    if rank == 0:
        add(writer, pretrained.others())
    shards: list[list[Shard]] = [[] for _ in range(dist.get_world_size())]
    # Before the wait, which is a long one: the last file may be as large as any.
    written = writer.close()
    patience.wait("writing the trained weights")
    with together("writing the trained weights"):
        dist.all_gather_object(shards, written)
    if rank == 0:
        finish(folder, pretrained, [shard for each in shards for shard in each])
    with together("writing the trained weights"):
        dist.barrier()


def _begin_together(folder: Path) -> None:
    """Let one process make the folder, and all of them know what came of it."""
    problem: list[tuple[str, str, str] | None] = [None]
    if dist.get_rank() == 0:
        try:
            begin(folder)
        except InputError as error:
            problem = [(error.entity, error.problem, error.remedy)]
    with together("writing the trained weights"):
        dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise InputError(*problem[0])


def _own(executor: Executor) -> Mapping[str, Tensor]:
    """What this rank is to write: a layer that several ranks have is the first one's."""
    layout = executor.layout
    first: dict[tuple[str, int], int] = {}
    for chunk in layout.chunks:
        for number in range(chunk.layers[0], chunk.layers[1] + 1):
            place = (chunk.module, number)
            first[place] = min(chunk.rank, first.get(place, chunk.rank))

    def is_own(name: str) -> bool:
        module, layer, _ = name.split(".", 2)
        return first[module, int(layer)] == executor.rank

    return {name: tensor for name, tensor in executor.saved_tensors().items() if is_own(name)}


def _whole(tensor: Tensor) -> Tensor:
    """On the host: joint tensors are taken apart there, and wait there for their file."""
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).cpu()
