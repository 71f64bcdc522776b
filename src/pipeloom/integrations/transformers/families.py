"""Which parts of each architecture are which: all that is particular to a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.blanks import (
    blank_grid,
    blank_recording,
    blank_sized,
    blank_squares,
    blank_tiles,
    image_shape,
)
from pipeloom.integrations.transformers.layers import PACKED, PLAIN, Form
from pipeloom.spec import Strategy

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Instance:
    """An image or a recording: one instance of what an encoder reads.

    ``pixels`` (of a recording, its spectrum) and ``given`` are joined along dimension 0 with those of the other
    instances of a part; ``patches`` are the rows of state that it has between layers.
    """

    pixels: Tensor
    given: dict[str, Tensor]
    patches: int
    tokens: int
    is_video: bool = False


@dataclass(frozen=True)
class Text:
    """The language model of an architecture; paths begin at the model with the head."""

    blocks: str
    first: tuple[str, ...]
    """What has parameters before the blocks."""
    last: tuple[str, ...]
    """What has parameters behind the blocks, the head too."""
    per_token: tuple[str, ...] = ()
    """Entries of a sample that the forward takes, one number a token."""
    placing: tuple[str, ...] = ()
    """The same, where only positions depend on them."""
    alone: tuple[str, ...] = ()
    """Types of blocks that mix a sequence in another way than by attention: called for every sequence by itself."""
    pointwise: tuple[str, ...] = ()
    """Types of blocks that mix nothing."""
    gives_tuple: bool = False
    positions: Callable[[nn.Module, Sample], Tensor | None] | None = None
    """Of one sample, with the model that has no parts: position ids, or None for 0, 1, 2 ..."""
    one_by_one: bool = False
    """Whether every layer is called for every sequence by itself, as the library calls it for a batch of that one."""
    eager: bool = False
    """Whether attention within a sequence is the model's own function: with sinks or caps, which others have not."""

    @property
    def trunk(self) -> str:
        """Path of what holds the blocks."""
        return self.blocks.rpartition(".")[0]


def decoder(
    trunk: str, first: str = "embed_tokens", last: str = "norm", *, blocks: str = "layers", **more: Any
) -> Text:
    """Return a language model whose parts have the usual names; those of ``more`` are `Text`'s."""
    return Text(f"{trunk}.{blocks}", (f"{trunk}.{first}",), (f"{trunk}.{last}", "lm_head"), **more)


@dataclass(frozen=True)
class Taps:
    """Features of inner blocks of an encoder, which are added behind the first blocks of the language model."""

    ends: dict[int, str]
    """From the number of a block to the path of what its features go through."""
    tower: str
    """Where the library has the numbers of these blocks, under ``switch``: without them it runs no taps."""
    switch: str
    features: str
    """Where the encoder's output has them."""
    add: str
    """The method of the language model's trunk that adds them."""


@dataclass(frozen=True)
class Encoder:
    """The encoder of a model and what brings its output to the language model's width."""

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    images: Callable[[Sample], list[Instance]]
    """What of a sample goes through it, one by one: images, or recordings."""
    blank: Callable[[int], dict[str, Tensor]]
    """Entries of a sample with something to read, made up, with nothing in it: more of it for larger numbers."""
    name: str = "vision"
    reads: Literal["images", "audio"] = "images"
    features: str = "get_image_features"
    """The library's function that runs it and what stands behind it."""
    given: str = "pixel_values"
    """What that function is given; further entries of a sample besides."""
    places: str = "image_token_id"
    """Where the config has the id of its tokens."""
    video_places: str = ""
    """The same of videos, where it reads these too, each as one instance; empty: it does not."""
    keys: tuple[str, ...] = ("pixel_values",)
    """Entries of a sample that it reads."""
    patches: int | None = None
    """Rows of state that every image has, as a dimension of its own; None: as many as it has patches."""
    tokens: int | None = None
    """Tokens that every image has in the sequence; None: patches by ``merge``."""
    merge: int = 1
    used: int | None = None
    """How many blocks are run to any effect; None: all."""
    unused: tuple[str, ...] = ()
    """Parts with weights that no loss depends on."""
    nested: bool = False
    """Whether its pixels have a dimension of samples before that of images."""
    listed: bool = True
    """Whether the features come as a list with an entry for each image."""
    form: Form = PLAIN
    """How the library has the state of its blocks."""
    gives_tuple: bool = False
    """Whether its blocks give a tuple."""
    in_lm: bool = False
    """Whether what is behind the blocks runs in the first layer of the language model: the number of rows that it gives
    is none that an encoder's output can state."""
    takes_lengths: bool = False
    """Whether its attention is to be told of lengths, lest it makes a mask as large as the square of all patches."""
    kinds: tuple[str, ...] = ()
    """Per block, what tells it from others of its class and size."""
    taps: Taps | None = None

    def ids(self, config: Any) -> tuple[int, ...]:
        """Return the ids of its tokens."""
        return tuple(getattr(config, name) for name in (self.places, self.video_places) if name)


