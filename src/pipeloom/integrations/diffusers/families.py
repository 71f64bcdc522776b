"""Which parts of each transformer are which: all that is particular to a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError


@dataclass(frozen=True)
class Video:
    """One sample, or several of one size as a batch, in all that calls of the transformer depend on but for numbers.

    Attributes
    ----------
    form : tuple of int
        Shape of a sample's latents as the transformer takes them.
    grid : tuple of int
        Frames, height and width in tokens.
    words : int
        Rows that the prompt has, and with those of padding ``padded``.
    mask : tuple of int
        Which rows of the prompt are attended to, where the transformer is told.
    scale : tuple of float
        Of rotary positions, where it is told.
    count : int
        Samples.
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
        """Of one sample."""
        frames, height, width = self.grid
        return frames * height * width


@dataclass(frozen=True)
class Family:
    """One architecture: blocks that attend to themselves and to the prompt, and that a condition modulates.

    Paths begin at the transformer. Of what it gives its blocks, ``"words"`` is the prompt at its width,
    ``"modulation"`` what it makes of the time for the blocks, and ``"time"`` what it makes of it for the end.
    """

    blocks: str
    first: str
    """What brings latents to its width."""
    words: str
    """What brings the prompt to its width."""
    clock: str
    """What embeds the time, and the parts of it that have parameters."""
    clock_parts: tuple[str, ...]
    given: Mapping[str, str | tuple[str, ...]]
    """Parts that know the time or the prompt, and what they give; in the first layer only ``words`` is filled in."""
    last: tuple[str, ...]
    """What is behind the blocks, parameters too."""
    channels: Callable[[Any], int]
    """Of latents, from the config."""
    patch: Callable[[Any], tuple[int, int, int]]
    """Latent frames, rows and columns of a token."""
    enter: Callable[[Any, Tensor], Tensor]
    """From latents (C, F, H, W) to what the transformer takes of them."""
    arguments: Callable[[Video], dict[str, Any]]
    """What it is called with beside latents, time and prompt."""
    pads: bool = False
    """Whether the prompt's padding is attended to: rows of zeros behind the encoder's."""
    attends_to_padding: bool = False
    """Whether the text encoder sees the prompt's padding, which the transformer is then told of by a mask."""
    scale: tuple[float, ...] = ()
    """Default of a sample's ``rope_interpolation_scale``; none: it has no such thing."""
    refused: tuple[tuple[str, Callable[[Any], object], str], ...] = ()
    """Options that are not supported: name, whether a config has it, and what to do instead."""
    longest: Callable[[Any], int | None] = lambda _: None
    """Most tokens along any side for which there are positions, from the config; None: any."""
    rope: Callable[[Any], nn.Module] | None = None
    """Makes the rotary positions anew where they are tables, which a model of shapes alone has none of."""


# ------------------------------------------------------------------ Wan


def _wan_rope(config: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    made: nn.Module = WanRotaryPosEmbed(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
    return made


def _as_it_is(config: Any, latents: Tensor) -> Tensor:
    del config
    return latents


def _nothing(video: Video) -> dict[str, Any]:
    del video
    return {}


_IMAGES = "models that begin with an image are not supported"
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
    enter=_as_it_is,
    arguments=_nothing,
    pads=True,
    refused=(
        ("image_dim", lambda config: config.image_dim is not None, _IMAGES),
        ("added_kv_proj_dim", lambda config: config.added_kv_proj_dim is not None, _IMAGES),
        ("in_channels", lambda config: config.in_channels != (config.out_channels or config.in_channels), _IMAGES),
    ),
    longest=lambda config: int(config.rope_max_seq_len),
    rope=_wan_rope,
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
    told = {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": video.scale}
    return {"encoder_attention_mask": mask, **told}


_FRAME_RATE, _VAE_FRAMES, _VAE_PIXELS = 25.0, 8.0, 32.0
"""Of the library's pipeline where it is told nothing."""

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
    refused=(
        ("in_channels", lambda config: config.in_channels != (config.out_channels or config.in_channels), _IMAGES),
    ),
)


FAMILIES: dict[str, Family] = {"WanTransformer3DModel": _WAN, "LTXVideoTransformer3DModel": _LTX}
"""By the transformer's class."""


def family_of(name: str) -> Family:
    """Return the family of a class.

    Raises
    ------
    InputError
        There is none.
    """
    if name not in FAMILIES:
        raise InputError("model", f"is a {name}, which is none of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
