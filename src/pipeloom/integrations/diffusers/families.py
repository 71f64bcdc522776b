"""The parts of each supported transformer. Everything that is specific to one family is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Video:
    """Sizes of one sample, or of a batch of samples of equal size.

    Attributes
    ----------
    form : tuple of int
        Shape of a sample's latents as the transformer takes them.
    grid : tuple of int
        Frames, height and width in tokens.
    words : int
        Rows of the prompt without padding.
    padded : int
        Rows of the prompt with padding.
    mask : tuple of int
        1 for each row of the prompt that is attended to, else 0. Empty if the transformer takes no mask.
    scale : tuple of float
        Scale of rotary positions. Empty if the transformer takes none.
    count : int
        Number of samples.
    """

    form: tuple[int, ...]
    grid: tuple[int, int, int]
    words: int
    padded: int
    mask: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    count: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens of one sample."""
        frames, height, width = self.grid
        return frames * height * width


@dataclass(frozen=True)
class Family:
    """One architecture: blocks with self-attention, cross-attention to the prompt, and modulation by the time.

    Paths are relative to the transformer. Three values go to the layers: ``"words"`` is the prompt at the transformer's
    width, ``"modulation"`` is the embedding of the time for the blocks, and ``"time"`` is that for the last layer.
    """

    blocks: str
    first: str
    """Projection of the latents to the transformer's width."""
    words: str
    """Projection of the prompt to the transformer's width."""
    clock: str
    """Embedding of the time."""
    clock_parts: tuple[str, ...]
    """Submodules of ``clock`` that have parameters."""
    given: Mapping[str, str | tuple[str, ...]]
    """Outputs of the parts that embed the time or the prompt. The first layer replaces only ``words``."""
    last: tuple[str, ...]
    """Submodules and parameters that run after the blocks."""
    channels: Callable[[Any], int]
    """Channels of the latents, from the config."""
    patch: Callable[[Any], tuple[int, int, int]]
    """Latent frames, rows and columns of a token, from the config."""
    enter: Callable[[Any, Tensor], Tensor]
    """Converts latents of shape (channels, frames, height, width) to the transformer's input."""
    arguments: Callable[[Video], dict[str, Any]]
    """Arguments of the transformer except latents, time and prompt."""
    pads: bool = False
    """Whether the transformer attends to the prompt's padding, which is rows of zeros after those of the encoder."""
    attends_to_padding: bool = False
    """Whether the text encoder sees the prompt's padding. The transformer then gets a mask of it."""
    scale: tuple[float, ...] = ()
    """Default of a sample's ``rope_interpolation_scale``. Empty if the transformer takes none."""
    differs: Callable[[Any], object] = lambda _: False
    """Whether the config has an option, such as a first image, that this description lacks."""
    longest: Callable[[Any], int | None] = lambda _: None
    """Maximum of tokens along any dimension, from the config. None for no limit."""


# ------------------------------------------------------------------ Wan


_WAN = Family(
    blocks="blocks",
    first="patch_embedding",
    words="condition_embedder.text_embedder",
    clock="condition_embedder",
    clock_parts=("condition_embedder.time_embedder", "condition_embedder.time_proj"),
    given={"condition_embedder": ("time", "modulation", "words", "image")},
    last=("proj_out", "scale_shift_table"),
    channels=lambda config: int(config.in_channels),
    patch=lambda config: tuple(config.patch_size),
    enter=lambda _, latents: latents,
    arguments=lambda _: {},
    pads=True,
    differs=lambda config: (
        config.image_dim is not None
        or config.added_kv_proj_dim is not None
        or config.in_channels != (config.out_channels or config.in_channels)
    ),
    longest=lambda config: int(config.rope_max_seq_len),
)


# ------------------------------------------------------------------ LTX


def _ltx_patch(config: Any) -> tuple[int, int, int]:
    return int(config.patch_size_t), int(config.patch_size), int(config.patch_size)


def _ltx_channels(config: Any) -> int:
    frames, height, width = _ltx_patch(config)
    return int(config.in_channels) // (frames * height * width)


def _ltx_enter(config: Any, latents: Tensor) -> Tensor:
    from diffusers import LTXPipeline

    packed: Tensor = LTXPipeline._pack_latents(latents[None], config.patch_size, config.patch_size_t)[0]
    return packed


def _ltx_arguments(video: Video) -> dict[str, Any]:
    frames, height, width = video.grid
    mask = torch.tensor([video.mask] * video.count)
    sizes = {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": video.scale}
    return {"encoder_attention_mask": mask, **sizes}


_FRAME_RATE, _VAE_FRAMES, _VAE_PIXELS = 25.0, 8.0, 32.0
"""Defaults of the library's pipeline."""

_LTX = Family(
    blocks="transformer_blocks",
    first="proj_in",
    words="caption_projection",
    clock="time_embed",
    clock_parts=("time_embed.emb", "time_embed.linear"),
    given={"time_embed": ("modulation", "time"), "caption_projection": "words"},
    last=("norm_out", "proj_out", "scale_shift_table"),
    channels=_ltx_channels,
    patch=_ltx_patch,
    enter=_ltx_enter,
    arguments=_ltx_arguments,
    attends_to_padding=True,
    scale=(_VAE_FRAMES / _FRAME_RATE, _VAE_PIXELS, _VAE_PIXELS),
    differs=lambda config: config.in_channels != (config.out_channels or config.in_channels),
)


FAMILIES: dict[str, Family] = {"WanTransformer3DModel": _WAN, "LTXVideoTransformer3DModel": _LTX}
"""Families by the transformer's class name."""
