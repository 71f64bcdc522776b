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
from pipeloom.spec.model import Reads

Call = Callable[[], Any]

TEXTS = ((1, 1024), (1, 512), (2, 512), (1, 256), (2, 768))
"""Sequences and their length. Counts are checked on the last. All are multiples of the chunks of scans, 64 to 256."""
SIDES = ((1, 48), (1, 24), (2, 24), (1, 72), (2, 48))
"""Images, and patches along a side. All are multiples of what encoders merge (2, 3 or 4) and of their windows (8)."""

COUNTS = tuple((count, 0) for count in (4, 2, 3, 7, 5))
"""The same of images that all have one size: several, as one alone may need other layouts."""


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


def encoders_of(model: Any, given: Mapping[str, Any]) -> list[Encoder]:
    """Return the vision encoder of a model with its calls, for each form of images that it may take.

    A configuration that describes the language model and no encoder has none: only the encoder's parameters count.
    """
    if "text_config" in given and "vision_config" not in given:
        return []
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    if vision is None:
        return []
    if not hasattr(model, "get_image_features"):
        raise InputError("model", "has a vision_config, and no get_image_features", "describe it in a .toml file")
    taken = inspect.signature(model.get_image_features).parameters
    found: list[Encoder] = []
    for form, needs in _FORMS.items():
        if all(name in taken for name in needs):
            sizes = COUNTS if form in (_squares, _nested) else SIDES
            found.append(Encoder("vision", _path(model), "images", partial(form, model, vision), sizes))
    if found:
        return found
    raise InputError("model", f"has an encoder that takes {', '.join(taken)}", "describe it in a .toml file")


def _path(model: Any) -> str:
    """Return the path of the vision tower: the module with the vision configuration."""
    vision = model.config.vision_config
    found = [path for path, m in model.named_modules() if getattr(m, "config", None) is vision and path]
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


def _squares(model: Any, vision: Any, count: int, _: int, *, nested: bool = False) -> tuple[Features, Call]:
    """Images of one size; ``nested``: each is the only one of a sample."""
    size, patch = vision.image_size, vision.patch_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    down, right = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    shape = (count, *((1,) if nested else ()), int(getattr(vision, "num_channels", 3)), height, width)
    pixels = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def call() -> Any:
        return model.get_image_features(pixel_values=pixels)

    return Features((height // down * (width // right),) * count), call


_nested = partial(_squares, nested=True)
_FORMS: dict[Callable[[Any, Any, int, int], tuple[Features, Call]], tuple[str, ...]] = {
    _grid: ("pixel_values", "image_grid_thw"),
    _stacked: ("pixel_values", "image_grid_thw"),
    _placed: ("pixel_values", "image_position_ids"),
    _squares: ("pixel_values",),
    _nested: ("pixel_values",),
}
"""Forms of images, with the arguments that an encoder takes for each. The first that the encoder runs on is taken."""
