"""Checkpoints stored by layer, not by rank: saved with one layout, loaded with any other.

Built on `torch.distributed.checkpoint`. Every tensor is stored under the name of its parameter, beginning with module
and layer, so that any rank finds those of its own chunks. Sharded tensors (FSDP2, DTensor) are stored as whole tensors,
which other degrees of data and tensor parallelism shard anew.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import ExecutionError, InputError, PipeloomError, located
from pipeloom.outputs import REMEDIES
from pipeloom.runtime.checkpoint.ema import Averages
from pipeloom.runtime.checkpoint.optimizer_options import check_classes, give_options, options_by_name
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.model.model import Model
from pipeloom.runtime.model.sharding import is_dtensor
from pipeloom.runtime.model.weights import give_memory

if TYPE_CHECKING:
    from pipeloom.runtime.checkpoint.digests import PlainReader

_MODEL, _OPTIMIZER, _OPTIONS, _ITERATION = "model", "optimizer", "optimizer_options", "iteration"
_EMA = "ema"
Weights = Literal["trained", "ema"]
"""Which weights of a checkpoint: the trained ones or their average."""


def weight_keys(path: Path | str, names: Iterable[str], weights: Weights = "trained") -> dict[str, str]:
    """Return the key of ``torch.distributed.checkpoint`` of each parameter and buffer.

    ``names`` have the form ``module.layer.parameter``. Only trained parameters have averages. All other tensors are the
    same in both. Raises `InputError` if averages are requested, but the checkpoint has none.
    """
    if weights == "trained":
        return {name: f"{_MODEL}.{name}" for name in names}
    _, stored, _ = _opened(path, {})
    if not any(key.startswith(f"{_EMA}.") for key in stored):
        raise InputError(
            f"{path}: {_EMA}", "is missing, because no average was kept", "take the trained weights, or add [ema]"
        )
    return {name: key if (key := f"{_EMA}.{name}") in stored else f"{_MODEL}.{name}" for name in names}


def save_checkpoint(
    path: Path | str,
    executor: Executor,
    optimizer: torch.optim.Optimizer | None,
    iteration: int,
    *,
    averages: Averages | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write parameters, buffers and optimizer state. All processes call it together.

    Parameters
    ----------
    path : path
        A folder, made here. It counts as a checkpoint only once everything is written. An earlier checkpoint in it is
        overwritten, and is lost if this one cannot be completed.
    optimizer : torch.optim.Optimizer or None
        None on a rank without trained parameters.
    iteration : int
        The next iteration to run.
    averages : Averages or None
        Averages of the weights to save with them.
    group : torch.distributed.ProcessGroup or None
        All training processes. None is the default group, or a single process.

    Raises
    ------
    InputError
        The optimizer has state or options other than tensors, numbers and strings.
    """
    write_state(path, state_tensors(executor, optimizer, iteration, averages=averages), group=group)


def state_tensors(
    executor: Executor, optimizer: torch.optim.Optimizer | None, iteration: int, *, averages: Averages | None = None
) -> dict[str, Tensor]:
    """Return the tensors of this rank in a checkpoint by key. They are those that training changes, not copies."""
    state = {f"{_MODEL}.{name}": tensor for name, tensor in executor.saved_tensors().items()}
    state |= _optimizer_tensors(executor, optimizer)
    state |= _average_tensors(executor.named_parameters(), averages)
    for name, options in options_by_name(executor, optimizer).items():
        state[f"{_OPTIONS}.{name}"] = torch.frombuffer(bytearray(json.dumps(options).encode()), dtype=torch.uint8)
    state[_ITERATION] = torch.tensor(iteration)
    return state