@dataclass(frozen=True)
class Family:
    """One architecture."""

    text: Text
    encoders: tuple[Callable[[Any], Encoder], ...] = ()
    """Each of the model's config: some take encoders of several kinds."""
    refused: tuple[tuple[str, Callable[[Any], object], str], ...] = ()
    """Options that are not supported: name, whether a config has it, and what to do instead."""
    excluded: Mapping[Strategy, str] = field(default_factory=dict)
    """Memory strategies under which its layers do not run, with what fails."""


_ROUTER = (
    "output_router_logits",
    lambda config: getattr(config.get_text_config(), "output_router_logits", False),
    "set it to False: the library has no loss for it here",
)

_DECODER = Family(decoder("model"))


# ------------------------------------------------------------------ Qwen's vision-language models


_VIDEO_KEYS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


def _grid_images(merged: int, sample: Sample) -> list[Instance]:
    """Images whose patches follow one another, each with its grid."""
    return _gridded(merged, sample, "pixel_values", "image_grid_thw")


def _gridded(merged: int, sample: Sample, pixel_key: str, grid_key: str) -> list[Instance]:
    if sample.get(pixel_key) is None:
        return []
    if sample.get(grid_key) is None:
        raise InputError(f"sample.{grid_key}", f"is missing beside {pixel_key}", "use the model's own processor")
    grids = torch.as_tensor(sample[grid_key]).reshape(-1, 3)
    counts: list[int] = grids.prod(1).tolist()
    pixels = torch.as_tensor(sample[pixel_key])
    if len(pixels) != sum(counts):
        raise InputError(f"sample.{pixel_key}", f"has {len(pixels)} patches, {grid_key} says {sum(counts)}")
    is_video = grid_key == "video_grid_thw"
    return [
        Instance(part, {"image_grid_thw": grid[None]}, count, count // merged, is_video)
        for part, grid, count in zip(torch.split(pixels, counts), grids, counts, strict=True)
    ]


def _grid_images_and_videos(merged: int, image_id: int, video_id: int, sample: Sample) -> list[Instance]:
    """Images and videos, which the library encodes alike, in the order of their places."""
    images = _grid_images(merged, sample)
    videos = _gridded(merged, sample, "pixel_values_videos", "video_grid_thw")
    if not videos or not images:
        return images or videos
    waiting, out = {image_id: images, video_id: videos}, []
    ids = [word for word in sample["input_ids"].tolist() if word in waiting]
    while ids and waiting[ids[0]]:
        # A video's places have text between its frames, never another instance.
        out.append(waiting[ids[0]].pop(0))
        ids = ids[out[-1].tokens :]
    # What has no places is counted, and refused.
    return [*out, *images, *videos]


def _grid_positions(model: nn.Module, sample: Sample) -> Tensor | None:
    """Positions in time, height and width, as the library's own model finds them."""
    inner: Any = model.model
    inner.rope_deltas = None
    ids = sample["input_ids"][None]
    given = {
        name: None if sample.get(name) is None else torch.as_tensor(sample[name])
        for name in ("image_grid_thw", "video_grid_thw", "mm_token_type_ids")
    }
    if sample.get("second_per_grid_ts") is not None:
        given["second_per_grid_ts"] = torch.as_tensor(sample["second_per_grid_ts"])
    if given["mm_token_type_ids"] is not None:
        given["mm_token_type_ids"] = given["mm_token_type_ids"].reshape(1, -1)
    found: Tensor | None = inner.compute_3d_position_ids(
        input_ids=ids, inputs_embeds=None, attention_mask=None, past_key_values=None, **given
    )
    return torch.arange(ids.shape[1]).expand(3, 1, -1) if found is None else found


def _qwen_vision(config: Any) -> Encoder:
    encoder = _qwen_images(config)
    images = partial(_grid_images_and_videos, encoder.merge, config.image_token_id, config.video_token_id)
    keys = (*encoder.keys, *_VIDEO_KEYS)
    return replace(encoder, images=images, keys=keys, video_places="video_token_id")


def _qwen_images(config: Any) -> Encoder:
    vision = config.vision_config
    merged = int(vision.spatial_merge_size) ** 2
    full = getattr(vision, "fullatt_block_indexes", None)
    kinds = () if full is None else tuple("full" if i in full else "window" for i in range(vision.depth))
    return Encoder(
        blocks="model.visual.blocks",
        first=("model.visual.patch_embed",),
        last=("model.visual.merger",),
        images=partial(_grid_images, merged),
        blank=partial(blank_grid, config),
        keys=("pixel_values", "image_grid_thw"),
        merge=merged,
        takes_lengths=True,
        kinds=kinds,
    )


def _tapped_vision(config: Any) -> Encoder:
    """As Qwen's other encoders, with an embedding of positions, and with features of inner blocks."""
    tower, asked = "model.visual", list(config.vision_config.deepstack_visual_indexes)
    # As many as there are blocks to add them to. A merger that the library never calls is refused: it is in no layer.
    used = sorted(set(asked) & set(range(config.vision_config.depth)))[: config.text_config.num_hidden_layers]
    taps = Taps(
        ends={block: f"{tower}.deepstack_merger_list.{asked.index(block)}" for block in used},
        tower=tower,
        switch="deepstack_visual_indexes",
        features="deepstack_features",
        add="_deepstack_process",
    )
    return replace(_qwen_vision(config), first=(f"{tower}.patch_embed", f"{tower}.pos_embed"), taps=taps)


_QWEN_TEXT = decoder("model.language_model", placing=("mm_token_type_ids",), positions=_grid_positions)


# ------------------------------------------------------------------ Qwen's model that hears


def _recordings(sample: Sample) -> list[Instance]:
    """Recordings as spectra in one tensor, padded; two steps to a frame, two frames to a token."""
    if sample.get("input_features") is None:
        return []
    spectra, masks = (torch.as_tensor(sample[name]) for name in ("input_features", "feature_attention_mask"))
    out = []
    for spectrum, mask in zip(spectra, masks, strict=True):
        steps = int(mask.sum())
        frames = (steps - 1) // 2 + 1
        given = {"feature_attention_mask": mask[None, :steps]}
        out.append(Instance(spectrum[None, :, :steps], given, frames, (frames - 2) // 2 + 1))
    return out


def _hearing(config: Any) -> Encoder:
    tower = "model.audio_tower"
    return Encoder(
        name="audio",
        reads="audio",
        features="get_audio_features",
        given="input_features",
        places="audio_token_id",
        blocks=f"{tower}.layers",
        first=(f"{tower}.conv1", f"{tower}.conv2"),
        last=(f"{tower}.ln_post", f"{tower}.proj"),
        unused=(f"{tower}.audio_bos_eos_token",),
        images=_recordings,
        blank=partial(blank_recording, config),
        keys=("input_features", "feature_attention_mask"),
        gives_tuple=True,
        in_lm=True,
    )


def _omni_positions(model: nn.Module, sample: Sample) -> Tensor | None:
    """Positions in time, height and width: of the library's model only where a sample has its ``attention_mask``."""
    inner: Any = model.model
    inner.rope_deltas = None
    ids, heard = sample["input_ids"][None], sample.get("feature_attention_mask")
    mask, grids = sample.get("attention_mask"), sample.get("image_grid_thw")
    found: Tensor | None = inner.compute_3d_position_ids(
        input_ids=ids,
        image_grid_thw=None if grids is None else torch.as_tensor(grids),
        video_grid_thw=None,
        inputs_embeds=None,
        attention_mask=None if mask is None else torch.as_tensor(mask).reshape(1, -1),
        past_key_values=None,
        audio_feature_lengths=None if heard is None else torch.as_tensor(heard).sum(1),
    )
    return torch.arange(ids.shape[1]).expand(3, 1, -1) if found is None else found


# ------------------------------------------------------------------ images of one size


def square_images(patches: int, tokens: int, sample: Sample, *, nested: bool = False) -> list[Instance]:
    """Images, or tiles of images, that are all of one size; nested: behind a dimension of one sample."""
    if sample.get("pixel_values") is None:
        return []
    pixels = torch.as_tensor(sample["pixel_values"])
    if pixels.dim() != 4 + nested or (nested and len(pixels) != 1):
        what = "1 x images x channels x sides" if nested else "images x channels x sides"
        raise InputError("sample.pixel_values", f"is of shape {tuple(pixels.shape)}", f"give {what}")
    if not torch.as_tensor(sample.get("pixel_attention_mask", 1)).all():
        raise InputError("sample.pixel_attention_mask", "has zeros", "give images that fill their size")
    return [Instance(each[None, None] if nested else each[None], {}, patches, tokens) for each in pixels.flatten(0, -4)]


def _square_vision(config: Any, patches: int, tokens: int, **parts: Any) -> Encoder:
    return Encoder(
        images=partial(square_images, patches, tokens),
        blank=partial(blank_squares, image_shape(config)),
        patches=patches,
        tokens=tokens,
        **parts,
    )


def _sides(config: Any) -> int:
    """Patches of an image."""
    sizes = [config.vision_config.image_size, config.vision_config.patch_size]
    (height, width), (down, right) = (each if isinstance(each, (list, tuple)) else (each, each) for each in sizes)
    return int(height // down) * int(width // right)


def _until_picked(config: Any) -> int:
    """Blocks up to the one whose output is taken."""
    picked, count = config.vision_feature_layer, int(config.vision_config.num_hidden_layers)
    if not isinstance(picked, int):
        raise InputError(
            "model.config.vision_feature_layer", f"is {picked}", "outputs of several layers: not supported"
        )
    used = picked if picked >= 0 else count + 1 + picked
    if not 0 < used <= count:
        raise InputError("model.config.vision_feature_layer", f"is {picked}", f"give one of the {count} blocks")
    return used


def _llava_vision(config: Any) -> Encoder:
    kind, tower = config.vision_config.model_type, "model.vision_tower"
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise InputError("model.config.vision_config.model_type", f"{kind!r} is not supported here")
    is_clip = kind == "clip_vision_model"
    return _square_vision(
        config,
        _sides(config) + is_clip,
        _sides(config) + is_clip - (config.vision_feature_select_strategy == "default"),
        blocks=f"{tower}.encoder.layers",
        first=(f"{tower}.embeddings", *((f"{tower}.pre_layrnorm",) if is_clip else ())),
        last=("model.multi_modal_projector",),
        used=_until_picked(config),
        unused=(f"{tower}.post_layernorm", f"{tower}.head"),
    )


def _gemma_vision(config: Any) -> Encoder:
    tower = "model.vision_tower"
    return _square_vision(
        config,
        _sides(config),
        int(config.mm_tokens_per_image),
        blocks=f"{tower}.encoder.layers",
        first=(f"{tower}.embeddings",),
        last=(f"{tower}.post_layernorm", "model.multi_modal_projector"),
        listed=False,
        unused=(f"{tower}.head",),
    )


def _internvl_vision(config: Any) -> Encoder:
    tower = "model.vision_tower"
    return _square_vision(
        config,
        _sides(config) + 1,
        round(_sides(config) * float(config.downsample_ratio) ** 2),
        blocks=f"{tower}.encoder.layer",
        first=(f"{tower}.embeddings",),
        last=(f"{tower}.layernorm", "model.multi_modal_projector"),
        listed=False,
        used=None if config.vision_feature_layer == -1 else _until_picked(config),
    )


# ------------------------------------------------------------------ LLaVA-OneVision


def _tiled_images(config: Any, sample: Sample) -> list[Instance]:
    """Images cut into tiles, as many as their sizes want."""
    from transformers.models.llava_onevision import modeling_llava_onevision as library

    if sample.get("pixel_values") is None:
        return []
    pixels, sizes = (torch.as_tensor(sample[name]) for name in ("pixel_values", "image_sizes"))
    counts = torch.as_tensor(sample.get("batch_num_images", 1)).reshape(-1)
    if pixels.dim() != 5 or (len(pixels) > 1 and "batch_num_images" in sample) or int(counts.max()) > 1:
        raise InputError("sample.pixel_values", "are not tiles of one image", "several images a sample: not supported")
    side, images = _sides(config), []
    for each, size in zip(pixels, sizes.reshape(-1, 2), strict=True):
        tiles = library.image_size_to_num_patches(size, config.image_grid_pinpoints, config.vision_config.image_size)
        shell, aspect = SimpleNamespace(config=config), config.vision_aspect_ratio
        _, (tokens,) = library.LlavaOnevisionModel.pack_image_features(
            shell, [torch.zeros(tiles, side, 1)], size[None], image_newline=torch.zeros(1), vision_aspect_ratio=aspect
        )
        images.append(Instance(each[None, :tiles], {"image_sizes": size[None]}, tiles * side, int(tokens)))
    return images


def _onevision_vision(config: Any) -> Encoder:
    tower, kind = "model.vision_tower", config.vision_config.model_type
    if kind != "siglip_vision_model":
        raise InputError("model.config.vision_config.model_type", f"{kind!r} is not supported here")
    return Encoder(
        blocks=f"{tower}.encoder.layers",
        first=(f"{tower}.embeddings",),
        last=("model.multi_modal_projector", "model.image_newline"),
        images=partial(_tiled_images, config),
        blank=partial(blank_tiles, config),
        keys=("pixel_values", "image_sizes", "batch_num_images"),
        used=_until_picked(config),
        unused=(f"{tower}.post_layernorm", f"{tower}.head"),
        form=Form(group=_sides(config)),
        in_lm=True,
    )


# ------------------------------------------------------------------ Pixtral


def _pixtral_images(patch: int, merged: int, sample: Sample) -> list[Instance]:
    """Images of several sizes in one tensor, padded on the right and at the bottom."""
    if sample.get("pixel_values") is None:
        return []
    pixels, sizes = (torch.as_tensor(sample[name]) for name in ("pixel_values", "image_sizes"))
    images = []
    for each, size in zip(pixels, sizes.reshape(-1, 2), strict=True):
        height, width = (int(side) for side in size)
        patches = (height // patch) * (width // patch)
        images.append(Instance(each[None, :, :height, :width], {"image_sizes": size[None]}, patches, patches // merged))
    return images


def _pixtral_vision(config: Any) -> Encoder:
    tower, merged = "model.vision_tower", int(config.spatial_merge_size) ** 2
    return Encoder(
        blocks=f"{tower}.transformer.layers",
        first=(f"{tower}.patch_conv", f"{tower}.ln_pre"),
        last=("model.multi_modal_projector",),
        images=partial(_pixtral_images, int(config.vision_config.patch_size), merged),
        blank=partial(blank_sized, config),
        keys=("pixel_values", "image_sizes"),
        merge=merged,
        used=_until_picked(config),
        form=PACKED,
        takes_lengths=True,
    )


# ------------------------------------------------------------------ Mamba

_BAMBA = decoder("model", last="final_layernorm", alone=("linear_attention",), gives_tuple=True)
_NEMOTRON = decoder("model", first="embeddings", last="norm_f", alone=("linear_attention",), pointwise=("mlp", "moe"))
_GEMMA = decoder("model.language_model", per_token=("token_type_ids",))


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _DECODER,
    "MistralForCausalLM": _DECODER,
    "Qwen2ForCausalLM": _DECODER,
    "Qwen3ForCausalLM": _DECODER,
    "Gemma3ForCausalLM": _DECODER,
    "MixtralForCausalLM": _DECODER,
    "Qwen3MoeForCausalLM": _DECODER,
    "DeepseekV3ForCausalLM": Family(decoder("model"), refused=(_ROUTER,)),
    "BambaForCausalLM": Family(_BAMBA),
    "NemotronHForCausalLM": Family(_NEMOTRON, refused=(_ROUTER,)),
    "Qwen2VLForConditionalGeneration": Family(_QWEN_TEXT, (_qwen_vision,)),
    "Qwen2_5_VLForConditionalGeneration": Family(_QWEN_TEXT, (_qwen_vision,)),
    "Qwen3VLForConditionalGeneration": Family(_QWEN_TEXT, (_tapped_vision,)),
    "Qwen3VLMoeForConditionalGeneration": Family(_QWEN_TEXT, (_tapped_vision,)),
    "Qwen2_5OmniThinkerForConditionalGeneration": Family(
        decoder("model.language_model", positions=_omni_positions), (_qwen_images, _hearing)
    ),
    "LlavaForConditionalGeneration": Family(decoder("model.language_model"), (_llava_vision,)),
    "Gemma3ForConditionalGeneration": Family(_GEMMA, (_gemma_vision,)),
    "InternVLForConditionalGeneration": Family(decoder("model.language_model"), (_internvl_vision,)),
    "LlavaOnevisionForConditionalGeneration": Family(decoder("model.language_model"), (_onevision_vision,)),
    "Mistral3ForConditionalGeneration": Family(decoder("model.language_model"), (_pixtral_vision,)),
}
"""By the class of the model with the head."""
