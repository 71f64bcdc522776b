"""`ProcessedDataset`: convert examples to samples with a processor of the `transformers` library."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError, PipeloomError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.data.examples import Example, Fields, read_example
from pipeloom.integrations.data.marked_text import marked_text
from pipeloom.integrations.data.processors import Outline as SizedOutline
from pipeloom.integrations.data.processors import Sized, joined_shape
from pipeloom.integrations.data.sample_builder import IGNORED, ROWS, Contents, SampleBuilder, TrainOn
from pipeloom.integrations.data.sources import Paths, Shards, Source, Table
from pipeloom.integrations.transformers.samples import next_labels
from pipeloom.runtime.data.dataset import CorruptSampleError, Dataset
from pipeloom.runtime.model.model import Model
from pipeloom.spec import batch_from_dicts
from pipeloom.spec.model import num_instances

EVERY_USUAL: Mapping[str, str] = MappingProxyType({})
_KEPT_BYTES = 64 * 2**20
Function = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Maps the fields of an example to messages or text, prompt, image and audio."""


@dataclass(frozen=True)
class _Media:
    """Images or recordings of a sample."""

    blobs: tuple[Blob, ...]
    promised: tuple[SizedOutline, ...]
    """Shapes of the processor's output for each."""
    axis: int = 0
    """The dimension of the contents along which images, or tiles of images, are concatenated."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of contents of each image or recording."""
        return tuple(outline.shape[self.axis] for outline in self.promised)


@dataclass(frozen=True)
class _Outline:
    """A sample without contents, and the files of its contents by `Module.reads`."""

    sample: dict[str, Any]
    media: dict[str, _Media]


