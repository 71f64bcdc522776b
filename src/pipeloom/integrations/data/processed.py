"""ProcessedDataset: examples as a processor of the `transformers` library makes samples of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from pipeloom.errors import InputError, PipeloomError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.data.chat import check_words, conversation, media, plain
from pipeloom.integrations.data.examples import Example, Fields, read_example
from pipeloom.integrations.data.processors import Outline as SizedOutline
from pipeloom.integrations.data.processors import Sized, load_processor, with_sizes
from pipeloom.integrations.data.sources import Paths, Shards, Source, Table
from pipeloom.runtime.dataset import CorruptSampleError, Dataset
from pipeloom.runtime.model import Model
from pipeloom.spec import batch_from_dicts
from pipeloom.spec.model import num_instances

EVERY_USUAL: Mapping[str, str] = MappingProxyType({})
_IGNORED = -100
"""Label of what is no target."""
_KEPT_BYTES = 64 * 2**20
_ROWS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor gives of every token."""
_SPOKEN = {"images": "image", "audio": "audio"}
"""What messages call what modules read."""
_Blanks = dict[str, list[Any]]
"""Images and recordings with nothing in them, by what modules read."""
TrainOn = Literal["assistant", "all"]
Function = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From an example's fields to messages or text, prompt, image, audio."""


@dataclass(frozen=True)
class _Media:
    """Images or recordings of a sample."""

    blobs: tuple[Blob, ...]
    promised: tuple[SizedOutline, ...]
    """What the processor is to give for each."""

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows of contents each has."""
        return tuple(outline.shape[0] for outline in self.promised)


@dataclass(frozen=True)
class _Outline:
    """A sample without contents, and where these are, by what modules read."""

    sample: dict[str, Any]
    media: dict[str, _Media]


class _Outlines:
    """Those that were made last, by number, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Outline] = OrderedDict()
        self._bytes = 0

    def get(self, i: int) -> _Outline | None:
        with self._lock:
            found = self._kept.get(i)
            if found is not None:
                self._kept.move_to_end(i)
            return found

    def add(self, i: int, made: _Outline) -> _Outline:
        with self._lock:
            if i not in self._kept:
                self._kept[i] = made
                self._bytes += _held_bytes(made)
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= _held_bytes(self._kept.popitem(last=False)[1])
        return made


