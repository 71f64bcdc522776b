"""Forms in which encoders of the library take images and recordings: how a sample is split into instances."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError

Pieces = list[tuple[Tensor, dict[str, Tensor]]]
"""Pixels, or the spectrum of a recording, and further arguments of each instance of a sample."""
Sides = tuple[int, int]


@dataclass(frozen=True)
class InputForm:
    """How the entries of a sample hold the instances that an encoder reads.

    Attributes
    ----------
    keys : tuple of str
        Entries of a sample. The first one holds the pixels.
    split : callable
        Splits the entries of a sample that has pixels into instances. Each has the form of a sample with this instance
        only.
    blank : callable
        Returns the entries of one instance from its height and width in units of the encoder. Encoders for instances
        of one size ignore these.
    is_sized : bool
        Whether instances differ in size.
    """

    keys: tuple[str, ...]
    split: Callable[[Mapping[str, Any]], Pieces]
    blank: Callable[[Sides], dict[str, Tensor]]
    is_sized: bool = True
    joined: int | None = None
    """Dimension along which the pixels of several instances are concatenated. None if they cannot be."""
    is_tiled: bool = False
    """Whether an image is cut into tiles, whose number its size decides."""
    given_dim: int = 0
    """Dimension along which their other entries are concatenated."""
    indices: str = ""
    """Entry with indices of patches, which continue from one instance to the next. Empty if there is none."""

    def dim_of(self, key: str) -> int:
        """Return the dimension along which an entry of several instances is concatenated."""
        return (self.joined or 0) if key == self.keys[0] else self.given_dim


def first_set(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    """Return the first of these fields that a configuration has, or the default."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def pair(value: Any) -> Sides:
    """Return height and width, which may be one number."""
    if isinstance(value, (list, tuple)):
        return int(value[-2]), int(value[-1])
    return int(value), int(value)


def joined(tensors: Sequence[Tensor], dim: int, filling: int = 0) -> Tensor:
    """Concatenate tensors. Smaller ones are filled up on the right and at the bottom."""
    sides = [max(each) for each in zip(*(tensor.shape for tensor in tensors), strict=True)]
    whole = []
    for tensor in tensors:
        shape = [*sides[:dim], tensor.shape[dim], *sides[dim + 1 :]]
        new = tensor if list(tensor.shape) == shape else tensor.new_full(shape, filling)
        if new is not tensor:
            new[tuple(slice(side) for side in tensor.shape)] = tensor
        whole.append(new)
    return torch.cat(whole, dim=dim)