class _Outlines:
    """A thread-safe cache of the most recent outlines by sample number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Outline] = OrderedDict()
        self._bytes = 0

    def get(self, i: int, make: Callable[[int], _Outline]) -> _Outline:
        with self._lock:
            if i in self._kept:
                self._kept.move_to_end(i)
                return self._kept[i]
        # Two threads may create the same outline, which is harmless.
        made = make(i)
        with self._lock:
            if i not in self._kept:
                self._kept[i] = made
                self._bytes += _held_bytes(made)
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= _held_bytes(self._kept.popitem(last=False)[1])
        return made


class ProcessedDataset(Dataset):
    """Examples of a source, converted to samples by a processor.

    Parameters
    ----------
    source : Source
        The examples.
    processor : path or object
        A processor or tokenizer, or its folder.
    fields : mapping
        Names of the fields with ``messages``, ``text``, ``prompt``, ``image`` and ``audio``; see `Fields`. By default
        the usual names.
    train_on : "assistant" or "all"
        Whether only the assistant's tokens are targets, or all tokens of the text.
    function : callable or None
        Converts the fields of an example to those of `Fields`, for data in other formats. Large fields are a `Blob`,
        whose ``read()`` returns the bytes.
    exclude : collection of str
        Names of samples, as in error messages, to treat as corrupt. Use it for damage that is only found in decoding.
        ``skip_corrupt`` of `Batches` skips them.

    Attributes
    ----------
    num_decoded : int
        Number of images and recordings that this process has decoded.
    """

    def __init__(
        self,
        source: Source,
        processor: Any,
        fields: Mapping[str, str] = EVERY_USUAL,
        *,
        train_on: TrainOn = "assistant",
        function: Function | None = None,
        exclude: Collection[str] = (),
    ) -> None:
        if train_on not in ("assistant", "all"):
            raise InputError("train_on", f"{train_on!r} is none of assistant, all")
        self.source, self.train_on, self.function, self.exclude = source, train_on, function, frozenset(exclude)
        self._fields = Fields.of(fields) if function is not None else Fields.of(fields).check(source)
        self._given = str(processor) if isinstance(processor, (str, Path)) else processor
        self._open()

    def _open(self) -> None:
        self._builder = SampleBuilder(self._given, self.train_on)
        self._model: Model | None = None
        # Outlines depend only on data and processor, so all bound copies share them.
        self._known = _Outlines()
        self._lock = threading.Lock()
        self.num_decoded = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the processor's folder, not the processor. Each process loads it."""
        names = ("source", "train_on", "function", "exclude", "_fields", "_given")
        return {name: value for name, value in vars(self).items() if name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the processor."""
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.source)

    def unknown(self, names: Collection[str]) -> list[str]:
        """Return the names that belong to no sample."""
        return sorted(set(names) - {self.source.name(i) for i in range(len(self))}) if names else []

    def bind(self, model: Model) -> Dataset:
        """Return a data set for a model, which provides sizes and targets of samples.

        Raises
        ------
        InputError
            The model has no ``describe``.
        """
        if model.describe is None:
            raise InputError("model.describe", "is None", "let it return the sizes of the processor's output")
        # `copy.copy` would use `__getstate__` and load the processor again.
        bound = object.__new__(type(self))
        vars(bound).update(vars(self))
        bound._model, bound.num_decoded = model, 0
        return bound

    def sizes(self, i: int) -> dict[str, Any]:
        """As `Dataset.sizes`, from headers and texts only."""
        model, sample = self._of_model(), self._labeled(self._outline(i).sample)
        assert model.describe is not None
        try:
            return {**model.describe(sample), "targets": model.num_targets(sample)}
        except InputError as error:
            # Keep the type, because corrupt samples can be skipped.
            raise type(error)(f"{self.source.name(i)}: {error.entity}", error.problem, error.remedy) from error

    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool = True) -> dict[str, Any]:
        """As `Dataset.load`: the sample with the contents of these instances, and zeros for the others."""
        # Labels are always included, because the sizes depend on them.
        del loss
        outline = self._outline(i)
        found = {}
        for reads in outline.media:
            numbers = self._to_decode(outline, reads, module, instances)
            if numbers:
                name = self._builder.sized[reads].content
                found[name] = self._contents(reads, outline, numbers)
        return {**self._labeled(outline.sample), **found}

    def preview(self, i: int) -> str:
        """As `Dataset.preview`. Also compare the sample with the processor's output for the decoded contents."""
        outline = self._outline(i)
        sample = outline.sample
        example = read_example(self.source, i, self._fields, self.function)
        contents = {
            reads: [self._builder.sized[reads].decode(b) for b in each] for reads, each in self._blobs(example).items()
        }
        own, _ = self._builder.build(example, contents, by_processor=True)
        for name in (*ROWS, "labels"):
            if name in own and not torch.equal(own[name], sample[name]):
                problem = f"differs from what {type(self._builder.processor).__name__} gives"
                raise InputError(f"{example.name}: {name}", problem, "use a processor that looks at sizes alone")
        for reads, each in contents.items():
            name = self._builder.sized[reads].content
            ours = self._contents(reads, outline, set(range(len(each))))
            if own[name].shape != ours.shape or not torch.allclose(own[name].to(ours.dtype), ours, 1e-3, 1e-3):
                problem = f"differ from what the processor gives for all {reads} of the sample together"
                raise InputError(f"{example.name}: {name}", problem, "use one per sample, or another processor")
        return marked_text(self._builder.tokenizer, sample["input_ids"], sample["labels"] != IGNORED)

    def _of_model(self) -> Model:
        if self._model is None:
            raise PipeloomError("the dataset has no model; call bind(model)")
        return self._model

    def _labeled(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample with shifted labels if the model does not shift them itself."""
        if getattr(self._of_model(), "shifts", True):
            return sample
        return {**sample, "labels": next_labels(sample["labels"])}

    def _to_decode(self, outline: _Outline, reads: str, module: str, instances: tuple[int, ...]) -> set[int]:
        """Return the numbers of the images or recordings to decode."""
        model, given = self._of_model(), outline.media[reads]
        every = set(range(len(given.blobs)))
        if not instances:
            return set()
        if model.module(module).reads != reads:
            # If no module reads them as instances, they belong to the sample.
            return set() if any(each.reads == reads for each in model.modules) else every
        if sum(given.rows) == len(every):
            return set(instances)
        assert model.describe is not None
        count = num_instances(model.module(module).reads, batch_from_dicts([model.describe(outline.sample)]).samples[0])
        if count == len(every):
            return set(instances)
        # If images are cut into tiles, each tile is an instance.
        of_row = [number for number, rows in enumerate(given.rows) for _ in range(rows)]
        return {of_row[each] for each in instances} if count == len(of_row) else every

    def _contents(self, reads: str, outline: _Outline, numbers: set[int]) -> Tensor:
        given, promised = outline.media[reads], outline.sample[self._builder.sized[reads].content]
        contents = torch.zeros(promised.shape, dtype=promised.dtype)
        begin = 0
        for number, (blob, rows) in enumerate(zip(given.blobs, given.rows, strict=True)):
            if number in numbers:
                one = self._decoded(self._builder.sized[reads], blob, given.promised[number], outline.sample["id"])
                place = [slice(side) for side in one.shape]
                place[given.axis] = slice(begin, begin + rows)
                contents[tuple(place)] = one
            begin += rows
        return contents

    def _decoded(self, sized: Sized, blob: Blob, promised: SizedOutline, name: str) -> Tensor:
        remedy = f'repair it, or set skip_corrupt and exclude = ["{name}"], and resume'
        try:
            item = sized.decode(blob)
        except CorruptSampleError as error:
            # Not skippable here: the plan and the other ranks depend on the sample.
            raise InputError(error.entity, error.problem, remedy) from error
        with self._lock:
            self.num_decoded += 1
        try:
            contents, given = sized.run(*sized.cut(item, promised.sizes))
        except Exception as error:
            raise InputError(blob.name, _raised(error), remedy) from error
        have = {sized.content: tuple(contents.shape), **{name: value.tolist() for name, value in given.items()}}
        want = {sized.content: promised.shape, **{name: value.tolist() for name, value in promised.given.items()}}
        for entry, value in want.items():
            if have.get(entry) != value:
                raise InputError(
                    f"{blob.name}: {entry}",
                    f"the processor gives {have.get(entry)}, and promised {value} for its size",
                    "use a processor that looks at sizes alone",
                )
        return contents

    # ---------------------------------------------------------------- outlines

    def _outline(self, i: int) -> _Outline:
        return self._known.get(i, self._make)

    def _make(self, i: int) -> _Outline:
        if self.source.name(i) in self.exclude:
            raise CorruptSampleError(self.source.name(i), "is excluded")
        example = read_example(self.source, i, self._fields, self.function)
        blobs = self._blobs(example)
        blanks: Contents = {
            reads: [self._builder.sized[reads].stand_in(self._builder.sized[reads].measure(blob)) for blob in each]
            for reads, each in blobs.items()
        }
        try:
            sample, passed = self._builder.build(example, blanks)
        except PipeloomError:
            raise
        except Exception as error:
            # Processors reject some samples, such as images of extreme aspect ratios.
            raise CorruptSampleError(example.name, _raised(error)) from error
        if not bool((sample["labels"][1:] != IGNORED).any()):
            remedy = 'add assistant text, or set train_on = "all"'
            raise CorruptSampleError(example.name, "has no target", remedy)
        found = {}
        for reads, each in blanks.items():
            sized = self._builder.sized[reads]
            if len(each) > 1 and not sized.joins:
                problem = f"are {len(each)}, but the processor does not process the images of a sample independently"
                raise CorruptSampleError(f"{example.name}: {reads}", problem, "use one per sample")
            sizes = [sized.size_of(blank) for blank in each]
            # The processor may cut a recording into windows.
            pieces = [sized.pieces(sizes[0], passed[reads])] if len(each) == 1 else [(size,) for size in sizes]
            promised = tuple(sized.joined(each) for each in pieces)
            found[reads] = _Media(blobs[reads], promised, sized.axes[sized.content])
            contents = sample[sized.content]
            shape = joined_shape([outline.shape for outline in promised], sized.axes[sized.content])
            if shape != contents.shape:
                problem = f"have shape {tuple(contents.shape)}, but {shape} if the {reads} are processed one by one"
                remedy = "use one per sample, or another processor"
                raise CorruptSampleError(f"{example.name}: {sized.content}", problem, remedy)
            # Some processors copy the zeros, which would take memory.
            sample[sized.content] = torch.zeros((), dtype=contents.dtype).expand(contents.shape)
        return _Outline({"id": example.name, **sample}, found)

    def _blobs(self, example: Example) -> dict[str, tuple[Blob, ...]]:
        blobs = {reads: each for reads, each in (("images", example.images), ("audio", example.audio)) if each}
        for reads in blobs:
            if reads not in self._builder.sized:
                remedy = "use the model's own processor, or remove the field"
                raise InputError(example.name, f"has {reads}, but the processor takes none", remedy)
        return blobs


def _raised(error: Exception) -> str:
    message = str(error).replace("\n", " ")
    return f"the processor raised {type(error).__name__}: {message}"


def _held_bytes(outline: _Outline) -> int:
    contents: int = sum(value.nbytes for name, value in outline.sample.items() if name in (*ROWS, "labels"))
    # An estimate of all other objects.
    return contents + 4096


class WebDataset(ProcessedDataset):
    """WebDataset shards, converted to samples by a processor. A field is a file extension.

    Parameters
    ----------
    shards : path, pattern or sequence of these
        Uncompressed tar files.
    processor, fields, **options
        As in `ProcessedDataset`.
    """

    def __init__(self, shards: Paths, processor: Any, fields: Mapping[str, str] = EVERY_USUAL, **options: Any) -> None:
        super().__init__(Shards(shards), processor, fields, **options)


class ParquetDataset(ProcessedDataset):
    """Parquet files, whose rows a processor converts to samples. A field is a column.

    For the parameters ``processor``, ``fields`` and ``**options``, see `ProcessedDataset`.
    """

    def __init__(self, files: Paths, processor: Any, fields: Mapping[str, str] = EVERY_USUAL, **options: Any) -> None:
        super().__init__(Table("parquet", files), processor, fields, **options)


class ArrowDataset(ProcessedDataset):
    """A folder written by ``save_to_disk`` of the `datasets` library, whose rows a processor converts to samples.

    For the parameters ``processor``, ``fields`` and ``**options``, see `ProcessedDataset`.
    """

    def __init__(
        self, folder: str | Path, processor: Any, fields: Mapping[str, str] = EVERY_USUAL, **options: Any
    ) -> None:
        super().__init__(Table("datasets", folder), processor, fields, **options)
