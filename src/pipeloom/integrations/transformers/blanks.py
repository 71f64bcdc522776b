"""Images and recordings with nothing in them, as entries of a sample: what an encoder is measured on without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of images, where all are of one size.

    Raises
    ------
    InputError
        They are not.
    """
    vision = config.vision_config
    size = getattr(vision, "image_size", None)
    if size is None:
        raise InputError("model", "has an encoder of images of no one size")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", 3), height, width


def blank_grid(config: Any, size: int) -> dict[str, Tensor]:
    """A square image whose sides grow with the size, of 16 tokens to begin with."""
    vision = config.vision_config
    side = 4 * size * int(vision.spatial_merge_size)
    channels = int(getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 3))
    width = channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
    return {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([[1, side, side]])}


def blank_recording(config: Any, size: int) -> dict[str, Tensor]:
    """A recording whose length grows with the size, up to the longest at 4."""
    ears = config.audio_config
    steps = max(4, min(size, 4) * int(ears.max_source_positions) // 2)
    spectrum = torch.zeros(1, int(ears.num_mel_bins), steps)
    return {"input_features": spectrum, "feature_attention_mask": torch.ones(1, steps, dtype=torch.int64)}


def blank_squares(shape: tuple[int, int, int], count: int, *, nested: bool = False) -> dict[str, Tensor]:
    """So many images as `families.square_images` reads them."""
    pixels = torch.zeros(count, *shape)
    return {"pixel_values": pixels[None] if nested else pixels}


def blank_tiles(config: Any, size: int) -> dict[str, Tensor]:
    """One image of several tiles."""
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    channels, height, width = image_shape(config)
    sides = torch.tensor([[size * height, size * width]])
    tiles = image_size_to_num_patches(sides[0], config.image_grid_pinpoints, height)
    return {"pixel_values": torch.zeros(1, tiles, channels, height, width), "image_sizes": sides}


def blank_sized(config: Any, size: int) -> dict[str, Tensor]:
    """A square image whose sides grow with the size, of 16 tokens to begin with, up to the largest."""
    unit = int(config.vision_config.patch_size) * int(config.spatial_merge_size)
    channels, largest, _ = image_shape(config)
    side = unit * max(1, min(4 * size, largest // unit))
    return {"pixel_values": torch.zeros(1, channels, side, side), "image_sizes": torch.tensor([[side, side]])}
