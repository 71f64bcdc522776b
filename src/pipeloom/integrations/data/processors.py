"""A processor of the `transformers` library in two halves: what it says of sizes, and what it makes of contents."""

from __future__ import annotations

import copy
import inspect
import io
import json
import sys
import threading
import wave
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.transformers.weights import check_own_code
from pipeloom.runtime.data.dataset import CorruptSampleError

_MEND = "mend it"


@dataclass(frozen=True)
class Outline:
    """What a part of a processor gives for one image or recording of some size, without its contents."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    given: Mapping[str, Tensor]


def load_processor(folder: str | Path) -> Any:
    """Load the processor of a folder, or its tokenizer where there is no more.

    The library makes no processor that knows videos where torchvision is not installed. Such a one is put together
    here, without the part for videos.

    Raises
    ------
    InputError
        When there is none.
    """
    try:
        import transformers
        from transformers.utils import is_torchvision_available
    except ImportError as error:
        raise InputError(
            "processor", "needs the transformers library", "pip install 'pipeloom[transformers]'"
        ) from error
    where = str(folder)
    if not Path(where).is_dir():
        raise InputError(
            f"processor = {where!r}", "is no folder", "give one that a processor or tokenizer was saved in"
        )
    try:
        name = None if is_torchvision_available() else _class_name(Path(where))
        kind = getattr(transformers, name, None) if name else None
        if kind is None or "video_processor" not in kind.get_attributes():
            return transformers.AutoProcessor.from_pretrained(where, trust_remote_code=False)
        return _without_videos(kind, where)
    except Exception as error:
        # The library's message blames whatever it missed in the end.
        for file in sorted(Path(where).glob("*.json")):
            _read_json(file)
        check_own_code(where, error)
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"processor = {where!r}", f"cannot be loaded ({message})", "save a processor there") from error


def _read_json(file: Path) -> Any:
    """Read a file of a processor or a model.

    Raises
    ------
    InputError
        It is damaged.
    """
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
    parts = {
        name: makers[name].from_pretrained(folder, trust_remote_code=False)
        for name in kind.get_attributes()
        if name in makers
    }
    own, _ = kind.get_processor_dict(folder)
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": _any_class})
    taken = {name: value for name, value in own.items() if name not in ("processor_class", *kind.get_attributes())}
    template = taken.pop("chat_template", None) or parts["tokenizer"].chat_template
    accepted = inspect.signature(kind.__init__).parameters
    taken = {name: value for name, value in taken.items() if name in accepted}
    return unchecked(**parts, video_processor=None, chat_template=template, **taken)


def _any_class(processor: Any, argument_name: str, argument: Any) -> type:
    """Instead of the check of a part's class, which looks for that of the part for videos: it is not there."""
    del processor, argument_name
    return type(argument)


