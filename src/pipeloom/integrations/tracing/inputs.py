"""Inputs with which a model is traced: sizes of text, and images in the form that an encoder takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.fitting import Features, TraceError
from pipeloom.integrations.transformers.forms import FORMS, InputForm, first_set, function_path, merged, pair
from pipeloom.spec.architecture import ModuleArchitecture
from pipeloom.spec.batch import AUDIO_FRAMES_PER_SECOND
from pipeloom.spec.model import Reads

Call = Callable[[], Any]

TEXTS = ((1, 1024), (1, 512), (2, 512), (1, 256), (2, 768))
"""Sequences and their length. Counts are checked on the last. All are multiples of the chunks of scans, 64 to 256."""
SINGLE = tuple((1, length) for length in (1024, 512, 768, 1536, 1280))
"""The same with one sequence. Some models transpose their states, which copies them if there are several sequences."""
SIDES = ((1, 48), (1, 24), (2, 24), (1, 72), (2, 48))
"""Images, and patches along a side. All are multiples of what encoders merge (2, 3 or 4) and of their windows (8)."""
ALONE = tuple((1, side) for side in (48, 24, 32, 72, 40))
"""The same of one image, for encoders that mask several images, of which a kernel computes what is within each."""
COUNTS = tuple((count, 0) for count in (4, 2, 3, 7, 5))
"""The same of images that all have one size: several, as one alone may need other layouts."""

FRAMES = ((1, 3200), (1, 1600), (2, 1600), (1, 4800), (2, 3200))
"""Recordings, and frames of their spectra, of 10 ms. All are multiples of the windows of encoders (100 to 800)."""
_TILED = (2, 4)
"""Sides of an image in tiles, in halves of a tile."""
_FRAMES = 1000 // 10 // AUDIO_FRAMES_PER_SECOND
"""Frames of a spectrum to a frame of a sample."""


@dataclass(frozen=True)
class Encoder:
    """An encoder, and its inputs at several sizes."""

    name: str
    path: str
    reads: Reads
    function: Callable[..., Any]
    entries: Callable[[int, int], tuple[Features, dict[str, torch.Tensor]]]
    """Returns the arguments of the function for a number of images and of patches along a side."""
    sizes: tuple[tuple[int, int], ...]

    def calls(self) -> list[tuple[Features, Call]]:
        """Return the calls at several sizes."""
        every = [self.entries(*size) for size in self.sizes]
        return [(features, partial(self.function, **entries)) for features, entries in every]


def text_calls(model: Any, texts: Sequence[tuple[int, int]] = TEXTS, longer: int = 1) -> list[tuple[Features, Call]]:
    """Return calls of a language model on several sizes of text, ``longer`` times as long as usual."""
    taken = inspect.signature(model.forward).parameters
    out: list[tuple[Features, Call]] = []
    for count, short in texts:
        length = short * longer
        ids = torch.full((count, length), 5)
        if "input_ids" not in taken:
            out.append((Features((length,) * count), partial(model, ids)))
            continue
        given: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones(count, length, dtype=torch.int64),
            "use_cache": False,
        }
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            given = {name: value for name, value in given.items() if name in taken}
        if "mm_token_type_ids" in taken:
            given["mm_token_type_ids"] = torch.zeros(count, length, dtype=torch.int64)
        if "position_ids" in taken and not hasattr(model, "get_image_features"):
            given["position_ids"] = torch.arange(length).repeat(count, 1)
        out.append((Features((length,) * count), partial(model, **given)))
    return out


def joint_call(model: Any, encoder: Encoder, module: ModuleArchitecture) -> Call:
    """Return a call of the whole model on one text with one image."""
    size = next((each for each in encoder.sizes if each[0] == 1), (1, 0))
    features, pixels = encoder.entries(*size)
    place = getattr(model.config, "image_token_id", None)
    if place is None:
        raise InputError("model.config", "has no image_token_id", "describe the model in a .toml file")
    count = sum(map(module.outputs, features.lengths))
    ids = torch.cat([torch.full((16,), 5), torch.full((count,), int(place)), torch.full((16,), 5)])[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == place).long()
    return lambda: model(**pixels, **given)


def encoders_of(model: Any, given: Mapping[str, Any]) -> list[list[Encoder]]:
    """Return the encoders of a model, each with its calls for every form of input that it may take.

    A configuration that describes the language model and no encoder has none: only the encoder's parameters count.
    """
    found = []
    for name, reads, method in _FUNCTIONS:
        section = f"{name}_config"
        config = getattr(getattr(model, "config", None), section, None)
        if config is None or ("text_config" in given and section not in given):
            continue
        found_at = function_path(model, method)
        if found_at is None:
            raise InputError("model", f"has a {section}, and no {method}", "describe it in a .toml file")
        function, path = attrgetter(found_at)(model), _path(model, config)
        every = [
            Encoder(name, path, reads, function, partial(_entries, form, config, reads), sizes)
            for form in FORMS[reads](model, function)
            for sizes in _sizes(form, config, reads)
        ]
        if not every:
            problem = f"has an encoder ({name}) whose configuration has no image_size"
            raise InputError("model", problem, "describe it in a .toml file")
        # Encoders that mask several images, or run them in a loop, are traced with one.
        found.append(sorted(every, key=lambda each: each.sizes is ALONE))
    return found


def _sizes(form: InputForm, config: Any, reads: Reads) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the sizes at which an encoder is traced on a form of input, the best first; none if they are not known."""
    if reads == "audio":
        yield FRAMES if form.is_sized else COUNTS
    elif form.is_tiled or not form.is_sized:
        # Other forms of one size are tried in training only: here, the configuration has to know the size.
        known = first_set(config, ("image_size", "input_size"))
        if known is not None and form.blank(_TILED)[form.keys[0]].shape[-2:] == pair(known):
            yield COUNTS
    elif "image_sizes" not in form.keys:
        yield SIDES
        yield ALONE
    else:
        yield ALONE


