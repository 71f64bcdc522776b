"""One stage of a model of torchtitan: torchtitan's own cut, and a vision encoder that may be cut too."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError

VISION = "vision_encoder"
_PIXELS = ("pixel_values", "pixel_values_videos")


def model_part(model: Any, names: Sequence[Sequence[str]], number: int) -> Any:
    """The model with what one stage has of it, as torchtitan cuts models; a vision encoder may be cut too.

    The rank of a stage that has a part of the encoder gets the model with the encoder's layers of that stage; stages
    before the text's first hand on the tokens with what the encoder has come to.
    """
    from torchtitan.distributed.pipeline_parallel import _split_module

    mine = list(names[number])
    vision = [name for name in mine if name.startswith(f"{VISION}.")]
    cut = [i for i, stage in enumerate(names) if any(name.startswith(f"{VISION}.") for name in stage)]
    begins_text = "tok_embeddings" in mine
    whole = [VISION] if vision or (begins_text and cut) else []
    part: Any = _split_module(model, [*(name for name in mine if name not in vision), *whole])
    if not whole or (cut == [number] and begins_text):
        return part
    if not can_be_cut(part.vision_encoder):
        raise InputError(
            f"vision encoder {type(part.vision_encoder).__name__}",
            "is none that can be cut",
            "name 'vision_encoder' whole in parallelism.module_fqns_per_model_part",
        )
    layers = {name.rsplit(".", 1)[1] for name in vision}
    _cut_encoder(part.vision_encoder, layers, begins=number == cut[0], ends=begins_text)
    part.forward = functools.partial(_text_forward if begins_text else _vision_forward, part, number == cut[0])
    return part


def can_be_cut(encoder: Any) -> bool:
    """Whether it is built as Qwen 3.5's."""
    names = ("patch_embed", "pos_embed", "layers", "merger", "compute_position_embeddings")
    return all(hasattr(encoder, name) for name in names)


class _PassedOn(nn.Module):
    """In the place of the patches' embedding, where a stage before has embedded them."""

    def __init__(self) -> None:
        super().__init__()
        # The model asks for the type that its encoder takes.
        self.register_buffer("weight", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def _cut_encoder(encoder: Any, layers: set[str], *, begins: bool, ends: bool) -> None:
    """Leave an encoder some of its layers, its beginning, its end."""
    for name in list(encoder.layers):
        if name not in layers:
            del encoder.layers[name]
    if not ends:
        encoder.merger = nn.Identity()
    if begins:
        return
    encoder.patch_embed = _PassedOn()
    weight = encoder.pos_embed
    del encoder.pos_embed
    encoder.register_buffer("pos_embed", torch.zeros_like(weight), persistent=False)
    positions = encoder.compute_position_embeddings

    def turned_alone(*given: Any) -> tuple[Tensor, Tensor]:
        # Places were added where the patches were embedded; what turns queries and keys is every layer's.
        # One number: of the buffer's type, it must not lift what is computed in another.
        learned, turns = positions(*given)
        return learned.new_zeros(()), turns

    encoder.compute_position_embeddings = turned_alone


def _vision_forward(part: Any, begins: bool, tokens: Tensor, *hidden: Tensor, **kwargs: Any) -> Any:
    """Run a stage that has layers of the encoder alone."""
    given = _given(begins, hidden, kwargs)
    grids = {"pixel_values": "grid_thw", "pixel_values_videos": "grid_thw_videos"}
    return (tokens, *(part.vision_encoder(x, grid_thw=kwargs[grids[name]]) for name, x in given.items()))


def _text_forward(part: Any, begins: bool, tokens: Tensor, *hidden: Tensor, **kwargs: Any) -> Any:
    """Run the stage in which the text begins: the model's own forward, on what the encoder has come to."""
    return type(part).forward(part, tokens, **{**kwargs, **_given(begins, hidden, kwargs)})


def _given(begins: bool, hidden: Sequence[Tensor], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the encoder works on: pixels, or what the stage before gave for them."""
    present = [name for name in _PIXELS if kwargs.get(name) is not None]
    values = [kwargs[name] for name in present] if begins else hidden
    return dict(zip(present, values, strict=True))