class Sized:
    """Stands for the part of a processor that makes numbers of images, or of recordings, in its text half.

    It gives what follows from sizes, and zeros that take no memory: what the real part gives for empty contents of the
    same size.
    """

    content: str
    """Under which name the real part gives contents; what else it gives follows from sizes."""
    num_kept = 4096
    hasty: Mapping[str, Any] = MappingProxyType({})
    """Options that change contents and no sizes, for those that have nothing in them."""
    smallest: Any

    def __init__(self, real: Any) -> None:
        self.real = real
        self.options: dict[str, Any] = {}
        self.is_nested = False
        self._known: OrderedDict[Any, Outline] = OrderedDict()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    def __call__(self, given: Any, **options: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        # The same for all images of a processor.
        self.options, self.is_nested = options, isinstance(given, (list, tuple)) and isinstance(given[0], (list, tuple))
        outlines = [self.outline(self.size_of(each)) for each in _flat(given)]
        axes = self.axes
        shape = joined_shape([outline.shape for outline in outlines], axes[self.content])
        found: dict[str, Any] = {self.content: torch.zeros((), dtype=outlines[0].dtype).expand(shape)}
        for name in outlines[0].given:
            found[name] = torch.cat([outline.given[name] for outline in outlines], axes[name])
        return BatchFeature(found)

    preprocess = __call__

    def size_of(self, given: Any) -> Any:
        """What says how large an image or a recording is."""
        raise NotImplementedError

    def blank(self, size: Any) -> Any:
        """One of that size, with nothing in it."""
        raise NotImplementedError

    def stand_in(self, size: Any) -> Any:
        """What the text half is given for one of that size."""
        return self.blank(size)

    def measure(self, blob: Blob) -> Any:
        """The size, as the header says it."""
        raise NotImplementedError

    def decode(self, blob: Blob) -> Any:
        """The contents, as the real part takes them."""
        raise NotImplementedError

    def outline(self, size: Any) -> Outline:
        """What is given for one of a size."""
        with self._lock:
            known = self._known.get(size)
        if known is None:
            contents, given = self.run(self.blank(size), **self.hasty)
            known = Outline(tuple(contents.shape), self.dtype, given)
            with self._lock:
                self._known[size] = known
                if len(self._known) > self.num_kept:
                    self._known.popitem(last=False)
        return known

    @cached_property
    def axes(self) -> dict[str, int]:
        """By entry, the dimension along which the real part joins the images, or recordings, of one sample.

        Some processors have a dimension of samples before it.
        """
        one, two = self._one_and_two
        apart = {name: [a != b for a, b in zip(one[name].shape, two[name].shape, strict=True)] for name in one}
        return {name: sides.index(True) if True in sides else 0 for name, sides in apart.items()}

    @cached_property
    def joins(self) -> bool:
        """Whether the real part gives for several images of one sample what it gives for each of them."""
        one, two = self._one_and_two
        joined = {name: torch.cat([each, each], self.axes[name]) for name, each in one.items()}
        return all(torch.equal(each, two[name]) for name, each in joined.items())

    @cached_property
    def _one_and_two(self) -> list[dict[str, Tensor]]:
        samples = [[self.blank(self.smallest)] * count for count in (1, 2)]
        every = [self.run(*([items] if self.is_nested else items), **self.hasty) for items in samples]
        return [{self.content: contents, **given} for contents, given in every]

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of contents, as the real part gives them."""
        return self.run(self.blank(self.smallest))[0].dtype

    def run(self, *items: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the real part on the images or recordings of one sample."""
        options = {**self.options, **more, "return_tensors": "pt"}
        found = {name: _tensor(value) for name, value in self.real(list(items), **options).items()}
        return found.pop(self.content), found


class SizedImages(Sized):
    """Images; their size is width and height."""

    content = "pixel_values"
    hasty = MappingProxyType({"do_rescale": False, "do_normalize": False, "resample": 0})
    smallest = (64, 64)

    def size_of(self, given: Any) -> tuple[int, int]:
        """As `Sized`."""
        width, height = given.size
        return width, height

    def blank(self, size: tuple[int, int]) -> Any:
        """As `Sized`."""
        return _pillow().new("RGB", size)

    def stand_in(self, size: tuple[int, int]) -> Any:
        """As `Sized`: of the least memory."""
        return _pillow().new("1", size)

    def outline(self, size: tuple[int, int]) -> Outline:
        """As `Sized`: of images that are resized to one size first, once."""
        return super().outline(self._resized(size))

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size to which the real part brings an image before all else; what it is where that is not known."""
        rule = getattr(sys.modules[type(self.real).__module__], "smart_resize", None)
        if rule is None or not getattr(self.real, "do_resize", False) or self.options.keys() & {"size", "do_resize"}:
            return size
        bounds = self.real.size
        factor, least, most = (
            self.real.patch_size * self.real.merge_size,
            bounds["shortest_edge"],
            bounds["longest_edge"],
        )
        try:
            height, width = rule(size[1], size[0], factor=factor, min_pixels=least, max_pixels=most)
            again = rule(height, width, factor=factor, min_pixels=least, max_pixels=most)
        except (TypeError, ValueError):
            return size
        return (width, height) if again == (height, width) else size

    def measure(self, blob: Blob) -> tuple[int, int]:
        """As `Sized`."""
        return image_size(blob)

    def decode(self, blob: Blob) -> Any:
        """As `Sized`."""
        return decode(blob)


class SizedSounds(Sized):
    """Recordings; their size is how many samples they have."""

    content = "input_features"
    # Hardly any two are equally long.
    num_kept = 256
    smallest = 1600

    def size_of(self, given: Any) -> int:
        """As `Sized`."""
        return len(given)

    def blank(self, size: int) -> Any:
        """As `Sized`."""
        return np.zeros(size, np.float32)

    def measure(self, blob: Blob) -> int:
        """As `Sized`."""
        return wave_length(blob, self.real.sampling_rate)

    def decode(self, blob: Blob) -> Any:
        """As `Sized`."""
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
    """Return the shape of tensors joined along a dimension, padded at the end of the others."""
    sides = list(zip(*shapes, strict=True))
    return tuple(sum(side) if place == axis else max(side) for place, side in enumerate(sides))


# ------------------------------------------------------------------ images


def image_size(blob: Blob) -> tuple[int, int]:
    """Width and height as its header says; an image that seems to be cut off is decoded to see whether it is.

    Raises
    ------
    CorruptSampleError
    """
    Image = _pillow()
    try:
        with blob.open() as file, Image.open(file) as image:
            width, height = image.size
            size = (height, width) if _lies(image) else (width, height)
            mark = _ENDS.get(image.format)
            if mark is not None:
                # The tail is read from the file itself, where Pillow has read the head.
                file.seek(0, io.SEEK_END)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                mark = None if mark in file.read() else mark
    except Exception as error:
        raise _corrupt(blob, error) from error
    if mark is not None:
        decode(blob)
    return size


def decode(blob: Blob) -> Any:
    """Decode an image, upright and in three colours.

    Raises
    ------
    CorruptSampleError
    """
    Image = _pillow()
    try:
        with blob.open() as file, Image.open(file) as image:
            if image.format in _TURNED:
                from PIL import ImageOps

                return ImageOps.exif_transpose(image).convert("RGB")
            return image.convert("RGB")
    except Exception as error:
        raise _corrupt(blob, error) from error


_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
"""What stands at the end of a whole image."""
_TAIL_BYTES = 64
_TURNED = ("JPEG", "MPO")
"""Formats whose header says how the camera was held; of others that may stand behind the contents."""
_ORIENTATION = 0x0112


def _lies(image: Any) -> bool:
    return image.format in _TURNED and image.getexif().get(_ORIENTATION, 1) >= 5


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("images", "need Pillow", "pip install 'pipeloom[datasets]'") from error
    return Image


def _corrupt(blob: Blob, error: Exception) -> CorruptSampleError:
    message = str(error).replace("\n", " ")
    if "cannot identify image file" in message:
        message = "is no image that Pillow knows"
    return CorruptSampleError(blob.name, f"cannot be read as an image ({message})", _MEND)


# ------------------------------------------------------------------ recordings


def wave_length(blob: Blob, rate: int) -> int:
    """How many samples a WAV file has, as its header says.

    Raises
    ------
    InputError
        It has another rate than the processor wants, or is damaged.
    """
    with _wave(blob) as (file, size):
        found: int = file.getframerate()
        count: int = file.getnframes()
        held = count * file.getnchannels() * file.getsampwidth()
    if held > size:
        raise CorruptSampleError(blob.name, f"has {size} bytes, and its header says {held}", _MEND)
    if found != rate:
        raise InputError(blob.name, f"has {found} samples a second, and the processor wants {rate}", "resample it")
    return count


def decode_wave(blob: Blob) -> Any:
    """Decode a WAV file: its channels' mean, from -1 to 1.

    Raises
    ------
    CorruptSampleError
    """
    with _wave(blob) as (file, _):
        width, channels = file.getsampwidth(), file.getnchannels()
        data = file.readframes(file.getnframes())
    kinds: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}
    if width not in kinds:
        raise InputError(blob.name, f"has {8 * width} bits a sample", "give 8, 16 or 32")
    if len(data) % (width * channels):
        raise CorruptSampleError(blob.name, "ends in the middle of a sample", _MEND)
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
    # RuntimeError: a chunk that ends behind the file.
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        message = str(error) or "it ends early"
        raise CorruptSampleError(blob.name, f"cannot be read as a WAV file ({message})", _MEND) from error


# ------------------------------------------------------------------ the text half


def with_sizes(processor: Any) -> tuple[Any, dict[str, Sized]]:
    """Return the text half of a processor, and what stands for its other parts, by what modules read."""
    half = copy.copy(processor)
    found: dict[str, Sized] = {}
    kinds: dict[str, tuple[str, type[Sized]]]
    kinds = {"images": ("image_processor", SizedImages), "audio": ("feature_extractor", SizedSounds)}
    for reads, (name, kind) in kinds.items():
        real = getattr(processor, name, None)
        if real is not None:
            found[reads] = kind(real)
            setattr(half, name, found[reads])
    return half, found