def _entries(
    form: InputForm, config: Any, reads: Reads, count: int, side: int
) -> tuple[Features, dict[str, torch.Tensor]]:
    """Return instances without numbers, and their features: each tile of an image is an instance of the encoder.

    ``side`` is the number of patches along a side, or of frames.
    """
    if form.is_tiled or not form.is_sized:
        sides = _TILED
    else:
        one = form.blank((1, 1))
        unit = _frames(form) if reads == "audio" else math.isqrt(_num_patches(form, config, one))
        sides = (side // unit, 1 if reads == "audio" else side // unit)
    entries = form.blank(sides)
    length = _frames(form, sides) // _FRAMES if reads == "audio" else _num_patches(form, config, entries)
    tiles = entries[form.keys[0]].shape[1] if form.is_tiled else 1
    without = {
        key: each.new_empty(each.shape, dtype=torch.bfloat16, device="meta") if each.is_floating_point() else each
        for key, each in entries.items()
    }
    return Features((length // tiles,) * count * tiles), merged(form, [without] * count)


def _num_patches(form: InputForm, config: Any, entries: Mapping[str, torch.Tensor]) -> int:
    """Return the patches of one image."""
    for key in ("image_grid_thw", "image_grid_hw", "spatial_shapes", "target_sizes"):
        if key in entries:
            return int(entries[key].prod())
    if "image_position_ids" in entries:
        return entries["image_position_ids"].shape[1]
    pixels = entries[form.keys[0]]
    down, right = pair(first_set(config, ("patch_size",), 14))
    return int(pixels.shape[:-3].numel() * (pixels.shape[-2] // down) * (pixels.shape[-1] // right))


def _frames(form: InputForm, sides: tuple[int, int] = (1, 1)) -> int:
    """Return the frames of a recording: the side of its spectrum that grows, or else the longer one."""
    shape, longer = (form.blank(each)[form.keys[0]].shape for each in (sides, (2 * sides[0], sides[1])))
    return next((here for here, there in zip(shape, longer, strict=True) if here != there), max(shape))


def check_others(model: Any, given: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise `TraceError` if a model has another part with its own configuration that no encoder runs."""
    config: Any = getattr(model, "config", None)
    for section in getattr(config, "sub_configs", ()):
        part = getattr(config, section, None)
        if section in ("text_config", "vision_config", "audio_config") or (
            "text_config" in given and section not in given
        ):
            continue
        if part is None or part is config.get_text_config() or not (path := _path(model, part)):
            continue
        if any(name.startswith(f"{path}.") and name not in taken for name, _ in model.named_parameters()):
            raise TraceError("model", f"has a part with a {section}, which is not read", "describe it in a .toml file")


def _path(model: Any, config: Any) -> str:
    """Return the path of an encoder: the module with its configuration."""
    found = [path for path, m in model.named_modules() if getattr(m, "config", None) is config and path]
    return min(found, key=len, default="")


_FUNCTIONS: tuple[tuple[str, Reads, str], ...] = (
    ("vision", "images", "get_image_features"),
    ("audio", "audio", "get_audio_features"),
)
"""Name of an encoder, what it reads, and the library's method."""