class ProcessedDataset(Dataset):
    """Examples of a source, as a processor makes samples of them.

    Parameters
    ----------
    source : Source
    processor : path or object
        The folder of a processor or a tokenizer, or one itself.
    fields : mapping
        Which fields of an example are its ``messages``, ``text``, ``prompt``, ``image`` and ``audio``, see `Fields`; by
        default those with the usual names.
    train_on : "assistant" or "all"
        Whether only what the assistant says is a target, or every token of the text.
    function : callable or None
        From an example's fields to others, named as in `Fields`: for data of any form. Large fields are given as
        `Blob`, whose bytes are read by ``read()``.
    exclude : collection of str
        Names of samples, as messages have them, that only decoding shows to be damaged: ``skip_corrupt`` of `Batches`
        leaves them out.

    Attributes
    ----------
    num_decoded : int
        Images and recordings that this process has decoded.
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
        self.processor = load_processor(self._given) if isinstance(self._given, str) else self._given
        self._half, self._sized = with_sizes(self.processor)
        self._tokenizer = getattr(self.processor, "tokenizer", self.processor)
        holders = (self.processor, self._tokenizer)
        self._tokens = {
            token: kind
            for kind in ("image", "audio", "video")
            for token in (getattr(holder, f"{kind}_token", None) for holder in holders)
            if token
        }
        """What stands for contents in a text, and of which kind."""
        self._chats = bool(getattr(self.processor, "chat_template", None) or self._tokenizer.chat_template)
        # Tokenizers bear no two threads at a time.
        self._speaking = threading.Lock()
        self._model: Model | None = None
        # Of data and processor alone: whatever is bound to a model has them with it.
        self._known = _Outlines()
        self._lock = threading.Lock()
        self.num_decoded = 0

    def __getstate__(self) -> dict[str, Any]:
        """Travel as the processor's folder: every process loads it for itself."""
        names = ("source", "train_on", "function", "exclude", "_fields", "_given")
        return {name: value for name, value in vars(self).items() if name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load what was left out."""
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        """As many as the source has examples."""
        return len(self.source)

    def unknown(self, names: Collection[str]) -> list[str]:
        """Return those names that no sample has."""
        return sorted(set(names) - {self.source.name(i) for i in range(len(self))}) if names else []

    def bind(self, model: Model) -> Dataset:
        """Know the model: what it says of sizes and targets, and which modules read images.

        Raises
        ------
        InputError
            When it describes no samples.
        """
        if model.describe is None:
            raise InputError("model.describe", "is None", "let it tell the sizes of what the processor gives")
        # Not by copy, which goes as to another process, and loads the processor anew.
        bound = object.__new__(type(self))
        vars(bound).update(vars(self))
        bound._model, bound.num_decoded = model, 0
        return bound

    def sizes(self, i: int) -> dict[str, Any]:
        """As `Dataset.sizes`, of headers and texts."""
        model, sample = self._of_model(), self._outline(i).sample
        assert model.describe is not None
        try:
            return {**model.describe(sample), "targets": model.num_targets(sample)}
        except InputError as error:
            # A sample that can be left out stays one.
            raise type(error)(f"{self.source.name(i)}: {error.entity}", error.problem, error.remedy) from error

    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool = True) -> dict[str, Any]:
        """As `Dataset.load`: the sample with the contents that are asked for, and zeros for others."""
        # Labels are tokens, which sizes want on every rank.
        del loss
        outline = self._outline(i)
        found = {}
        for reads in outline.media:
            asked = self._asked(outline, reads, module, instances)
            if asked:
                name = self._sized[reads].content
                found[name] = self._contents(reads, outline, asked)
        return {**outline.sample, **found}

    def _of_model(self) -> Model:
        if self._model is None:
            raise PipeloomError("the dataset was told no model; call bind(model)")
        return self._model

    def _asked(self, outline: _Outline, reads: str, module: str, instances: tuple[int, ...]) -> set[int]:
        """Numbers of the images, or recordings, that are to be decoded."""
        model, given = self._of_model(), outline.media[reads]
        every = set(range(len(given.blobs)))
        if not instances:
            return set()
        if model.module(module).reads != reads:
            # Where no module reads them by themselves, they enter with the sample.
            return set() if any(each.reads == reads for each in model.modules) else every
        if sum(given.rows) == len(every):
            return set(instances)
        assert model.describe is not None
        count = num_instances(model.module(module).reads, batch_from_dicts([model.describe(outline.sample)]).samples[0])
        if count == len(every):
            return set(instances)
        # Of images in tiles, each tile is an instance.
        of_row = [number for number, rows in enumerate(given.rows) for _ in range(rows)]
        return {of_row[each] for each in instances} if count == len(of_row) else every

    def _contents(self, reads: str, outline: _Outline, asked: set[int]) -> Tensor:
        given, promised = outline.media[reads], outline.sample[self._sized[reads].content]
        contents = torch.zeros(promised.shape, dtype=promised.dtype)
        begin = 0
        for number, (blob, rows) in enumerate(zip(given.blobs, given.rows, strict=True)):
            if number in asked:
                one = self._decoded(self._sized[reads], blob, given.promised[number], outline.sample["id"])
                contents[(slice(begin, begin + rows), *(slice(side) for side in one.shape[1:]))] = one
            begin += rows
        return contents

    def _decoded(self, sized: Sized, blob: Blob, promised: SizedOutline, name: str) -> Tensor:
        remedy = f'mend it, or leave the sample out by skip_corrupt and exclude = ["{name}"], and resume'
        try:
            item = sized.decode(blob)
        except CorruptSampleError as error:
            # The plan and the other ranks count with it.
            raise InputError(error.entity, error.problem, remedy) from error
        with self._lock:
            self.num_decoded += 1
        try:
            contents, given = sized.run(item)
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
        # Two threads may make one; they make the same.
        return self._known.get(i) or self._known.add(i, self._make(i))

    def _make(self, i: int) -> _Outline:
        if self.source.name(i) in self.exclude:
            raise CorruptSampleError(self.source.name(i), "is excluded")
        example = read_example(self.source, i, self._fields, self.function)
        blobs = {reads: each for reads, each in (("images", example.images), ("audio", example.audio)) if each}
        for reads in blobs:
            if reads not in self._sized:
                remedy = "give the model's own processor, or name no such field"
                raise InputError(example.name, f"has {reads}, and the processor takes none", remedy)
        blanks: _Blanks = {
            reads: [self._sized[reads].stand_in(self._sized[reads].measure(blob)) for blob in each]
            for reads, each in blobs.items()
        }
        try:
            with self._speaking:
                sample = self._sample(example, blanks)
        except PipeloomError:
            raise
        except Exception as error:
            # It refuses some samples for what they are: images of odd shapes, texts that it cannot write.
            raise CorruptSampleError(example.name, _raised(error)) from error
        found = {}
        for reads, each in blanks.items():
            sized = self._sized[reads]
            found[reads] = _Media(blobs[reads], tuple(sized.outline(sized.size_of(blank)) for blank in each))
            contents = sample[sized.content]
            # Some processors copy the zeros.
            sample[sized.content] = torch.zeros((), dtype=contents.dtype).expand(contents.shape)
        return _Outline({"id": example.name, **sample}, found)

    def _sample(self, example: Example, blanks: _Blanks) -> dict[str, Any]:
        chat = example.messages is not None
        if chat and not self._chats:
            shown = self._given if isinstance(self._given, str) else type(self._given).__name__
            remedy = "set tokenizer.chat_template and save it there, or name a processor that has one"
            raise InputError(f"processor = {shown!r}", f"has no chat template, and {example.name} has messages", remedy)
        if not chat and not (self._chats and (blanks or example.prompt)):
            return self._plain(example, blanks)
        asked = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.text}]
        given = asked if example.messages is None else example.messages
        counts = {_SPOKEN[reads]: len(blanks.get(reads, ())) for reads in (*example.kinds, *blanks)}
        messages = conversation(given, example.name, counts)
        check_words(messages, self._tokens, example.name)
        return self._chat(messages, blanks, example.name)

    def _plain(self, example: Example, blanks: _Blanks) -> dict[str, Any]:
        """Images, what is asked, and the answer, one after the other."""
        before, text = example.prompt, example.text or ""
        if not before + text and not blanks:
            raise CorruptSampleError(example.name, "has no words", "give it some")
        self._check_places(before + text, blanks, example.name)
        for reads, each in reversed(blanks.items()):
            place = getattr(self.processor, f"{_SPOKEN[reads]}_token", None) or ""
            if place not in before + text:
                before = place * len(each) + before
        sample = self._process(before + text, blanks, special=True)
        ids, end = sample["input_ids"], self._tokenizer.eos_token_id
        if end is not None and int(ids[-1]) != end:
            sample |= {name: _longer(sample[name], name, end) for name in _ROWS if name in sample}
            ids = sample["input_ids"]
        begin = 0
        if before and self.train_on == "assistant":
            begin = len(self._process(before, blanks, special=True)["input_ids"])
        return {**sample, "labels": self._labels(ids, [(begin, len(ids))])}

    def _check_places(self, text: str, blanks: _Blanks, where: str) -> None:
        """Refuse a text that places contents by the processor's own tokens, and others than there are."""
        for token, kind in self._tokens.items():
            have = sum(len(each) for reads, each in blanks.items() if _SPOKEN[reads] == kind)
            if (places := text.count(token)) not in (0, have):
                problem = f"has the processor's token for {kind}, {token!r}, {places} times for {have} of them"
                raise CorruptSampleError(where, problem, "write the word otherwise, or as often as there are")

    def _chat(self, messages: list[dict[str, Any]], blanks: _Blanks, where: str) -> dict[str, Any]:
        whole = self._render(messages)
        sample = self._process(whole, blanks)
        ids = sample["input_ids"]
        if self.train_on == "all":
            return {**sample, "labels": self._labels(ids, [(0, len(ids))])}

        def length(count: int, prompt: bool) -> int:
            """Tokens of the first messages, as they begin the whole."""
            if count == len(messages):
                return len(ids)
            first = messages[:count]
            text = self._render(first, prompt)
            if whole.startswith(text):
                here = {reads: each[: media(first, _SPOKEN[reads])] for reads, each in blanks.items()}
                before = self._process(text, here)["input_ids"] if text else ids[:0]
                if torch.equal(ids[: len(before)], before):
                    return len(before)
            raise InputError(
                f"{where}: messages",
                "the chat template writes the beginning of a conversation otherwise than the whole of it",
                'train_on = "all", or a template that does not',
            )

        if messages[0]["role"] == "assistant":
            remedy = 'let a user or the system speak first, or train_on = "all"'
            raise CorruptSampleError(f"{where}: messages", "begins with the assistant, whom nobody asked", remedy)
        said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        return {**sample, "labels": self._labels(ids, [(length(i, True), length(i + 1, False)) for i in said])}

    def _render(self, messages: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        text: str = self.processor.apply_chat_template(plain(messages), tokenize=False, add_generation_prompt=prompt)
        return text

    def _process(self, text: str, blanks: _Blanks, special: bool = False) -> dict[str, Any]:
        options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": special}
        if self._sized:
            given = {reads: each for reads, each in blanks.items() if each}
            found = self._half(text=[text], **given, **options)
        else:
            found = self._tokenizer(text, **options)
        out = {name: torch.as_tensor(value) for name, value in found.items()}
        return {name: value.reshape(-1) if name in _ROWS else value for name, value in out.items()}

    def _labels(self, ids: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        labels = torch.full_like(ids, _IGNORED)
        for begin, end in spans:
            labels[begin:end] = ids[begin:end]
        # Places of images are no words.
        for holder in (self.processor, self._tokenizer):
            for name in ("image_token_id", "audio_token_id", "video_token_id"):
                token = getattr(holder, name, None)
                if token is not None:
                    labels[ids == token] = _IGNORED
        return labels


def _raised(error: Exception) -> str:
    message = str(error).replace("\n", " ")
    return f"the processor raised {type(error).__name__}: {message}"


def _longer(row: Tensor, name: str, end: int) -> Tensor:
    return torch.cat([row, row.new_full((1,), {"input_ids": end, "attention_mask": 1}.get(name, 0))])


def _held_bytes(outline: _Outline) -> int:
    contents: int = sum(value.nbytes for name, value in outline.sample.items() if name in (*_ROWS, "labels"))
    # What else there is.
    return contents + 4096


class WebDataset(ProcessedDataset):
    """Shards of WebDataset, as a processor makes samples of them; a field is an extension.

    Parameters
    ----------
    shards : path, pattern or sequence of these
        Tar files that are not compressed.
    processor, fields, **options
        As `ProcessedDataset`.
    """

    def __init__(self, shards: Paths, processor: Any, fields: Mapping[str, str] = EVERY_USUAL, **options: Any) -> None:
        super().__init__(Shards(shards), processor, fields, **options)


class ParquetDataset(ProcessedDataset):
    """Parquet files, as a processor makes samples of their rows; a field is a column.

    Parameters
    ----------
    files : path, pattern or sequence of these
    processor, fields, **options
        As `ProcessedDataset`.
    """

    def __init__(self, files: Paths, processor: Any, fields: Mapping[str, str] = EVERY_USUAL, **options: Any) -> None:
        super().__init__(Table("parquet", files), processor, fields, **options)


class ArrowDataset(ProcessedDataset):
    """A folder that ``save_to_disk`` of the `datasets` library wrote, as a processor makes samples of its rows.

    Parameters
    ----------
    folder : path
    processor, fields, **options
        As `ProcessedDataset`.
    """

    def __init__(
        self, folder: str | Path, processor: Any, fields: Mapping[str, str] = EVERY_USUAL, **options: Any
    ) -> None:
        super().__init__(Table("datasets", folder), processor, fields, **options)
