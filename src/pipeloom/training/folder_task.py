"""A task without a task file: a `transformers` model from its folder, and data with a processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeloom.bounds import Count
from pipeloom.errors import InputError, check_count, located
from pipeloom.integrations.data.processed import ArrowDataset, ParquetDataset, ProcessedDataset, WebDataset
from pipeloom.io.document import convert
from pipeloom.runtime import Batches, Dataset, Model, user_code
from pipeloom.training.config import RunConfig
from pipeloom.training.task import Task, import_file

_KINDS: dict[str, type[ProcessedDataset]] = {
    "webdataset": WebDataset,
    "parquet": ParquetDataset,
    "datasets": ArrowDataset,
}


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[model]`` without a task file."""

    transformers: str
    """Folder of the model, relative to the file."""
    freeze: tuple[str, ...] = ()
    """Modules that are not trained."""


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[data]`` without a task file. Paths are relative to the file."""

    batch: Count
    """Samples of every batch."""
    webdataset: str | list[str] | None = None
    """Shards: names, patterns, or ranges in braces."""
    parquet: str | list[str] | None = None
    """Parquet files: names or patterns."""
    datasets: str | None = None
    """Folder that ``save_to_disk`` of the `datasets` library wrote."""
    processor: str = ""
    """Folder of the processor or tokenizer. Empty: the model's folder."""
    shuffle: bool = True
    skip_corrupt: bool = False
    """Skip and count damaged samples instead of ending training."""
    exclude: tuple[str, ...] = ()
    """Samples whose damage only decoding shows, named as in messages. They are skipped with ``skip_corrupt``."""
    train_on: Literal["assistant", "all"] = "assistant"
    function: str = ""
    """``file.py:name`` of a function that maps an example's fields to messages or text, prompt, image and audio."""
    messages: str | None = None
    text: str | None = None
    prompt: str | None = None
    image: str | None = None
    audio: str | None = None

    def __post_init__(self) -> None:
        """Raise `InputError` unless there is exactly one source."""
        check_count("batch", self.batch)
        if self.exclude and not self.skip_corrupt:
            raise InputError("exclude", "names samples, but skip_corrupt is false", "set skip_corrupt to true")
        sources = [name for name in _KINDS if getattr(self, name) is not None]
        if len(sources) != 1:
            raise InputError(
                ", ".join(sources) or "webdataset", f"{len(sources)} sources", f"give one of {', '.join(_KINDS)}"
            )

    @property
    def fields(self) -> dict[str, str]:
        """Names of the fields that are set."""
        names = ("messages", "text", "prompt", "image", "audio")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _build(file: Path, folder: str, freeze: tuple[str, ...], /, *, seed: int, **_: Any) -> Model:
    import torch

    from pipeloom.integrations.transformers.build import from_transformers

    torch.manual_seed(seed)
    # Only shapes: each rank reads the weights of its own layers.
    try:
        return from_transformers(folder, freeze=freeze, device="meta")
    except InputError as error:
        field = "model.freeze" if error.entity == "freeze" else f"model.transformers: {error.entity}"
        raise InputError(f"{file}: {field}", error.problem, error.remedy) from error


