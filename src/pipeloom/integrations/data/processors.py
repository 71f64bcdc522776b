"""Split a processor of the `transformers` library into a half that needs only sizes, and one that needs contents."""

from __future__ import annotations

import copy
import inspect
import io
import json
import sys
import wave
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.transformers.weights import check_own_code
from pipeloom.runtime.data.dataset import CorruptSampleError

_REPAIR = "repair it"


@dataclass(frozen=True)
class Outline:
    """Shape and dtype of a processor's output for one image or recording of a given size."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    given: Mapping[str, Tensor]
    sizes: tuple[Any, ...] = ()
    """Sizes of the pieces into which the processor cuts the recording."""


def load_processor(folder: str | Path) -> Any:
    """Load the processor of a folder, or its tokenizer if there is no processor.

    Without torchvision, the library cannot create processors that support videos. These are created here without the
    video processor.
    """
    try:
        import transformers
        from transformers.utils import is_torchvision_available
    except ImportError as error:
        remedy = "pip install 'pipeloom[transformers]'"
        raise InputError("processor", "needs the transformers library", remedy) from error
    where = str(folder)
    if not Path(where).is_dir():
        remedy = "give the folder of a saved processor or tokenizer"
        raise InputError(f"processor = {where!r}", "is not a folder", remedy)
    try:
        name = None if is_torchvision_available() else _class_name(Path(where))
        kind = getattr(transformers, name, None) if name else None
        if kind is None or "video_processor" not in kind.get_attributes():
            return transformers.AutoProcessor.from_pretrained(where, trust_remote_code=False)
        return _without_videos(kind, where)
    except Exception as error:
        # The library's message names only the last of its attempts, so look for damaged files first.
        for file in sorted(Path(where).glob("*.json")):
            _read_json(file)
        check_own_code(where, error)
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"processor = {where!r}", f"cannot be loaded ({message})", "save a processor there") from error


def _read_json(file: Path) -> Any:
    """Read a JSON file of a processor or a model. Raise `InputError` if it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(str(file), f"cannot be read as JSON ({error})", "copy or save it again") from error


def _class_name(folder: Path) -> str | None:
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = folder / file
        if path.is_file() and (name := _read_json(path).get("processor_class")):
            return str(name)
    path = folder / "config.json"
    if not path.is_file():
        return None
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    found: str | None = PROCESSOR_MAPPING_NAMES.get(_read_json(path).get("model_type"))
    return found


