"""Small models of a configuration, and inputs for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError

MOST_PARAMETERS = 150_000_000
"""Models that cannot be made smaller than this are not tested: double precision would need gigabytes."""
_FEW = 3
"""Blocks that are kept of each list: the first, one of the middle, and the last, which may be of another form."""
_COUNTS = re.compile(r"(^|_)(n|num)?_?(\w+_)?(layers|blocks|depth)$|^nlayers$")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "nheads")
_WIDTHS = ("hidden_size", "dim", "model_dim", "embed_dim")
_HEAD_DIMS = ("attention_head_dim", "head_dim")
_CROSS = ("num_cross_attention_heads", "cross_attention_head_dim")
_INNER = re.compile(r"ffn|intermediate|mlp_hidden|d_ff|ff_dim|feed_forward|approximator_hidden")
_TEXT = (
    *("joint_attention_dim", "text_embed_dim", "text_dim", "caption_channels", "context_in_dim", "cap_feat_dim"),
    *("text_in_dim", "crossattn_proj_in_channels", "encoder_hidden_size", "in_text_dim", "encoder_hidden_states_dim"),
    *("cross_attention_input_dim", "cross_attention_dim", "cond_token_dim", "hidden_size"),
)


def width_of(config: Mapping[str, Any]) -> int | None:
    """Return the width of a model's hidden state. None if its fields are not known."""
    heads, size = _first(config, _HEADS), _first(config, _HEAD_DIMS)
    return heads * size if heads and size else _first(config, _WIDTHS)


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first of these fields that a configuration has."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