def _batches(dataset: Dataset, data: DataConfig, seed: int, /, *, num_iterations: int, **_: Any) -> Batches:
    """Return as many batches as a run has iterations."""
    return Batches(
        dataset,
        data.batch,
        shuffle=data.shuffle,
        seed=seed,
        epochs=-(-num_iterations * data.batch // len(dataset)),
        limit=num_iterations,
        skip_corrupt=data.skip_corrupt,
    )


def folder_task(config: RunConfig, file: Path) -> Task:
    """Make the task of a config that names a model's folder; an `InputError` names the file and the field."""
    model = convert(config.model, ModelConfig, f"{file}: model")
    data = convert(config.data, DataConfig, f"{file}: data")
    folder = os.path.realpath(file.parent / model.transformers)
    if not Path(folder).is_dir():
        raise InputError(f"{file}: model.transformers", f"{folder!r} is not a folder", "name one beside the file")
    _check_model(folder, file)
    dataset = _dataset(data, file, folder, "data")
    if data.batch > len(dataset):
        raise InputError(
            f"{file}: data.batch",
            f"{data.batch} is above the {len(dataset)} samples of the data",
            "give at most this many",
        )
    if data.batch < config.parallel.dp:
        problem = f"{data.batch} is below parallel.dp, {config.parallel.dp} replicas"
        raise InputError(f"{file}: data.batch", problem, "give every replica a sample")
    build, batches = partial(_build, file, folder, model.freeze), partial(_batches, dataset, data, config.seed)
    evaluation, unknown = None, dataset.unknown(data.exclude)
    if config.evaluation is not None:
        own = config.evaluation.data
        sources = tuple(kind for kind in _KINDS if kind in own)
        if not sources:
            remedy = f"name held-out data there: one of {', '.join(_KINDS)}"
            raise InputError(f"{file}: evaluation.data", "names no source", remedy)
        evaluation = partial(_evaluation_batches, file, folder, sources)
        # Before any rank starts; reads only file headers.
        held_out = evaluation(**config.data | own).dataset
        assert isinstance(held_out, ProcessedDataset)
        unknown = held_out.unknown(unknown)
    if unknown:
        remedy = f"name samples as in messages, such as {dataset.source.name(0)!r}"
        raise InputError(f"{file}: data.exclude", f"{unknown[0]!r} is not a sample of the data", remedy)
    return Task(build, batches, eval_batches=evaluation)


def _check_model(folder: str, file: Path) -> None:
    """Raise `InputError` for an invalid model configuration, before its processor fails on it."""
    from pipeloom.integrations.transformers.weights import load_config

    with located(f"{file}: model.transformers"):
        load_config(folder)


def _dataset(data: DataConfig, file: Path, folder: str, table: str) -> ProcessedDataset:
    """Open the data set that a table of the file names."""
    kind = next(name for name in _KINDS if getattr(data, name) is not None)
    with located(f"{file}: {table}"):
        return _KINDS[kind](
            _beside(file, getattr(data, kind)),
            os.path.realpath(file.parent / data.processor) if data.processor else folder,
            data.fields,
            train_on=data.train_on,
            function=_function(file, data.function),
            exclude=data.exclude,
        )


def _evaluation_batches(file: Path, folder: str, sources: tuple[str, ...], /, **fields: Any) -> Batches:
    """Return one pass over the data of ``[evaluation.data]``. Fields except its ``sources`` may be of ``[data]``."""
    fields = {name: value for name, value in fields.items() if name not in _KINDS or name in sources}
    data = convert(fields, DataConfig, f"{file}: evaluation.data")
    dataset = _cached_dataset(msgspec.json.encode(data), file, folder)
    return Batches(dataset, data.batch, shuffle=False, skip_corrupt=data.skip_corrupt)


@lru_cache(maxsize=1)
def _cached_dataset(data: bytes, file: Path, folder: str) -> ProcessedDataset:
    """Read the data set, once in each process for all evaluations."""
    return _dataset(msgspec.json.decode(data, type=DataConfig), file, folder, "evaluation.data")


def _beside(file: Path, paths: Any) -> Any:
    """Return paths relative to the file."""
    return [str(file.parent / each) for each in paths] if isinstance(paths, list) else str(file.parent / paths)


def _function(file: Path, reference: str) -> Any:
    if not reference:
        return None
    source, _, name = reference.rpartition(":")
    path = Path(os.path.realpath(file.parent / source))
    if not source or not path.is_file():
        raise InputError(f"function = {reference!r}", f"{str(path)!r} is not a file", 'give "file.py:name"')
    return partial(_call, str(path), name)


def _call(path: str, name: str, fields: Mapping[str, Any]) -> Any:
    """Call a function of a file, which every process imports itself."""
    return _imported(path, name)(fields)


@lru_cache
def _imported(path: str, name: str) -> Any:
    with user_code(f"{path}: import"):
        found = getattr(import_file(Path(path)), name, None)
    if not callable(found):
        raise InputError(path, f"has no function {name}", 'give "file.py:name"')
    return found