def _without_videos(kind: Any, folder: str) -> Any:
    import transformers

    makers = {
        "image_processor": transformers.AutoImageProcessor,
        "tokenizer": transformers.AutoTokenizer,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    names = [name for name in kind.get_attributes() if name in makers]
    parts = {name: makers[name].from_pretrained(folder, trust_remote_code=False) for name in names}
    own, _ = kind.get_processor_dict(folder)
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": _any_class})
    template = own.get("chat_template") or parts["tokenizer"].chat_template
    accepted = inspect.signature(kind.__init__).parameters.keys() - {"chat_template", *kind.get_attributes()}
    taken = {name: value for name, value in own.items() if name in accepted}
    return unchecked(**parts, video_processor=None, chat_template=template, **taken)


def _any_class(processor: Any, argument_name: str, argument: Any) -> type:
    """Replaces the library's class check of a part, which needs the class of the missing video processor."""
    del processor, argument_name
    return type(argument)


class Sized:
    """Replaces the image processor or feature extractor in the text half of a processor.

    It returns the real part's output for blank contents of the same size. Contents are zeros that take no memory.
    """

    content: str
    """Name of the contents in the real part's output. All other outputs depend only on sizes."""
    num_kept = 4096
    """Maximum number of cached outlines."""
    blank_options: Mapping[str, Any] = MappingProxyType({})
    """Options that speed up blank contents. They change contents, but no sizes."""
    smallest: Any
    """A small valid size."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.options: dict[str, Any] = {}
        self.is_nested = False
        self.passed: tuple[Any, ...] = ()
        """Sizes in the first call since it was last emptied."""
        self._known = lru_cache(self.num_kept)(self._outline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    def __call__(self, given: Any, **options: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        # These are the same for all calls of a processor.
        self.options, self.is_nested = options, isinstance(given, (list, tuple)) and isinstance(given[0], (list, tuple))
        joined = self.joined([self.size_of(each) for each in _flat(given)])
        self.passed = self.passed or joined.sizes
        return BatchFeature({self.content: torch.zeros((), dtype=joined.dtype).expand(joined.shape), **joined.given})

    preprocess = __call__

    def joined(self, sizes: Sequence[Any]) -> Outline:
        """Return the outline of several images or recordings together."""
        outlines = [self.outline(size) for size in sizes]
        shape = joined_shape([outline.shape for outline in outlines], self.axes[self.content])
        names = outlines[0].given
        given = {name: torch.cat([outline.given[name] for outline in outlines], self.axes[name]) for name in names}
        return Outline(shape, outlines[0].dtype, given, tuple(sizes))

    def pieces(self, size: Any, passed: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the sizes of the pieces of an image or recording, of which the processor passed these sizes."""
        del passed
        return (size,)

    def cut(self, given: Any, sizes: Sequence[Any]) -> list[Any]:
        """Cut decoded contents into pieces of these sizes."""
        del sizes
        return [given]

    def size_of(self, given: Any) -> Any:
        """Return the size of an image or a recording."""
        raise NotImplementedError

    def blank(self, size: Any) -> Any:
        """Return blank contents of a size."""
        raise NotImplementedError

    def stand_in(self, size: Any) -> Any:
        """Return the text half's input for contents of a size."""
        return self.blank(size)

    def measure(self, blob: Blob) -> Any:
        """Read the size from the header."""
        raise NotImplementedError

    def decode(self, blob: Blob) -> Any:
        """Decode the contents for the real part."""
        raise NotImplementedError

    def outline(self, size: Any) -> Outline:
        """Return the outline for a size."""
        return self._known(size)

    def _outline(self, size: Any) -> Outline:
        contents, given = self.run(self.blank(size), **self.blank_options)
        return Outline(tuple(contents.shape), self.dtype, given)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The dimension along which the real part concatenates the images or recordings of a sample, by entry.

        It is not 0 for processors with a leading dimension of samples.
        """
        one, two = self._one_and_two
        apart = {name: [a != b for a, b in zip(one[name].shape, two[name].shape, strict=True)] for name in one}
        return {name: sides.index(True) if True in sides else 0 for name, sides in apart.items()}

    @cached_property
    def joins(self) -> bool:
        """Whether the real part processes the images of a sample independently."""
        one, two = self._one_and_two
        joined = {name: torch.cat([each, each], self.axes[name]) for name, each in one.items()}
        return all(torch.equal(each, two[name]) for name, each in joined.items())

    @cached_property
    def _one_and_two(self) -> list[dict[str, Tensor]]:
        samples = [[self.blank(self.smallest)] * count for count in (1, 2)]
        every = [self.run(*([items] if self.is_nested else items), **self.blank_options) for items in samples]
        return [{self.content: contents, **given} for contents, given in every]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the real part's contents."""
        return self.run(self.blank(self.smallest))[0].dtype

    def run(self, *items: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the real part on the images or recordings of a sample. Return the contents and all other outputs."""
        options = {**self.options, **more, "return_tensors": "pt"}
        found = {name: _tensor(value) for name, value in self.real(list(items), **options).items()}
        return found.pop(self.content), found


class SizedImages(Sized):
    """Replaces an image processor. A size is width and height."""

    content = "pixel_values"
    blank_options = MappingProxyType({"do_rescale": False, "do_normalize": False, "resample": 0})
    smallest = (64, 64)

    def size_of(self, given: Any) -> tuple[int, int]:
        width, height = given.size
        return width, height

    def blank(self, size: tuple[int, int]) -> Any:
        return _pillow().new("RGB", size)

    def stand_in(self, size: tuple[int, int]) -> Any:
        """As `Sized`: an image with one bit per pixel."""
        return _pillow().new("1", size)

    def outline(self, size: tuple[int, int]) -> Outline:
        """As `Sized`, cached by the size after resizing."""
        return super().outline(self._resized(size))

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size after the real part's resizing, or the original size if the rule is unknown."""
        rule = getattr(sys.modules[type(self.real).__module__], "smart_resize", None)
        if rule is None or not getattr(self.real, "do_resize", False) or self.options.keys() & {"size", "do_resize"}:
            return size
        bounds = {"min_pixels": self.real.size["shortest_edge"], "max_pixels": self.real.size["longest_edge"]}
        factor = self.real.patch_size * self.real.merge_size
        try:
            height, width = rule(size[1], size[0], factor=factor, **bounds)
            again = rule(height, width, factor=factor, **bounds)
        except (TypeError, ValueError):
            return size
        return (width, height) if again == (height, width) else size

    def measure(self, blob: Blob) -> tuple[int, int]:
        return image_size(blob)

    def decode(self, blob: Blob) -> Any:
        return decode(blob)


class SizedSounds(Sized):
    """Replaces a feature extractor. A size is the number of samples of a recording."""

    content = "input_features"
    # Few recordings have the same length.
    num_kept = 256
    smallest = 1600

    def size_of(self, given: Any) -> int:
        return len(given)

    def pieces(self, size: int, passed: tuple[int, ...]) -> tuple[int, ...]:
        """As `Sized`: the windows of a recording. Those beyond the processor's maximum are missing."""
        return passed if sum(passed) <= size else (size,)

    def cut(self, given: Any, sizes: Sequence[int]) -> list[Any]:
        return np.split(given, np.cumsum(sizes))[: len(sizes)]

    def blank(self, size: int) -> Any:
        return np.zeros(size, np.float32)

    def measure(self, blob: Blob) -> int:
        return wave_length(blob, self.real.sampling_rate)

    def decode(self, blob: Blob) -> Any:
        return decode_wave(blob)


def _flat(images: Any) -> list[Any]:
    if isinstance(images, (list, tuple)):
        return [each for image in images for each in _flat(image)]
    return [images]


def _tensor(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return torch.stack(list(value))
    return torch.as_tensor(value)


def joined_shape(shapes: Sequence[tuple[int, ...]], axis: int = 0) -> tuple[int, ...]:
    """Return the shape of tensors that are concatenated along a dimension and padded in the others."""
    sides = list(zip(*shapes, strict=True))
    return tuple(sum(side) if place == axis else max(side) for place, side in enumerate(sides))


# ------------------------------------------------------------------ images


def image_size(blob: Blob) -> tuple[int, int]:
    """Return width and height from the header of an image. An image that may be truncated is decoded to check it."""
    Image = _pillow()
    try:
        with blob.open() as file, Image.open(file) as image:
            width, height = image.size
            size = (height, width) if _orientation(image, file) in _SIDEWAYS else (width, height)
            mark = _ENDS.get(image.format)
            if mark is not None:
                # Read the end of the file, because Pillow has read only the header.
                file.seek(0, io.SEEK_END)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                mark = None if mark in file.read() else mark
    except Exception as error:
        raise _corrupt(blob, error) from error
    if mark is not None:
        decode(blob)
    return size


def decode(blob: Blob) -> Any:
    """Decode an image to RGB, with the orientation of its EXIF applied. Raise `CorruptSampleError` on failure."""
    Image = _pillow()
    try:
        with blob.open() as file, Image.open(file) as image:
            if _orientation(image, file) != 1:
                from PIL import ImageOps

                return ImageOps.exif_transpose(image).convert("RGB")
            return image.convert("RGB")
    except Exception as error:
        raise _corrupt(blob, error) from error


_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
"""Bytes at the end of a complete image, by format."""
_TAIL_BYTES = 64
_TURNED = ("JPEG", "MPO", "PNG", "WEBP", "AVIF")
"""Formats that Pillow does not rotate by itself."""
_EXIF_BYTES = 1 << 16
"""Bytes at the end of a PNG file in which its EXIF is looked for, about the largest of a JPEG file."""
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def _orientation(image: Any, file: BinaryIO) -> Any:
    """Return the orientation in the EXIF of an image that is not decoded yet, or 1 if there is none."""
    if image.format not in _TURNED:
        return 1
    if image.format == "PNG" and "exif" not in image.info:
        # It may follow the pixels. Pillow would decode them to find it, and reading every chunk reads the whole file.
        found = _png_exif(file)
        if found is None:
            return 1
        image.info["exif"] = found
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:
        # The pixels may be good though the EXIF is not. Pillow itself ignores such EXIF in JPEG.
        return 1


def _png_exif(file: BinaryIO) -> bytes | None:
    """Return the EXIF at the end of a PNG file, or None. The position in the file is kept."""
    before = file.tell()
    file.seek(-min(_EXIF_BYTES, file.seek(0, io.SEEK_END)), io.SEEK_CUR)
    tail = file.read()
    file.seek(before)
    # A chunk has its size, kind, contents and checksum.
    begin = tail.rfind(b"eXIf")
    end = begin + 4 + int.from_bytes(tail[max(0, begin - 4) : max(0, begin)], "big")
    is_chunk = begin >= 4 and tail[end : end + 4] == zlib.crc32(tail[begin:end]).to_bytes(4, "big")
    return tail[begin + 4 : end] if is_chunk else None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("images", "need Pillow", "pip install 'pipeloom[datasets]'") from error
    return Image


def _corrupt(blob: Blob, error: Exception) -> CorruptSampleError:
    message = str(error).replace("\n", " ")
    if "cannot identify image file" in message:
        message = "Pillow does not know the format"
    return CorruptSampleError(blob.name, f"cannot be read as an image ({message})", _REPAIR)


# ------------------------------------------------------------------ recordings


def wave_length(blob: Blob, rate: int) -> int:
    """Return the number of samples of a WAV file from its header, which must have this sampling rate."""
    with _wave(blob) as (file, size):
        found: int = file.getframerate()
        count: int = file.getnframes()
        held = count * file.getnchannels() * file.getsampwidth()
    if held > size:
        raise CorruptSampleError(blob.name, f"has {size} bytes, but its header says {held}", _REPAIR)
    if found != rate:
        raise InputError(blob.name, f"has {found} samples a second, but the processor needs {rate}", "resample it")
    return count


def decode_wave(blob: Blob) -> Any:
    """Decode a WAV file to the mean of its channels, from -1 to 1. Raise `CorruptSampleError` on failure."""
    with _wave(blob) as (file, _):
        width, channels = file.getsampwidth(), file.getnchannels()
        data = file.readframes(file.getnframes())
    kinds: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}
    if width not in kinds:
        raise InputError(blob.name, f"has {8 * width} bits a sample", "give 8, 16 or 32")
    if len(data) % (width * channels):
        raise CorruptSampleError(blob.name, "ends in the middle of a sample", _REPAIR)
    values: Any = np.frombuffer(data, kinds[width]).astype(np.float32)
    values = values / 128 - 1 if width == 1 else values / np.float32(2 ** (8 * width - 1))
    return values.reshape(-1, channels).mean(1)


@contextmanager
def _wave(blob: Blob) -> Iterator[tuple[Any, int]]:
    try:
        with blob.open() as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            with wave.open(file) as recording:
                yield recording, size
    # RuntimeError: a chunk extends beyond the end of the file.
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        message = str(error) or "it ends early"
        raise CorruptSampleError(blob.name, f"cannot be read as a WAV file ({message})", _REPAIR) from error


# ------------------------------------------------------------------ the text half


def with_sizes(processor: Any) -> tuple[Any, dict[str, Sized]]:
    """Return the text half of a processor, and the replacements of its other parts by `Module.reads`."""
    half = copy.copy(processor)
    found: dict[str, Sized] = {}
    kinds: tuple[tuple[str, str, type[Sized]], ...]
    kinds = (("images", "image_processor", SizedImages), ("audio", "feature_extractor", SizedSounds))
    for reads, name, kind in kinds:
        real = getattr(processor, name, None)
        if real is not None:
            found[reads] = kind(real)
            setattr(half, name, found[reads])
    return half, found