def channels_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of channels that a transformer takes, of noisy latents and of others."""
    return next((int(config[n]) for n in ("in_channels", "in_dim", "io_channels") if config.get(n)), None)


def _head_size(config: Mapping[str, Any], width: int) -> int | None:
    heads = _first(config, _HEADS)
    if heads:
        return width // heads if width % heads == 0 else None
    axes = config.get("axes_dims")
    return sum(axes) if isinstance(axes, (tuple, list)) else None


@contextmanager
def shapes_only() -> Iterator[None]:
    """Create parameters on the meta device, and compute buffers."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    setattr(nn.Module, "register_parameter", on_meta)  # noqa: B010 - mypy does not take a method for a method
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def smaller(kind: type, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two configurations: a narrow one, and a narrow one with fewer blocks."""
    problem = ""
    for narrow in (_narrow(config), dict(config)):
        few = _few(narrow)
        try:
            with shapes_only():
                size = sum(p.numel() for p in make(kind, few).parameters())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if size <= MOST_PARAMETERS:
            return narrow, few
        problem = f"its small form has {size:,} parameters"
    raise InputError("model", f"cannot be made smaller to be tested: {line(problem)}")


def make(kind: Any, config: Mapping[str, Any]) -> Any:
    """Create a model. Fields that its class does not take, such as those of the library, are left out."""
    return kind.from_config({name: each for name, each in config.items() if not name.startswith("_")})


def line(problem: object) -> str:
    """Return a message on one line."""
    return " ".join(str(problem).split())[:200]


def _few(config: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(config)
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool) and _COUNTS.search(name):
            out[name] = min(value, _FEW)
        elif isinstance(value, (list, tuple)) and name.endswith(("_layers", "_layer_ids")):
            out[name] = type(value)(each for each in value if not isinstance(each, int) or each < _FEW)
    return out


def _narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with a few heads. Their size and the widths of inputs stay."""
    width = width_of(config)
    size = None if width is None else _head_size(config, width)
    if width is None or not size:
        return dict(config)
    out = dict(config)
    cross = config.get(_CROSS[1])
    new = 2 * size if not cross else lcm(size, int(cross))
    if new >= width:
        return out
    for name, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name in _HEADS:
            out[name] = new // size
        elif "key_value" in name or "kv_heads" in name:
            out[name] = max(1, new // size * value // (width // size))
        elif value == width:
            out[name] = new
        elif _INNER.search(name):
            out[name] = 2 * new
    if cross and isinstance(config.get(_CROSS[0]), int):
        out[_CROSS[0]] = new // int(cross)
    return out


# ------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Guess:
    """Assumptions about the inputs of a model."""

    layout: str
    """Order of the dimensions of latents: channels, frames, height and width, or tokens."""
    text: int
    """Width of the prompt's embedding."""
    channels: int
    masks: bool
    condition: int = 0
    """Channels that get no noise, such as those of a first frame."""


SIZES = (((1, 2, 2), 5), ((2, 2, 3), 7), ((1, 4, 2), 4), ((1, 2, 2), 7))
"""Tokens along frames, height and width, and words of the prompt of each sample."""
_LAYOUTS = ("chw", "cfhw", "nc", "fchw", "cn")


def guesses(config: Mapping[str, Any], names: Mapping[str, bool]) -> Iterator[Guess]:
    """Yield assumptions, the likely ones first. ``names`` says of each argument whether it is required."""
    text, channels = _first(config, _TEXT) or 8, channels_of(config) or 4
    out = next((int(config[n]) for n in ("out_channels", "out_dim") if config.get(n)), channels)
    packed = "img_ids" in names or "img_shapes" in names or "num_frames" in names
    layouts = [each for each in _LAYOUTS if (each == "nc") == packed] + [e for e in _LAYOUTS if (e == "nc") != packed]
    for masks in (False, True):
        for layout in layouts:
            yield Guess(layout, text, channels, masks)
            if out < channels:
                yield Guess(layout, text, out, masks, channels - out)


def corrected(guess: Guess, problem: str, words: set[int]) -> Guess | None:
    """Return a guess with the width of the prompt that an error message asks for, or None."""
    found = re.search(r"\((\d+)x(\d+) and (\d+)x\d+\)", problem)
    if found and int(found[1]) in words and int(found[2]) == guess.text:
        return replace(guess, text=int(found[3]))
    found = re.search(r"normalized_shape=\[(\d+)\].*got input of size\s*\[1, \d+, (\d+)\]", problem)
    if found and int(found[2]) == guess.text:
        return replace(guess, text=int(found[1]))
    return None


def invent(config: Mapping[str, Any], names: Mapping[str, bool], guess: Guess) -> list[dict[str, Any]]:
    """Return samples of several sizes. ``names`` says of each argument of the forward pass whether it is required."""
    draw = torch.Generator().manual_seed(0)
    out = []
    # Wan tells rows of the image from those of the prompt by their number: the last 512 are the prompt.
    fixed = (
        512
        if config.get("image_dim")
        else None
        if config.get("use_rotary_positional_embeddings")
        else config.get("max_text_seq_length")
    )
    for number, (grid, words) in enumerate(SIZES):
        known = _Inputs(config, guess, grid if "f" in guess.layout else (1, *grid[1:]), fixed or words, number, draw)
        sample: dict[str, Any] = {"id": str(number), "latents": known.latents(guess.channels)}
        if guess.condition:
            sample["condition_latents"] = known.latents(guess.condition)
        for name, is_required in names.items():
            value = known.value(name, is_required)
            if value is not None:
                sample[name] = value
        out.append(sample)
    return out


def _patch(config: Mapping[str, Any]) -> tuple[int, int, int]:
    given = config.get("patch_size") or 1
    if isinstance(given, (tuple, list)):
        return tuple(int(each) for each in (1, *given)[-3:])  # type: ignore[return-value]
    return int(config.get("patch_size_t") or 1), int(given), int(given)


@dataclass(frozen=True)
class _Inputs:
    config: Mapping[str, Any]
    guess: Guess
    grid: tuple[int, int, int]
    words: int
    number: int
    draw: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)

    def latents(self, channels: int) -> Tensor:
        sides = dict(zip("fhw", (a * b for a, b in zip(self.grid, _patch(self.config), strict=True)), strict=True))
        sides |= {"c": channels, "n": prod(self.grid)}
        return self.randn(*(sides[each] for each in self.guess.layout))

    def value(self, name: str, is_required: bool) -> Any:
        """Return the value of an argument. None to leave it out."""
        config, number, tokens = self.config, self.number, prod(self.grid)
        frames, height, width = self.grid
        axes = len(config.get("axes_dims_rope") or config.get("axes_dims") or (0, 0, 0))
        head = _first(config, _HEAD_DIMS) or 8
        needed: dict[str, Any] = {
            "encoder_hidden_states": lambda: self.randn(self.words, self.guess.text),
            "pooled_projections": lambda: self._if("pooled_projection_dim", lambda n: self.randn(n)),
            "encoder_hidden_states_image": lambda: self._if("image_dim", lambda n: self.randn(2 + number, n)),
            "encoder_hidden_states_2": lambda: self._if("text_embed_2_dim", lambda n: self.randn(2 + number, n)),
            "encoder_attention_mask_2": lambda: self._if("text_embed_2_dim", lambda _: torch.ones(2 + number).long()),
            "image_embeds": lambda: self._if("image_embed_dim", lambda n: self.randn(1 + number, n)),
            "guidance": lambda: self._if("guidance_embeds", lambda _: 3.5),
            "img_ids": lambda: _places(self.grid, axes),
            "txt_ids": lambda: torch.zeros(self.words, axes),
            "img_shapes": lambda: [self.grid],
            "num_frames": lambda: frames,
            "height": lambda: height,
            "width": lambda: width,
            "added_cond_kwargs": self.micro_conditions,
        }
        required: dict[str, Any] = {
            **dict.fromkeys(("original_size", "target_size", "crop_coords"), lambda: torch.tensor([64.0, 64.0])),
            **dict.fromkeys(("timestep_r", "r_timestep"), lambda: 0.5),
            "class_labels": lambda: torch.tensor(3),
            "image_rotary_emb": lambda: (self.randn(tokens, head), self.randn(tokens, head)),
        }
        if "mask" in name and ("encoder" in name or is_required) and not name.endswith("_2"):
            return torch.ones(self.words).long() if is_required or self.guess.masks else None
        if name == "padding_mask":
            return torch.zeros(1, *self.latents(1).shape[-2:])
        if name == "class_labels" and "norm_type" in config and "ada_norm_zero" in str(config["norm_type"]):
            return torch.tensor(3)
        if name == "image_rotary_emb" and config.get("use_rotary_positional_embeddings"):
            return required[name]()
        return needed[name]() if name in needed else required[name]() if is_required and name in required else None

    def micro_conditions(self) -> dict[str, Any]:
        """Return PixArt's resolution and aspect ratio. By default only its largest size has them."""
        given = self.config.get("use_additional_conditions")
        if given or (given is None and self.config.get("sample_size") == 128):
            return {"resolution": torch.tensor([64.0, 32.0]), "aspect_ratio": torch.tensor([2.0])}
        return {"resolution": None, "aspect_ratio": None}

    def _if(self, field: str, value: Any) -> Any:
        given = self.config.get(field)
        return value(int(given)) if given else None


def _places(grid: tuple[int, int, int], axes: int) -> Tensor:
    """Return the position of each token along each axis."""
    sides = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    found = torch.stack([each.reshape(-1) for each in sides], 1)
    return torch.cat([found, found.new_zeros(len(found), axes)], 1)[:, :axes]