def write_state(path: Path | str, state: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Write the result of `state_tensors`, or copies of it. All processes call it together.

    Raises `ExecutionError` on all processes if one cannot write its part.
    """
    import torch.distributed.checkpoint as dcp  # slow to import, and seldom needed

    from pipeloom.runtime.checkpoint.digests import DigestingWriter

    def unwritable(reason: str, cause: BaseException) -> ExecutionError:
        remedy = REMEDIES.get(getattr(cause, "errno", 0) or 0, "free disk space")
        return ExecutionError(f"checkpoint {path} cannot be written: {reason}; {remedy}, or give another folder")

    with _quiet(), _raising_cause(unwritable):
        dcp.save(dict(state), storage_writer=DigestingWriter(str(path), overwrite=True), process_group=group)  # type: ignore[attr-defined]


def load_checkpoint(
    path: Path | str,
    executor: Executor,
    optimizer: torch.optim.Optimizer | None,
    *,
    averages: Averages | None = None,
    group: dist.ProcessGroup | None = None,
    checked: bool = False,
) -> int:
    """Load the tensors of this rank's chunks and optimizer. All processes call it together.

    Loading executes nothing from the files. Every file is compared with the digest written beside it, unless
    ``checked`` says that this has just been done. Averages missing from the checkpoint start with the weights.
    All ranks load a tied parameter under its first name, so that its copies agree. The optimizer keeps its own state of
    parameters that the saved optimizer did not have.

    Returns
    -------
    int
        The iteration to resume at.

    Raises
    ------
    InputError
        There is no complete checkpoint, a file is damaged, a tensor is missing or has another shape, or the
        optimizer is of another class or has parameters in one group that had different options.
    """
    state = {f"{_MODEL}.{executor.model.first_name(name)}": each for name, each in executor.saved_tensors().items()}
    reader, stored, files = _opened(path, state)
    slots = _empty_slots(executor, optimizer, stored)
    state |= slots
    texts = _empty_texts(executor, optimizer, stored)
    state |= texts
    # Stored in the precision of the averages. Averages that are not stored begin with the weights.
    every = _average_tensors(executor.trained_parameters(), averages)
    averaged = {key: tensor for key, tensor in every.items() if key in stored}
    state |= averaged
    if _ITERATION not in stored:
        raise InputError(f"{path}: {_ITERATION}", "is missing", "name a complete checkpoint of save_checkpoint")
    state[_ITERATION] = torch.tensor(0)
    _load(path, reader, state, () if checked else _files_of(state, files), process_group=group)
    if averages is not None:
        averages.begin(known={id(tensor) for tensor in averaged.values()})
    if optimizer is not None:
        options = {key.removeprefix(f"{_OPTIONS}."): json.loads(text.numpy().tobytes()) for key, text in texts.items()}
        with located(str(path)):
            check_classes(executor, optimizer, options)
        for name, parameter in executor.trained_parameters():
            prefix = f"{_OPTIMIZER}.{name}/"
            slots_of_parameter: dict[str, Any] = {
                key.removeprefix(prefix): value for key, value in slots.items() if key.startswith(prefix)
            }
            slots_of_parameter |= options.get(name, {}).get("state", {})
            if name in options:
                # The optimizer may have taken steps that the one in the checkpoint had not.
                optimizer.state.pop(parameter, None)
            if slots_of_parameter:
                optimizer.state[parameter] = slots_of_parameter
        give_options(executor, optimizer, {name: each["group"] for name, each in options.items()})
    return int(state[_ITERATION])


def saved_iteration(path: Path | str) -> int:
    """Return the iteration to resume at according to the tensors of a checkpoint.

    Each process reads it by itself. Raises `InputError` if it is missing or cannot be read.
    """
    state = {_ITERATION: torch.tensor(0)}
    reader, _, _ = _opened(path, state)
    _load(path, reader, state, (), no_dist=True)
    return int(state[_ITERATION])


def load_weights(path: Path | str, model: Model, *, weights: Weights = "trained") -> None:
    """Load trained weights into a whole model in one process, e.g. to evaluate it.

    Parameters
    ----------
    path : path
        A folder written by `save_checkpoint` or a training run.
    model : Model
        The model, built as for training. It may be on ``meta``.
    weights : "trained" or "ema"
        The weights of the last iteration, or their average.

    Raises
    ------
    InputError
        There is no complete checkpoint, a file is damaged, or it is of another model.
    """
    give_memory(model)
    tensors = model.saved_tensors()
    keys = weight_keys(path, tensors, weights)
    state = {keys[name]: tensor for name, tensor in tensors.items()}
    reader, _, files = _opened(path, state)
    _load(path, reader, state, _files_of(state, files))


class SavedWeights:
    """Weights of a checkpoint, read a few at a time.

    ``wanted`` has tensors of the right shapes, possibly on ``meta``, by the names that will be read. Raises
    `InputError` if there is no complete checkpoint, or it is of another model.
    """

    def __init__(self, path: Path | str, wanted: Mapping[str, Tensor], weights: Weights = "trained") -> None:
        self._path = Path(path)
        self._keys = weight_keys(path, wanted, weights)
        shapes = {key: each for name, each in wanted.items() for key in (f"{_MODEL}.{name}", self._keys[name])}
        _, self._stored, self._files = _opened(path, shapes)
        self._checked: set[str] = set()

    def num_bytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        entry = self._stored[f"{_MODEL}.{name}"]
        return int(entry.size.numel() * entry.properties.dtype.itemsize)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors in the dtypes in which they were trained. Raises `InputError` if a file is damaged."""
        from pipeloom.runtime.checkpoint.digests import PlainReader

        keys = {self._keys[name]: name for name in names}
        # Averages are stored in higher precision.
        trained = {key: self._stored[f"{_MODEL}.{name}"] for key, name in keys.items()}
        state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in trained.items()}
        files = _files_of(state, self._files) - self._checked
        _load(self._path, PlainReader(str(self._path)), state, files)
        self._checked |= files
        return {keys[key]: tensor for key, tensor in state.items()}


