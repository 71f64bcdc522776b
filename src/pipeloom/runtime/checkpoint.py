"""Checkpoints that know layers and not ranks: saved from one layout, resumed in any other.

Built on `torch.distributed.checkpoint`. Every tensor is filed under the name of its parameter, module and layer
first, so that a rank finds those of its own chunks whoever wrote them. Tensors in shards (FSDP2, DTensor) are filed
as wholes: other degrees of data and tensor parallelism cut them anew.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeloom.errors import InputError
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.optimizer_options import give_options, options_by_name

_MODEL, _OPTIMIZER, _OPTIONS, _ITERATION = "model", "optimizer", "optimizer_options", "iteration"


def save_checkpoint(
    path: Path | str,
    executor: Executor,
    optimizer: torch.optim.Optimizer | None,
    iteration: int,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write parameters, buffers and optimiser state; all processes call it together.

    Parameters
    ----------
    path : path
        A folder, made here. It counts as a checkpoint only once everything is written.
    executor : Executor
    optimizer : torch.optim.Optimizer or None
        None on a rank without trained parameters.
    iteration : int
        The next one to run.
    group : torch.distributed.ProcessGroup or None
        All processes that train; None: the default group, or a single process.

    Raises
    ------
    InputError
        When the optimiser has state or options that no checkpoint holds: anything but tensors, numbers and strings.
    """
    import torch.distributed.checkpoint as dcp  # slow to import, and seldom needed

    state = {f"{_MODEL}.{name}": tensor for name, tensor in _tensors(executor).items()}
    state |= _optimizer_tensors(executor, optimizer)
    for name, options in options_by_name(executor, optimizer).items():
        state[f"{_OPTIONS}.{name}"] = torch.frombuffer(
            bytearray(json.dumps(options).encode()), dtype=torch.uint8
        )
    state[_ITERATION] = torch.tensor(iteration)
    with _quiet_alone():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(path), overwrite=True), process_group=group)  # type: ignore[attr-defined]


def load_checkpoint(
    path: Path | str,
    executor: Executor,
    optimizer: torch.optim.Optimizer | None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Read what this rank's chunks and optimiser need; all processes call it together.

    Returns
    -------
    int
        The iteration to go on with.

    Raises
    ------
    InputError
        When there is no whole checkpoint, or it lacks a tensor or has another shape of it, or the optimiser puts
        parameters into one group that had different options.
    """
    import torch.distributed.checkpoint as dcp  # slow to import, and seldom needed

    if not (Path(path) / ".metadata").exists():
        raise InputError(str(path), "is no whole checkpoint", "give a folder that save_checkpoint finished")
    stored = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata  # type: ignore[attr-defined]
    state = {f"{_MODEL}.{name}": tensor for name, tensor in _tensors(executor).items()}
    for name, tensor in state.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            had = "is missing" if size is None else f"has shape {tuple(size)}"
            raise InputError(f"{path}: {name}", f"{had}, the model wants {tuple(tensor.shape)}")
    slots = _empty_slots(executor, optimizer, stored)
    state |= slots
    texts = _empty_texts(executor, optimizer, stored)
    state |= texts
    state[_ITERATION] = torch.tensor(0)
    with _quiet_alone():
        dcp.load(state, checkpoint_id=str(path), process_group=group)  # type: ignore[attr-defined]
    if optimizer is not None:
        options = {
            key.removeprefix(f"{_OPTIONS}."): json.loads(text.numpy().tobytes())
            for key, text in texts.items()
        }
        for name, parameter in executor.named_parameters():
            prefix = f"{_OPTIMIZER}.{name}/"
            found: dict[str, Any] = {
                key.removeprefix(prefix): value for key, value in slots.items() if key.startswith(prefix)
            }
            found |= options.get(name, {}).get("state", {})
            if found:
                optimizer.state[parameter] = found
        give_options(executor, optimizer, {name: each["group"] for name, each in options.items()})
    return int(state[_ITERATION])


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Torch warns where there is one process only; that is meant."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _tensors(executor: Executor) -> dict[str, Tensor]:
    """Parameters and buffers of this rank's layers, by module, layer and name."""
    found: dict[str, Tensor] = {}
    for number, layers in executor.layers.items():
        chunk = executor.layout.chunks[number]
        for i, layer in enumerate(layers, start=chunk.layers[0]):
            for name, tensor in layer.state_dict().items():
                if isinstance(tensor, Tensor):
                    found[f"{chunk.module}.{i}.{name}"] = tensor
    return found


def _optimizer_tensors(executor: Executor, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return {
        f"{_OPTIMIZER}.{name}/{slot}": value
        for name, parameter in executor.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _empty_texts(
    executor: Executor, optimizer: torch.optim.Optimizer | None, stored: dict[str, Any]
) -> dict[str, Tensor]:
    """Room for the options of this rank's parameters; a checkpoint of an older version has none."""
    if optimizer is None:
        return {}
    keys = [f"{_OPTIONS}.{name}" for name, _ in executor.named_parameters()]
    return {key: torch.empty(stored[key].size, dtype=torch.uint8) for key in keys if key in stored}


def _empty_slots(
    executor: Executor, optimizer: torch.optim.Optimizer | None, stored: dict[str, Any]
) -> dict[str, Tensor]:
    """Room for the optimiser state of this rank's parameters, as the checkpoint has it."""
    if optimizer is None:
        return {}
    mine = {name: parameter for name, parameter in executor.named_parameters() if parameter.requires_grad}
    slots = {}
    for key, entry in stored.items():
        name, slash, _ = key.removeprefix(f"{_OPTIMIZER}.").rpartition("/")
        if key.startswith(f"{_OPTIMIZER}.") and slash and name in mine:
            parameter, dtype = mine[name], entry.properties.dtype
            if isinstance(parameter, DTensor) and entry.size == parameter.shape:
                slots[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                continue
            # A counter of steps lives on the host, whatever holds the parameter.
            device = parameter.device if len(entry.size) else torch.device("cpu")
            slots[key] = torch.empty(entry.size, dtype=dtype, device=device)
    return slots
