"""Inputs with which a model is traced: sizes of text, and images in the form that an encoder takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.fitting import Features
from pipeloom.spec.batch import AUDIO_FRAMES_PER_SECOND
from pipeloom.spec.model import Reads

Call = Callable[[], Any]

TEXTS = ((1, 1024), (1, 512), (2, 512), (1, 256), (2, 768))
"""Sequences and their length. Counts are checked on the last. All are multiples of the chunks of scans, 64 to 256."""
SIDES = ((1, 48), (1, 24), (2, 24), (1, 72), (2, 48))
"""Images, and patches along a side. All are multiples of what encoders merge (2, 3 or 4) and of their windows (8)."""
ALONE = tuple((1, side) for side in (48, 24, 32, 72, 40))
"""The same of one image, for encoders that mask several images, of which a kernel computes what is within each."""
COUNTS = tuple((count, 0) for count in (4, 2, 3, 7, 5))
"""The same of images that all have one size: several, as one alone may need other layouts."""

FRAMES = ((1, 3200), (1, 1600), (2, 1600), (1, 4800), (2, 3200))
"""Recordings, and frames of their spectra, of 10 ms. All are multiples of the windows of encoders (100 to 800)."""
_FRAMES = 1000 // 10 // AUDIO_FRAMES_PER_SECOND
"""Frames of a spectrum to a frame of a sample."""


@dataclass(frozen=True)
class Encoder:
    """An encoder and its calls at several sizes."""

    name: str
    path: str
    reads: Reads
    call: Callable[[int, int], tuple[Features, Call]]
    """Returns the call for a number of images and of patches along a side."""
    sizes: tuple[tuple[int, int], ...]

    def calls(self) -> list[tuple[Features, Call]]:
        """Return the calls at several sizes."""
        return [self.call(*size) for size in self.sizes]


def text_calls(model: Any, longer: int = 1) -> list[tuple[Features, Call]]:
    """Return calls of a language model on several sizes of text, ``longer`` times as long as usual."""
    taken = inspect.signature(model.forward).parameters
    out: list[tuple[Features, Call]] = []
    for count, short in TEXTS:
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

        def call(given: dict[str, Any] = given) -> Any:
            return model(**given)

        out.append((Features((length,) * count), call))
    return out


def joint_call(model: Any, merged: int) -> Call:
    """Return a call of the whole model on one text with one image, of which ``merged`` patches are one token."""
    vision = model.config.vision_config
    side = SIDES[1][1]
    pixels, grid = _patches(vision, 1, side)
    place = getattr(model.config, "image_token_id", None)
    if place is None:
        raise InputError("model.config", "has no image_token_id", "describe the model in a .toml file")
    count = side * side // merged
    ids = torch.cat([torch.full((16,), 5), torch.full((count,), int(place)), torch.full((16,), 5)])[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == place).long()
    return lambda: model(pixel_values=pixels, image_grid_thw=grid, **given)


def encoders_of(model: Any, given: Mapping[str, Any]) -> list[list[Encoder]]:
    """Return the encoders of a model, each with its calls for every form of input that it may take.

    A configuration that describes the language model and no encoder has none: only the encoder's parameters count.
    """
    found = []
    kinds: tuple[tuple[str, Reads, _Forms], ...] = (("vision", "images", _IMAGES), ("audio", "audio", _RECORDINGS))
    for name, reads, forms in kinds:
        section = f"{name}_config"
        config = getattr(getattr(model, "config", None), section, None)
        if config is None or ("text_config" in given and section not in given):
            continue
        method = f"get_{'image' if name == 'vision' else name}_features"
        if not hasattr(model, method):
            raise InputError("model", f"has a {section}, and no {method}", "describe it in a .toml file")
        taken = inspect.signature(getattr(model, method)).parameters
        if "args" in taken:  # it passes them on
            taken = inspect.signature(getattr(model.model, method)).parameters
        path = _path(model, config)
        required = {n for n, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        other = _sized if hasattr(model.config, "image_grid_pinpoints") else _tiles
        own = [
            Encoder(name, path, reads, partial(form, model, config), sizes)
            for form, (needs, sizes) in forms.items()
            if required <= set(needs) <= set(taken) and form is not other
        ]
        if not own:
            raise InputError(
                "model", f"has an encoder ({name}) that takes {', '.join(taken)}", "describe it in a .toml file"
            )
        found.append(own)
    _check_others(model, given)
    return found


def _check_others(model: Any, given: Mapping[str, Any]) -> None:
    """Raise `InputError` if a model has another part with a configuration of its own, whose inputs are not known."""
    config: Any = getattr(model, "config", None)
    for section in getattr(config, "sub_configs", ()):
        part = getattr(config, section, None)
        if section in ("text_config", "vision_config", "audio_config") or (
            "text_config" in given and section not in given
        ):
            continue
        if part is not None and part is not config.get_text_config() and _path(model, part):
            raise InputError("model", f"has a part with a {section}, which is not read", "describe it in a .toml file")


def _path(model: Any, config: Any) -> str:
    """Return the path of an encoder: the module with its configuration."""
    found = [path for path, m in model.named_modules() if getattr(m, "config", None) is config and path]
    return min(found, key=len, default="")


def _grid(model: Any, vision: Any, count: int, side: int) -> tuple[Features, Call]:
    """Patches in a row, and the grid of each image."""
    pixels, grid = _patches(vision, count, side)

    def call() -> Any:
        return model.get_image_features(pixel_values=pixels, image_grid_thw=grid)

    return Features((side * side,) * count), call


def _patches(vision: Any, count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    channels = int(
        getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 0) or getattr(vision, "num_channels", 3)
    )
    width = channels * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
    pixels = torch.empty(count * side * side, width, dtype=torch.bfloat16, device="meta")
    return pixels, torch.tensor([[1, side, side]] * count)


def _stacked(model: Any, vision: Any, count: int, side: int) -> tuple[Features, Call]:
    """Patches in a row, each an image of its own, and the grid of each image."""
    pixels, grid = _patches(vision, count, side)
    patch = int(vision.patch_size)
    squares = pixels.new_empty(len(pixels), pixels.shape[1] // patch**2, patch, patch)

    def call() -> Any:
        return model.get_image_features(pixel_values=squares, image_grid_thw=grid)

    return Features((side * side,) * count), call


def _placed(model: Any, vision: Any, count: int, side: int) -> tuple[Features, Call]:
    """Patches of each image in a row, and the place of each patch."""
    width = 3 * int(vision.patch_size) ** 2
    pixels = torch.empty(count, side * side, width, dtype=torch.bfloat16, device="meta")
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).reshape(-1, 2)

    def call() -> Any:
        return model.get_image_features(pixel_values=pixels, image_position_ids=places.repeat(count, 1, 1))

    return Features((side * side,) * count), call


def _sized(model: Any, vision: Any, count: int, side: int) -> tuple[Features, Call]:
    """Images of any size, and the size of each."""
    pixels, size = _pixels(vision, count, 0), side * int(vision.patch_size)
    images, sizes = pixels.new_empty(count, pixels.shape[1], size, size), torch.tensor([[size, size]] * count)

    def call() -> Any:
        return model.get_image_features(pixel_values=images, image_sizes=sizes)

    return Features((side * side,) * count), call


def _tiles(model: Any, vision: Any, count: int, _: int) -> tuple[Features, Call]:
    """Images of the first size that is cut into tiles, each with its tiles and the whole, and the size of each."""
    size = model.config.image_grid_pinpoints[0]
    tiles = 1 + size[0] * size[1] // int(vision.image_size) ** 2
    pixels, sizes = _pixels(vision, count, tiles), torch.tensor([list(size)] * count)

    def call() -> Any:
        return model.get_image_features(pixel_values=pixels, image_sizes=sizes)

    return Features((tiles * _patches_of(vision),) * count), call


def _pixels(vision: Any, count: int, tiles: int) -> torch.Tensor:
    """Return images of the size that an encoder has, each with a number of tiles if it is not 0."""
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (count, *((tiles,) if tiles else ()), int(getattr(vision, "num_channels", 3)), height, width)
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _patches_of(vision: Any) -> int:
    """Return the patches of one image or tile."""
    size, patch = vision.image_size, vision.patch_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    down, right = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return int(height // down * (width // right))


def _squares(model: Any, vision: Any, count: int, _: int, *, nested: bool = False) -> tuple[Features, Call]:
    """Images of one size; ``nested``: each is the only one of a sample."""
    pixels = _pixels(vision, count, int(nested))

    def call() -> Any:
        return model.get_image_features(pixel_values=pixels)

    return Features((_patches_of(vision),) * count), call


def _masked(name: str, model: Any, audio: Any, count: int, frames: int) -> tuple[Features, Call]:
    """Recordings of one length, and a mask without gaps."""
    spectrum = _spectra(audio, count, frames)
    mask = torch.ones(count, spectrum.shape[-1], dtype=torch.int64)

    def call() -> Any:
        return model.get_audio_features(input_features=spectrum, **{name: mask})

    return Features((spectrum.shape[-1] // _FRAMES,) * count), call


def _recordings(model: Any, audio: Any, count: int, frames: int) -> tuple[Features, Call]:
    """Recordings of the length that an encoder has."""
    spectrum = _spectra(audio, count, frames)

    def call() -> Any:
        return model.get_audio_features(input_features=spectrum)

    return Features((spectrum.shape[-1] // _FRAMES,) * count), call


def _spectra(audio: Any, count: int, frames: int) -> torch.Tensor:
    """Return spectra of ``frames``, or if that is 0, of the frames that an encoder has positions for."""
    length = frames or _FRAMES * int(audio.max_source_positions)
    return torch.empty(count, int(audio.num_mel_bins), length, dtype=torch.bfloat16, device="meta")


_Form = Callable[[Any, Any, int, int], tuple[Features, Call]]
_Forms = dict[_Form, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]]
_IMAGES: _Forms = {
    _grid: (("pixel_values", "image_grid_thw"), SIDES),
    _stacked: (("pixel_values", "image_grid_thw"), SIDES),
    _placed: (("pixel_values", "image_position_ids"), SIDES),
    _sized: (("pixel_values", "image_sizes"), ALONE),
    _tiles: (("pixel_values", "image_sizes"), COUNTS),
    _squares: (("pixel_values",), COUNTS),
    partial(_squares, nested=True): (("pixel_values",), COUNTS),
}
"""Forms of images, with the arguments that an encoder takes for each and sizes. The first that it runs on is taken."""
_RECORDINGS: _Forms = {
    partial(_masked, "feature_attention_mask"): (("input_features", "feature_attention_mask"), FRAMES),
    partial(_masked, "input_features_mask"): (("input_features", "input_features_mask"), FRAMES),
    _recordings: (("input_features",), COUNTS),
}