def _opened(path: Path | str, wanted: Mapping[str, Tensor]) -> tuple[PlainReader, dict[str, Any], set[tuple[str, str]]]:
    """Open a checkpoint. Raises `InputError` if it lacks a tensor.

    Returns a reader, the metadata of the stored tensors by name, and pairs of a tensor's name and a file with parts of
    it.
    """
    from pipeloom.runtime.checkpoint.digests import METADATA, PlainReader

    if not (Path(path) / METADATA).exists():
        raise InputError(str(path), "is not a complete checkpoint", "name a complete checkpoint of save_checkpoint")
    reader = PlainReader(str(path))
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    for name, tensor in wanted.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            had = "is missing" if size is None else f"has shape {tuple(size)}"
            raise InputError(f"{path}: {name}", f"{had}, the model needs {tuple(tensor.shape)}")
    return reader, stored, {(index.fqn, info.relative_path) for index, info in metadata.storage_data.items()}


def _files_of(state: Mapping[str, Tensor], files: Iterable[tuple[str, str]]) -> set[str]:
    """Return the files with parts of some tensors, see `_opened`."""
    return {file for name, file in files if name in state}


def _load(
    path: Path | str, reader: PlainReader, state: dict[str, Tensor], unchecked: Iterable[str], **options: Any
) -> None:
    """Load tensors with options of torch. Files in ``unchecked`` are compared with their digests before."""
    import torch.distributed.checkpoint as dcp  # slow to import, and seldom needed

    from pipeloom.runtime.checkpoint.digests import check_digests

    if names := tuple(unchecked):
        check_digests(Path(path), names)
    with _quiet(), _read_of(path):
        dcp.load(state, storage_reader=reader, **options)  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about a single process and about an earlier checkpoint in the folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint", category=UserWarning)
        yield


@contextmanager
def _raising_cause(make: Callable[[str, BaseException], PipeloomError]) -> Iterator[None]:
    """Replace torch's exception, a BaseException with the tracebacks of all ranks, by its cause in one line."""
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import, and seldom needed

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, PipeloomError):
            raise cause from None
        first = str(cause).partition("\n")[0]
        raise make(f"rank {rank}: {type(cause).__name__}: {first}", cause) from error


def _read_of(path: Path | str) -> AbstractContextManager[None]:
    remedy = "name a complete checkpoint, or an older one"
    return _raising_cause(lambda reason, _: InputError(str(path), f"cannot be read: {reason}", remedy))


def _optimizer_tensors(executor: Executor, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return {
        f"{_OPTIMIZER}.{name}/{slot}": value
        for name, parameter in executor.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _average_tensors(named: Iterable[tuple[str, nn.Parameter]], averages: Averages | None) -> dict[str, Tensor]:
    """Return averages of parameters under these names."""
    if averages is None:
        return {}
    pairs = ((name, averages.of(parameter)) for name, parameter in named)
    return {f"{_EMA}.{name}": average for name, average in pairs if average is not None}


def _empty_texts(
    executor: Executor, optimizer: torch.optim.Optimizer | None, stored: dict[str, Any]
) -> dict[str, Tensor]:
    """Return empty tensors for the options of this rank's parameters. Checkpoints of older versions have none."""
    if optimizer is None:
        return {}
    keys = [f"{_OPTIONS}.{name}" for name, _ in executor.trained_parameters()]
    return {key: torch.empty(stored[key].size, dtype=torch.uint8) for key in keys if key in stored}


def _empty_slots(
    executor: Executor, optimizer: torch.optim.Optimizer | None, stored: dict[str, Any]
) -> dict[str, Tensor]:
    """Return empty tensors for the optimizer state of this rank's parameters, shaped as in the checkpoint."""
    if optimizer is None:
        return {}
    trained = dict(executor.trained_parameters())
    counts_on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    slots = {}
    for key, entry in stored.items():
        name, slash, _ = key.removeprefix(f"{_OPTIMIZER}.").rpartition("/")
        if key.startswith(f"{_OPTIMIZER}.") and slash and name in trained:
            parameter, dtype = trained[name], entry.properties.dtype
            if is_dtensor(parameter) and entry.size == parameter.shape:
                slots[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                continue
            # Step counters are on the host, unless the kernel of the optimizer reads them, as in PyTorch's own loading.
            on_device = len(entry.size) > 0 or id(parameter) in counts_on_device
            device = parameter.device if on_device else torch.device("cpu")
            slots[key] = torch.empty(entry.size, dtype=dtype, device=device)
    return slots
