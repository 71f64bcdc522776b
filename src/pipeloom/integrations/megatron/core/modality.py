"""Where a chunk of a vision-language model is in the pipeline, and which images it encodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.core.places import layers_span_replicas
from pipeloom.integrations.steps.planning import Sizes, checked_sizes
from pipeloom.integrations.steps.shapes import Signature
from pipeloom.integrations.steps.sizes import default_size

_IMAGES = ("images", "image", "imgs", "pixel_values")
_TOKENS = ("tokens", "input_ids")


class ImageRange(NamedTuple):
    """Images of a microbatch that pass through the encoder together."""

    first: int
    end: int
    lengths: tuple[int, ...]
    """Sizes of all images of the microbatch."""

    @property
    def signature(self) -> Signature:
        """Number and total size of the images, from which the shapes of the encoder's outputs follow."""
        return self.end - self.first, sum(self.lengths[self.first : self.end])


@dataclass
class ModalityCut:
    """Place of a chunk in a pipeline whose first stages are an encoder of images.

    ``most_images`` is the most that pass through the encoder together; None: all of a microbatch. ``image_size`` is the
    number of tokens of an image in the language model; 1 if it is unknown. ``images`` are those that the encoder's next
    forward takes.
    """

    stage: int
    num_encoder: int
    num_language: int
    most_images: int | None = None
    image_size: int = 1
    images: ImageRange | None = None

    @property
    def encodes(self) -> bool:
        """Whether the chunk belongs to the encoder."""
        return self.stage < self.num_encoder


def cut_of(chunk: nn.Module) -> ModalityCut | None:
    """Return the place of a chunk, which may be wrapped; None for chunks of other models."""
    inner: nn.Module | None = chunk
    while inner is not None:
        cut = inner.__dict__.get("cut")
        if isinstance(cut, ModalityCut):
            return cut
        inner = inner._modules.get("module")
    return None


def cuts_of(chunks: Sequence[nn.Module]) -> list[ModalityCut]:
    """Return the places of this rank's chunks; an empty list if none belongs to a model that is cut by modality."""
    return [cut for cut in map(cut_of, chunks) if cut is not None]


def check_cuts(chunks: Sequence[nn.Module], config: Any, groups: Any, moved: bool) -> tuple[tuple[int, int, int], bool]:
    """Return what a rank reports about chunks that are cut by modality: the cut, and whether its encoder is trained.

    Raises `InputError` if they cannot be planned, do not belong together, or ``options.stages`` has ``moved`` them.
    """
    cuts = cuts_of(chunks)
    remedy = "pass the list that vision_language_chunks returns"
    if len(cuts) < len(chunks):
        raise InputError("model", f"has {len(chunks) - len(cuts)} chunks that are not cut by modality", remedy)
    found = {(cut.num_encoder, cut.num_language, cut.most_images or 0) for cut in cuts}
    if len(found) > 1:
        raise InputError("model", "has chunks of several models that are cut by modality", remedy)
    if moved:
        raise InputError("stages", "differ from the numbers of the model's chunks", "leave out options.stages")
    if layers_span_replicas(config) and groups.dp_cp.size() > groups.cp.size():
        raise InputError(
            "config.num_moe_experts" if getattr(config, "num_moe_experts", None) else "config.fp8_recipe",
            "makes all replicas run one plan, and their numbers of images differ",
            "use one replica, another setting, or a model without an encoder of its own stages",
        )
    if any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks):
        raise InputError(
            "overlap_param_gather",
            "gathers parameters in the order in which chunks begin, which depends on the images of a replica",
            "switch it off",
        )
    trained = any(p.requires_grad for c, cut in zip(chunks, cuts, strict=True) if cut.encodes for p in c.parameters())
    return found.pop(), trained


def vision_language_sizes(
    items: Sequence[Any],
    image_size: int,
    sizes: Callable[[Any], int] | None,
    images: Callable[[Any], Sequence[int]] | None,
) -> Sizes:
    """Return the sizes of microbatches and of their images, by the options of `StepOptions`.

    Without ``sizes``, that of a microbatch is its number of text tokens and the sizes of its images; without
    ``images``, all images have ``image_size``.
    """
    every = [_images_of(number, item, image_size, images) for number, item in enumerate(items)]
    if sizes is None:
        texts = [_text_size(item) + sum(lengths) for item, lengths in zip(items, every, strict=True)]
    else:
        texts = [sizes(item) for item in items]
    return tuple(zip(checked_sizes(texts), every, strict=True))


def _images_of(
    number: int, item: Any, image_size: int, images: Callable[[Any], Sequence[int]] | None
) -> tuple[int, ...]:
    if images is not None:
        return checked_sizes(images(item), f"images, microbatch {number}, image {{}}")
    pixels = _first(item, _IMAGES)
    if pixels is None:
        raise InputError(
            f"images, microbatch {number}",
            f"are not found: the item has no tensor {', '.join(map(repr, _IMAGES))}",
            "give options.images, a function from an item to the sizes of its images",
        )
    # Loaders pass a tensor of fewer dimensions for no image.
    return (image_size,) * (len(pixels) if pixels.dim() > 2 else 0)


def _first(item: Any, names: Sequence[str]) -> Tensor | None:
    found = [item.get(name) for name in names] if isinstance(item, Mapping) else []
    return next((each for each in found if isinstance(each, Tensor)), None)


def _text_size(item: Any) -> int:
    tokens = _first(item, _TOKENS)
    return default_size(item) if tokens is None else max(1, tokens.numel())
