"""Make one stage of a torchtitan model, by torchtitan's own split; the vision encoder may be split too."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError

VISION = "vision_encoder"
_TEXT = ("tok_embeddings", "layers", "norm", "lm_head")
_PIXELS = ("pixel_values", "pixel_values_videos")


def model_part(model: Any, names: Sequence[Sequence[str]], number: int) -> Any:
    """Return the model with the parts of one stage, as torchtitan splits models; the vision encoder may be split too.

    A stage with a part of the encoder has the encoder's layers of that stage. Stages before the first of the text send
    the tokens, with the hidden states of the encoder.
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
            "cannot be split",
            "name 'vision_encoder' whole in parallelism.module_fqns_per_model_part",
        )
    layers = {name.rsplit(".", 1)[1] for name in vision}
    _cut_encoder(part.vision_encoder, layers, begins=number == cut[0], ends=begins_text)
    part.forward = functools.partial(_text_forward if begins_text else _vision_forward, part, number == cut[0])
    return part


def with_all_modules(model: Any, names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names of the parts by stage, with all modules of the model.

    Modules that no stage names, such as the adapter of an encoder, go to the stage of the token embedding. torchtitan
    would drop them from the model.
    """
    named = {name for stage in names for name in stage}
    begins = {name.split(".")[0] for name in named}
    left = [name for name in _part_names(model) if name not in named]
    left = [name for name in left if is_other(name) or name.split(".")[0] not in begins]
    if left and "tok_embeddings" not in named:
        raise InputError(
            "parallelism.module_fqns_per_model_part",
            f"does not name {', '.join(left)}",
            "name tok_embeddings in one stage, which gets the others too",
        )
    return [[*stage, *left] if "tok_embeddings" in stage else list(stage) for stage in names]


def other_parts(model: Any) -> list[str]:
    """Return the names of parts that are neither the encoder nor parts of a text model."""
    return [name for name in _part_names(model) if is_other(name)]


def is_other(name: str) -> bool:
    """Return whether a part is neither of the encoder nor one of a text model, such as the adapter of an encoder."""
    return name.split(".")[0] not in (VISION, *_TEXT)


def _part_names(model: Any) -> list[str]:
    """Return the names of all parts, as torchtitan has them: those of lists and dictionaries of modules are items."""
    found: list[str] = []
    for name, child in model.named_children():
        items = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        found += [f"{name}.{item}" for item, _ in child.named_children()] if items else [name]
    return found


def can_be_cut(encoder: Any) -> bool:
    """Return whether an encoder has the structure of Qwen 3.5's."""
    names = ("patch_embed", "pos_embed", "layers", "merger", "compute_position_embeddings")
    return all(hasattr(encoder, name) for name in names)


class _PassedOn(nn.Module):
    """Replaces the patch embedding if an earlier stage has embedded the patches."""

    def __init__(self) -> None:
        super().__init__()
        # The model reads the type of its encoder's inputs from this weight.
        self.register_buffer("weight", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def _cut_encoder(encoder: Any, layers: set[str], *, begins: bool, ends: bool) -> None:
    """Remove all layers of an encoder but some, and its beginning and end unless they are in this stage."""
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

    def rotary_only(*given: Any) -> tuple[Tensor, Tensor]:
        # Learned positions were added by the stage that embeds patches; every layer needs the rotary ones.
        # A scalar, so that adding it does not promote the type of the hidden states.
        learned, rotary = positions(*given)
        return learned.new_zeros(()), rotary

    encoder.compute_position_embeddings = rotary_only


def _vision_forward(part: Any, begins: bool, tokens: Tensor, *hidden: Tensor, **kwargs: Any) -> Any:
    """Run a stage that has only layers of the encoder."""
    given = _given(begins, hidden, kwargs)
    grids = {"pixel_values": "grid_thw", "pixel_values_videos": "grid_thw_videos"}
    return (tokens, *(part.vision_encoder(x, grid_thw=kwargs[grids[name]]) for name, x in given.items()))


def _text_forward(part: Any, begins: bool, tokens: Tensor, *hidden: Tensor, **kwargs: Any) -> Any:
    """Run the stage in which the text begins: the model's own forward, on the hidden states of the encoder."""
    return type(part).forward(part, tokens, **{**kwargs, **_given(begins, hidden, kwargs)})


def _given(begins: bool, hidden: Sequence[Tensor], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the inputs of the encoder: pixels, or hidden states from the stage before."""
    present = [name for name in _PIXELS if kwargs.get(name) is not None]
    values = [kwargs[name] for name in present] if begins else hidden
    return dict(zip(present, values, strict=True))
