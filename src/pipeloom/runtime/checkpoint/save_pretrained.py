"""Trained weights in the format of another library, written in pieces so that no process holds the whole model."""

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
from pipeloom.runtime.launch.coordination import LongBarrier, raise_together, together
from pipeloom.runtime.model.model import Model
from pipeloom.runtime.model.pretrained import Pretrained, Saved
from pipeloom.runtime.model.sharding import is_dtensor
from pipeloom.runtime.model.weights import layers_of_rank


def pretrained_of(model: Model) -> Pretrained:
    """Return the model's `Pretrained`, which describes its format in another library.

    Raises `InputError` without one.
    """
    if model.pretrained is None:
        raise InputError(
            f"model {model.name!r}",
            "is of no supported library",
            "make it by pl.from_transformers or pl.from_diffusers, or load its checkpoints by load_weights",
        )
    return model.pretrained


def check_target(folder: Path) -> None:
    """Raise `InputError` if the target folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(str(folder), "exists and is not empty", "name a new folder, or empty this one")


def partial_of(folder: Path) -> Path:
    """Return the temporary folder that is written until the target is complete."""
    whole = Path(os.path.realpath(folder))
    return whole.with_name(f"{whole.name}.partial")


def begin(folder: Path) -> None:
    """Create the temporary folder in one process.

    Raises `InputError` if the target is not empty or cannot be created.
    """
    check_target(folder)
    with writing(folder):
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        partial_of(folder).mkdir(parents=True)


def discard(folder: Path) -> None:
    """Remove the temporary folder of an incomplete target."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)


def add(writer: ShardWriter, saved: Iterable[Saved]) -> None:
    """Write tensors in the library's format."""
    for each in saved:
        for stem, tensors in each.items():
            for key, tensor in tensors.items():
                writer.add(stem, key, tensor)


def finish(folder: Path, pretrained: Pretrained, shards: Sequence[Shard]) -> None:
    """Rename the files, write the files beside them, and rename the folder. Called in one process."""
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
    """Write the weights of all ranks, see `Trainer.save_pretrained`. All processes of the default group call it
    together.

    ``writes`` says whether this process writes, among those that hold the same layers.
    """
    pretrained, rank = pretrained_of(model), dist.get_rank()
    problem: InputError | None = None
    if rank == 0:
        try:
            begin(folder)
        except InputError as error:
            problem = error
    raise_together(problem, "writing the trained weights")
    barrier = LongBarrier()
    writer = ShardWriter(partial_of(folder), str(rank), most_bytes)
    own = _own(executor)
    for piece in pretrained.pieces():
        if piece[0] not in own:
            continue
        # All processes with a shard take part in gathering a tensor.
        whole = {name: _whole(own[name]) for name in piece}
        if writes:
            add(writer, [pretrained.saved(whole)])
    if rank == 0:
        add(writer, pretrained.others())
    shards: list[list[Shard]] = [[] for _ in range(dist.get_world_size())]
    # Before the barrier with its long timeout, because the last file may be large.
    written = writer.close()
    barrier.wait("writing the trained weights")
    with together("writing the trained weights"):
        dist.all_gather_object(shards, written)
    if rank == 0:
        finish(folder, pretrained, [shard for each in shards for shard in each])
    with together("writing the trained weights"):
        dist.barrier()


def _own(executor: Executor) -> Mapping[str, Tensor]:
    """Return the tensors that this rank writes. The first of several ranks writes a shared layer."""
    ranks = reversed(range(executor.layout.num_ranks))
    first = {place: rank for rank in ranks for place in layers_of_rank(executor.layout, rank)}

    def is_own(name: str) -> bool:
        module, layer, _ = name.split(".", 2)
        return first[module, int(layer)] == executor.rank

    return {name: tensor for name, tensor in executor.saved_tensors().items() if is_own(name)}


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on the host, where joint tensors are split and wait for their file."""
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).cpu()