def joined_shape(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...]:
    """Return the shape of what `joined` returns."""
    sides = [max(each) for each in zip(*(tensor.shape for tensor in tensors), strict=True)]
    sides[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tuple(sides)


def merged(form: InputForm, instances: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the entries of a sample with several instances, padded to the largest where they differ."""
    out = {}
    for key in instances[0]:
        filling = -1 if "position" in key else 0
        out[key] = joined([each[key] for each in instances], form.dim_of(key), filling)
    if form.indices:
        begins = itertools.accumulate((each[form.keys[0]].shape[:2].numel() for each in instances), initial=0)
        shifted = [_shifted(each[form.indices], by) for each, by in zip(instances, begins, strict=False)]
        out[form.indices] = torch.cat(shifted)
    return out


def _shifted(indices: Tensor, by: int) -> Tensor:
    """Return indices of patches that start at another one. Negative ones stand for none."""
    return torch.where(indices < 0, indices, indices + by)


# ------------------------------------------------------------------ splits


def _entries(keys: tuple[str, ...], sample: Mapping[str, Any]) -> dict[str, Tensor]:
    given = {key: _tensor(key, sample[key]) for key in keys if sample.get(key) is not None}
    missing = [key for key in keys if key not in given and key != "pixel_attention_mask"]
    if missing:
        raise InputError(f"sample.{missing[0]}", f"is missing beside {keys[0]}", "use the model's own processor")
    return given


def _tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"sample.{key}", "is not a tensor", "use the model's own processor") from error


def _split_rows(keys: tuple[str, ...], sample: Mapping[str, Any]) -> Pieces:
    """Split patches that follow each other, by the grid of each image."""
    pixels, grids, *others = (each for each in _entries(keys, sample).values())
    counts: list[int] = grids.reshape(len(grids), -1).prod(1).tolist()
    if len(pixels) != sum(counts):
        raise InputError(f"sample.{keys[0]}", f"has {len(pixels)} patches, {keys[1]} says {sum(counts)}")
    pieces = torch.split(pixels, counts)
    return [
        (piece, dict(zip(keys[1:], (each[i : i + 1] for each in (grids, *others)), strict=True)))
        for i, piece in enumerate(pieces)
    ]


def _split_first(
    keys: tuple[str, ...],
    trim: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]],
    sample: Mapping[str, Any],
) -> Pieces:
    """Split entries along their first dimension, and remove the padding of each image."""
    given = _entries(keys, sample)
    count = len(given[keys[0]])
    for name, each in given.items():
        if len(each) != count:
            raise InputError(f"sample.{name}", f"has {len(each)} rows for {count} instances of {keys[0]}")
    pieces = []
    for i in range(count):
        pixels, *others = (each[i : i + 1] for each in given.values())
        pieces.append(trim(pixels, dict(zip(list(given)[1:], others, strict=True))))
    return pieces


def _whole(pixels: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return pixels, given


def _cut_sides(pixels: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    height, width = (int(side) for side in given["image_sizes"][0])
    return pixels[..., :height, :width], given


def _split_tiled(keys: tuple[str, ...], count: Callable[[Tensor], int], sample: Mapping[str, Any]) -> Pieces:
    """Split images that are cut into tiles."""
    numbers = sample.get("batch_num_images")
    if numbers is not None and int(torch.as_tensor(numbers).max()) > 1:
        # The library does not cut them then.
        raise InputError("sample.batch_num_images", "is above 1", "give one image per sample")

    def cut(pixels: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return pixels[:, : count(given["image_sizes"][0])], given

    return _split_first(keys, cut, sample)


def _cut_places(pixels: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inside = (given["image_position_ids"][0] >= 0).all(-1)
    return pixels[:, inside], {"image_position_ids": given["image_position_ids"][:, inside]}


def _cut_mask(pixels: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    count = int(given["spatial_shapes"][0].prod())
    return pixels[:, :count], {**given, "pixel_attention_mask": given["pixel_attention_mask"][:, :count]}


def _split_ratios(keys: tuple[str, ...], shape: tuple[int, ...], ratios: int, sample: Mapping[str, Any]) -> Pieces:
    """Split images of tiles behind a leading dimension of samples, whose size is 1.

    ``keys`` are those of pixels, ratios, the mask of tiles, and the mask of the tokens that attend to tiles, which may
    be missing. ``shape`` is that of an image, ``ratios`` the largest ratio.
    """
    given = _entries(keys[:3], sample)
    images, tokens = given[keys[0]].shape[1:2], len(sample.get("input_ids", ()))
    wanted = {keys[0]: (1, *images, *shape), keys[1]: (1, *images), keys[2]: (1, *images, shape[0])}
    for key in keys[3:]:
        if sample.get(key) is not None:
            given |= _entries((key,), sample)
            wanted[key] = (1, tokens, *images, shape[0])
    for key, each in wanted.items():
        if tuple(given[key].shape) != each or not images:
            remedy = f"give {' x '.join(map(str, each)) if images else '1 x images x tiles x channels x sides'}"
            raise InputError(f"sample.{key}", f"is of shape {tuple(given[key].shape)}", remedy)
    ids = given[keys[1]]
    if ids.is_floating_point() or not ((ids >= 1) & (ids <= ratios)).all():
        raise InputError(f"sample.{keys[1]}", f"is not between 1 and {ratios}", "use the model's own processor")
    pixels, _, mask = (given[key] for key in keys[:3])
    return [
        (pixels[:, i : i + 1], {keys[1]: ids[:, i : i + 1], keys[2]: mask[:, i : i + 1]})
        for i in range(pixels.shape[1])
    ]


def _split_nested(keys: tuple[str, ...], sample: Mapping[str, Any]) -> Pieces:
    """Split images behind a leading dimension of samples, whose size is 1."""
    pixels = _tensor(keys[0], sample[keys[0]])
    if pixels.dim() != 5 or len(pixels) != 1:
        raise InputError(
            f"sample.{keys[0]}", f"is of shape {tuple(pixels.shape)}", "give 1 x images x channels x sides"
        )
    if not torch.as_tensor(sample.get("pixel_attention_mask", 1)).all():
        raise InputError("sample.pixel_attention_mask", "has zeros", "give images that fill their size")
    masks = {key: torch.as_tensor(sample[key])[0] for key in keys[1:] if sample.get(key) is not None}
    return [
        (each[None, None], {key: mask[i][None, None] for key, mask in masks.items()})
        for i, each in enumerate(pixels[0])
    ]


def _split_crops(keys: tuple[str, ...], sample: Mapping[str, Any]) -> Pieces:
    """Split the crops of images, and the patches of their tokens, whose numbers the grids give."""
    pixels, indices, grids, crops = _entries(keys, sample).values()
    tokens = (grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]).tolist()
    for key, rows, wanted in ((keys[0], len(pixels), int(crops.sum())), (keys[1], len(indices), sum(tokens))):
        if rows != wanted:
            raise InputError(f"sample.{key}", f"has {rows} rows for {wanted}", "use the model's own processor")
    begins = itertools.accumulate((crops * pixels.shape[1]).tolist(), initial=0)
    pieces = zip(torch.split(pixels, crops.tolist()), torch.split(indices, tokens), begins, strict=False)
    return [
        (piece, {keys[1]: _shifted(own, -begin), keys[2]: grids[i : i + 1]})
        for i, (piece, own, begin) in enumerate(pieces)
    ]


# ------------------------------------------------------------------ forms


def _rows_of_patches(keys: tuple[str, ...], row: tuple[int, ...], unit: int, sides: Sides) -> dict[str, Tensor]:
    height, width = (unit * side for side in sides)
    grid = [height, width] if keys[1].endswith("_hw") or "sizes" in keys[1] else [1, height, width]
    merge = {keys[2]: torch.tensor([unit])} if len(keys) > 2 else {}
    return {keys[0]: torch.zeros(height * width, *row), keys[1]: torch.tensor([grid]), **merge}


def _blank_sized(channels: int, unit: int, sides: Sides) -> dict[str, Tensor]:
    height, width = (unit * side for side in sides)
    return {"pixel_values": torch.zeros(1, channels, height, width), "image_sizes": torch.tensor([[height, width]])}


def _blank_tiled(shape: tuple[int, ...], count: Callable[[Tensor], int], sides: Sides) -> dict[str, Tensor]:
    # Whole tiles, so that the image has several.
    size = torch.tensor([shape[1] * sides[0] // 2, shape[2] * sides[1] // 2])
    return {"pixel_values": torch.zeros(1, count(size), *shape), "image_sizes": size[None]}


def _blank_placed(width: int, unit: int, sides: Sides) -> dict[str, Tensor]:
    down, right = (torch.arange(unit * side) for side in sides)
    places = torch.stack(torch.meshgrid(right, down, indexing="xy"), -1).reshape(1, -1, 2)
    return {"pixel_values": torch.zeros(1, places.shape[1], width), "image_position_ids": places}


def _blank_masked(width: int, unit: int, sides: Sides) -> dict[str, Tensor]:
    height, right = (unit * side for side in sides)
    ones = torch.ones(1, height * right, dtype=torch.int64)
    return {
        "pixel_values": torch.zeros(1, height * right, width),
        "spatial_shapes": torch.tensor([[height, right]]),
        "pixel_attention_mask": ones,
    }


def _blank_target(channels: int, patch: int, unit: int, sides: Sides) -> dict[str, Tensor]:
    height, width = (unit * side for side in sides)
    return {
        "pixel_values": torch.zeros(1, channels, patch, patch * height * width),
        "target_sizes": torch.tensor([[height, width]], dtype=torch.int32),
    }


def _split_target(sample: Mapping[str, Any]) -> Pieces:
    """Split patches that follow each other along the last dimension."""
    given = _entries(("pixel_values", "target_sizes"), sample)
    sizes = given["target_sizes"]
    total, count = given["pixel_values"].shape[-1], int(sizes.prod(1).sum())
    if not count or total % count:
        raise InputError("sample.pixel_values", f"is {total} wide for {count} patches", "use the model's own processor")
    widths = [total // count * int(each) for each in sizes.prod(1)]
    pieces = torch.split(given["pixel_values"], widths, dim=-1)
    return [(piece, {"target_sizes": sizes[i : i + 1]}) for i, piece in enumerate(pieces)]


def _blank_crops(keys: tuple[str, ...], patches: int, width: int, sides: Sides) -> dict[str, Tensor]:
    crops, count = sides[0], sides[0] * sides[1]
    indices = torch.arange(4 * count).reshape(count, 4) % (crops * patches)
    grid = torch.tensor([[*sides, 0, 0]])
    return dict(zip(keys, (torch.zeros(crops, patches, width), indices, grid, torch.tensor([crops])), strict=True))


def _fixed(entries: dict[str, Tensor], sides: Sides) -> dict[str, Tensor]:
    """Return the entries of an instance whose size cannot be chosen."""
    del sides
    return dict(entries)


def _zeros(*shape: int) -> Tensor:
    """Return zeros that take no memory."""
    return torch.zeros(()).expand(shape)


def image_forms(model: Any, function: Any) -> Iterator[InputForm]:
    """Yield the forms that the arguments of a model's function for image features allow, the most likely first."""
    taken = inspect.signature(function).parameters
    vision = first_set(model.config, ("vision_config", "vision_encoder_config", "vit_config"), model.config)
    patch = pair(first_set(vision, ("patch_size",), 14))[0]
    channels = int(first_set(vision, ("in_channels", "in_chans", "num_channels"), 3))
    # Both sides of an image are multiples of what an encoder merges.
    names = (
        "spatial_merge_size",
        "pooling_kernel_size",
        "merge_kernel_size",
        "merge_size",
        "downsample_factor",
        "scale_factor",
    )
    merge = pair(first_set(vision, names, first_set(model.config, names, 2)))[0]
    grid = next((name for name in ("image_grid_thw", "image_grid_hw") if name in taken), None)
    if grid is not None:
        depth = int(first_set(vision, ("temporal_patch_size", "patch_temporal"), 1))
        more = ("image_merge_sizes",) if "image_merge_sizes" in taken else ()
        keys = ("pixel_values", grid, *more)
        rows = [
            (channels * depth * patch**2,),
            (channels, patch, patch),
            (channels * patch**2,),
            (channels, depth, patch, patch),
            (merge * patch, merge * patch, channels),
        ]
        for row in dict.fromkeys(rows):
            yield InputForm(keys, partial(_split_rows, keys), partial(_rows_of_patches, keys, row, merge), joined=0)
    elif "image_position_ids" in taken:
        size = int(first_set(vision, ("model_patch_size",), patch))
        for width in dict.fromkeys((channels * size**2, channels * patch**2)):
            keys = ("pixel_values", "image_position_ids")
            yield InputForm(keys, partial(_split_first, keys, _cut_places), partial(_blank_placed, width, merge))
    elif "spatial_shapes" in taken:
        keys = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
        blank = partial(_blank_masked, channels * patch**2, merge)
        yield InputForm(keys, partial(_split_first, keys, _cut_mask), blank)
    elif "target_sizes" in taken:
        keys = ("pixel_values", "target_sizes")
        yield InputForm(keys, _split_target, partial(_blank_target, channels, patch, 2 * merge), joined=3)
    elif "image_token_pooling" in taken:
        keys = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
        height, width = pair(first_set(vision, ("image_size",), 2 * patch))
        blank = partial(_blank_crops, keys, (height // patch) * (width // patch), channels * patch**2)
        yield InputForm(keys, partial(_split_crops, keys), blank, indices=keys[1])
    elif "aspect_ratio_ids" in taken:
        given = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        # The mask of the tokens that attend to the image belongs to the whole sample.
        mask = "cross_attention_mask"
        keys = (*given, mask) if mask in inspect.signature(model.forward).parameters else given
        tiles = int(first_set(vision, ("max_num_tiles",), 1))
        shape = (tiles, channels, *pair(first_set(vision, ("image_size",), 2 * patch)))
        split = partial(_split_ratios, keys, shape, int(first_set(vision, ("max_aspect_ratio_id",), 1)))
        # The first ratio is that of an image of one tile, and 0 stands for no image.
        ratio, used = torch.ones(1, 1, dtype=torch.int64), (torch.arange(tiles) < 1).long()[None, None]
        blank = partial(_fixed, dict(zip(given, (_zeros(1, 1, *shape), ratio, used), strict=True)))
        yield InputForm(keys, split, blank, False, 1, given_dim=1)
    elif "qformer_input_ids" in taken:
        # The encoder reads a question too.
        keys = ("pixel_values", "qformer_input_ids", "qformer_attention_mask")
        pixels = _zeros(1, channels, *pair(first_set(vision, ("image_size",), 2 * patch)))
        question = dict.fromkeys(keys[1:], torch.ones(1, 3, dtype=torch.int64))
        blank = partial(_fixed, {keys[0]: pixels, **question})
        yield InputForm(keys, partial(_split_first, keys, _whole), blank, False, 0)
    else:
        yield from _fixed_forms(model, vision, "image_sizes" in taken, (channels, patch, merge))


def video_form(form: InputForm, model: Any, function: Any) -> InputForm | None:
    """Return the form of videos for an encoder of images with a form; None if the function takes another one."""
    # Positions depend on the seconds between frames.
    seconds = ("second_per_grid_ts", "video_second_per_grid")
    timed = tuple(name for name in seconds if name in inspect.signature(model.forward).parameters)
    names = {
        "pixel_values": "pixel_values_videos",
        "image_grid_thw": "video_grid_thw",
        "image_merge_sizes": "video_merge_sizes",
        "image_position_ids": "video_position_ids",
    }
    keys = tuple(names.get(key, "") for key in form.keys)
    placed = keys[1:] == ("video_position_ids",)
    if placed:
        keys = (*keys, "num_frames_per_video")
    if len(keys) < 2 or not set(keys) <= set(inspect.signature(function).parameters):
        return None
    split, blank = (_split_frames, _blank_frames) if placed else (_split_rows, _blank_video)
    return InputForm((*keys, *timed), partial(split, keys), partial(blank, form, keys), joined=0)


def _blank_video(form: InputForm, keys: tuple[str, ...], sides: Sides) -> dict[str, Tensor]:
    """Return a video of two frames."""
    pixels, grid, *others = form.blank(sides).values()
    return dict(zip(keys, (torch.cat([pixels] * 2), grid * torch.tensor([2, 1, 1]), *others), strict=True))


def _blank_frames(form: InputForm, keys: tuple[str, ...], sides: Sides) -> dict[str, Tensor]:
    """Return a video of two frames, each in the form of an image."""
    frames = [torch.cat([each] * 2) for each in form.blank(sides).values()]
    return dict(zip(keys, (*frames, torch.tensor([2])), strict=True))


def _split_frames(keys: tuple[str, ...], sample: Mapping[str, Any]) -> Pieces:
    """Split frames that follow each other, by the number of frames of each video, and remove the padding of patches."""
    pixels, places, counts = _entries(keys, sample).values()
    wanted = int(counts.sum())
    for name, each in zip(keys, (pixels, places), strict=False):
        if len(each) != wanted:
            raise InputError(f"sample.{name}", f"has {len(each)} frames, {keys[2]} says {wanted}")
    pieces = []
    numbers = counts.tolist()
    for i, (video, where) in enumerate(zip(torch.split(pixels, numbers), torch.split(places, numbers), strict=True)):
        inside = (where >= 0).all(-1).any(0)
        pieces.append((video[:, inside], {keys[1]: where[:, inside], keys[2]: counts[i : i + 1]}))
    return pieces


def _fixed_forms(model: Any, vision: Any, is_sized: bool, sizes: tuple[int, int, int]) -> Iterator[InputForm]:
    channels, patch, merge = sizes
    shape = (channels, *pair(first_set(vision, ("image_size", "input_size"), 2 * patch * merge)))
    keys: tuple[str, ...] = ("pixel_values", "image_sizes")
    if is_sized and getattr(model.config, "image_grid_pinpoints", None):
        count = partial(_num_tiles, type(model), model.config, shape[1])
        split = partial(_split_tiled, keys, count)
        counted = ("batch_num_images",) if "batch_num_images" in inspect.signature(model.forward).parameters else ()
        yield InputForm((*keys, *counted), split, partial(_blank_tiled, shape, count), is_tiled=True)
    if is_sized:
        blank = partial(_blank_sized, channels, patch * merge)
        yield InputForm(keys, partial(_split_first, keys, _cut_sides), blank, joined=0)
    keys = ("pixel_values",)
    nested = ("pixel_values", "pixel_attention_mask")
    fine = getattr(model.config, "high_res_vision_config", None)
    if fine is not None:
        both = ("pixel_values", "high_res_pixel_values")
        large = _zeros(1, channels, *pair(first_set(fine, ("image_size",), 1024)))
        blank = partial(_fixed, {both[0]: _zeros(1, *shape), both[1]: large})
        yield InputForm(both, partial(_split_first, both, _whole), blank, False, 0)
    # Some default sizes cannot be divided by what is merged.
    for size in (shape, (channels, 2 * patch * merge, 2 * patch * merge)):
        blank = partial(_fixed, {keys[0]: _zeros(1, *size)})
        yield InputForm(keys, partial(_split_first, keys, _whole), blank, False, 0)
        # Without a mask, or with a mask of the pixels, or of whole images.
        for mask in (None, (1, 1, *size[1:]), (1, 1)):
            masks = {} if mask is None else {nested[1]: torch.ones(mask, dtype=torch.bool)}
            blank = partial(_fixed, {nested[0]: _zeros(1, 1, *size), **masks})
            yield InputForm(nested, partial(_split_nested, nested), blank, False, 1, given_dim=1)


def _num_tiles(kind: type, config: Any, side: int, size: Tensor) -> int:
    """Return the number of tiles of an image by the library's own function."""
    from transformers.models.llava_next import modeling_llava_next

    library = sys.modules[kind.__module__]
    function = getattr(library, "image_size_to_num_patches", modeling_llava_next.image_size_to_num_patches)
    return int(function(size, config.image_grid_pinpoints, side))


def audio_forms(model: Any, function: Any) -> Iterator[InputForm]:
    """Yield the forms that the arguments of a model's function for audio features allow."""
    taken = inspect.signature(function).parameters
    audio = first_set(model.config, ("audio_config", "encoder_config", "audio_encoder_config"), model.config)
    names = ("num_mel_bins", "input_feat_size", "input_dim", "num_mels", "input_size", "feature_size")
    inner = [each for each in vars(audio).values() if hasattr(each, "to_dict")]
    bins = next((int(found) for each in (audio, *inner) if (found := first_set(each, names)) is not None), 80)
    bins *= int(first_set(audio, ("num_stacked_frames",), 1))
    # Some encoders take whole windows only.
    unit = 2 * int(first_set(audio, ("n_window",), 4))
    most = int(first_set(audio, ("max_source_positions",), 16)) * 2
    mask = next((name for name in ("input_features_mask", "feature_attention_mask") if name in taken), None)
    keys = ("input_features", *(name for name in (mask, "padding_mask") if name is not None and name in taken))
    trim = partial(_cut_frames, mask)
    for is_last in (False, True):
        for fixed in (None, most):
            blank = partial(_spectrum, keys, bins, is_last, fixed, unit)
            cut = _whole if fixed else partial(trim, is_last)
            yield InputForm(keys, partial(_split_first, keys, cut), blank, is_sized=fixed is None)


def _spectrum(
    keys: tuple[str, ...], bins: int, is_last: bool, fixed: int | None, unit: int, sides: Sides
) -> dict[str, Tensor]:
    frames = fixed or unit * sides[0] * sides[1]
    shape = (1, frames, bins) if is_last else (1, bins, frames)
    return {keys[0]: torch.zeros(shape)} | {key: torch.ones(1, frames, dtype=torch.int64) for key in keys[1:]}


def _cut_frames(mask: str | None, is_last: bool, pixels: Tensor, given: dict[str, Tensor]) -> Any:
    if mask is None:
        return pixels, given
    frames = int(given[mask].sum())
    cut = pixels[:, :frames] if is_last else pixels[..., :frames]
    return cut, {**given, mask: given[mask][:, :frames]}


FORMS: dict[str, Callable[[Any, Any], Iterator[InputForm]]] = {"images": image_forms, "audio": audio_forms}
"""The forms that a function for features may take, by what an encoder reads."""


def function_path(model: Any, method: str) -> str | None:
    """Return the path of the library's function for features; None if a model has none."""
    # The outer model's method may hide the arguments of the inner one's.
    paths = (f"{getattr(model, 'base_model_prefix', '')}.{method}", f"model.{method}", method)
    return next((path for path in paths if _has(model, path)), None)


def forward_path(model: Any, config: Any) -> str | None:
    """Return the path of the forward method of the encoder of images with a configuration; None if there is none."""
    for path, module in model.named_modules():
        own = getattr(module, "config", None)
        if type(own) is type(config) and "pixel_values" in inspect.signature(module.forward).parameters:
            return f"{path}.forward"
    return None


def _has(model: Any, path: str) -> bool:
    try:
        return callable(attrgetter(path)(model))
    except AttributeError:
        return False
