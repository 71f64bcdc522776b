"""Blank images and recordings, as entries of a sample. Encoders are profiled on them if there are no data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of images.

    Raises
    ------
    InputError
        The encoder has no fixed image size.
    """
    vision = config.vision_config
    size = getattr(vision, "image_size", None)
    if size is None:
        raise InputError("model", "has an image encoder without a fixed image size")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", 3), height, width


def blank_grid(config: Any, size: int) -> dict[str, Tensor]:
    """Return a square image of 16 tokens at size 1. Its sides grow in proportion to ``size``."""
    vision = config.vision_config
    side = 4 * size * int(vision.spatial_merge_size)
    channels = int(getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 3))
    width = channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
    return {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([[1, side, side]])}


def blank_recording(config: Any, size: int) -> dict[str, Tensor]:
    """Return a recording whose length grows with ``size``, up to the maximum at 4."""
    audio = config.audio_config
    steps = max(4, min(size, 4) * int(audio.max_source_positions) // 2)
    spectrum = torch.zeros(1, int(audio.num_mel_bins), steps)
    return {"input_features": spectrum, "feature_attention_mask": torch.ones(1, steps, dtype=torch.int64)}


def blank_squares(shape: tuple[int, int, int], count: int) -> dict[str, Tensor]:
    """Return ``count`` images of one size."""
    return {"pixel_values": torch.zeros(count, *shape)}


def blank_tiles(config: Any, size: int) -> dict[str, Tensor]:
    """Return one image of several tiles."""
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    channels, height, width = image_shape(config)
    sides = torch.tensor([[size * height, size * width]])
    tiles = image_size_to_num_patches(sides[0], config.image_grid_pinpoints, height)
    return {"pixel_values": torch.zeros(1, tiles, channels, height, width), "image_sizes": sides}
