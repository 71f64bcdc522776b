"""The parts of each supported architecture. Everything that is specific to one family is here."""

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
    blank_squares,
    blank_tiles,
    image_shape,
)
from pipeloom.integrations.transformers.layers import PLAIN, Form
from pipeloom.spec import Strategy

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Instance:
    """One image, video or recording that an encoder reads.

    Attributes
    ----------
    pixels : Tensor
        Pixel values, or the spectrum of a recording. Concatenated along dimension 0 with the other instances of a part.
    given : dict
        Further arguments of the library's function, concatenated in the same way.
    patches : int
        Rows of hidden state between layers.
    tokens : int
        Tokens in the sequence of the language model.
    """

    pixels: Tensor
    given: dict[str, Tensor]
    patches: int
    tokens: int
    is_video: bool = False


@dataclass(frozen=True)
class Text:
    """The language model of an architecture. Paths are relative to the model with the head."""

    blocks: str
    first: tuple[str, ...]
    """Submodules and parameters that run before the blocks."""
    last: tuple[str, ...]
    """Submodules and parameters that run after the blocks, including the head."""
    per_token: tuple[str, ...] = ()
    """Entries of a sample that the forward pass takes, with one number per token."""
    placing: tuple[str, ...] = ()
    """Entries with one number per token that only position ids depend on."""
    alone: tuple[str, ...] = ()
    """Block types that mix tokens without attention, such as Mamba. They are called once per sequence."""
    pointwise: tuple[str, ...] = ()
    """Block types that do not mix tokens."""
    gives_tuple: bool = False
    positions: Callable[[nn.Module, Sample], Tensor | None] | None = None
    """Computes the position ids of a sample from the hollow model. None for 0, 1, 2 ..."""
    one_by_one: bool = False
    """Whether every layer is called once per sequence, because the model cannot run packed sequences."""
    eager: bool = False
    """Whether the model's own attention function runs. Sinks and soft caps, for example, need it."""
    shifts: bool = True
    """Whether the library compares the logits of each token with the label of the next one."""

    @property
    def trunk(self) -> str:
        """Path of the submodule that holds the blocks."""
        return self.blocks.rpartition(".")[0]


def decoder(
    trunk: str, first: str = "embed_tokens", last: str = "norm", *, blocks: str = "layers", **more: Any
) -> Text:
    """Return a language model whose parts have the usual names. ``more`` holds further fields of `Text`."""
    return Text(f"{trunk}.{blocks}", (f"{trunk}.{first}",), (f"{trunk}.{last}", "lm_head"), **more)


@dataclass(frozen=True)
class Taps:
    """Features of inner encoder blocks that are added after the first blocks of the language model (DeepStack)."""

    ends: dict[int, str]
    """Path of the merger of each tapped block, by block number."""
    tower: str
    """Path of the submodule that has the attribute ``switch``."""
    switch: str
    """Attribute with the numbers of the tapped blocks. If it is empty, the library computes no features."""
    features: str
    """Attribute of the encoder's output that holds the features."""
    add: str
    """Method of the language model's trunk that adds the features."""


@dataclass(frozen=True)
class Encoder:
    """An encoder of a model, with the projector to the language model's width."""

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    images: Callable[[Sample], list[Instance]]
    """Returns the instances of a sample that the encoder reads."""
    blank: Callable[[int], dict[str, Tensor]]
    """Returns synthetic entries of a sample for profiling. A larger argument gives larger or more instances."""
    name: str = "vision"
    reads: Literal["images", "audio"] = "images"
    features: str = "get_image_features"
    """Method of the library that runs the encoder and its projector."""
    given: str = "pixel_values"
    """First argument of that method."""
    places: tuple[str, ...] = ("image_token_id",)
    """Fields of the config with the ids of the placeholder tokens, of images first and then of videos."""
    keys: tuple[str, ...] = ("pixel_values",)
    """Entries of a sample that the encoder reads."""
    patches: int | None = None
    """Rows of hidden state per image, as a separate dimension. None if images differ in their number of patches."""
    tokens: int | None = None
    """Tokens per image in the sequence. None if there is one token per ``merge`` patches."""
    merge: int = 1
    """Patches that the projector merges into one token."""
    used: int | None = None
    """Number of blocks whose output is used. None for all."""
    unused: tuple[str, ...] = ()
    """Submodules whose weights do not affect the loss."""
    listed: bool = True
    """Whether the library returns the features as a list with one entry per image."""
    form: Form = PLAIN
    """Shape of the hidden state in the library's blocks."""
    gives_tuple: bool = False
    """Whether the blocks return a tuple."""
    in_lm: bool = False
    """Whether the projector runs in the first layer of the language model. Needed where its number of output rows
    cannot be expressed as the output shape of a module."""
    takes_lengths: bool = False
    """Whether attention gets sequence lengths. Otherwise the library builds a mask over all pairs of patches."""
    kinds: tuple[str, ...] = ()
    """Label of each block that distinguishes blocks of equal class and size, such as window and full attention."""
    taps: Taps | None = None
    most: int | None = None
    """Largest number of instances of a sample. None for any."""

    def ids(self, config: Any) -> tuple[int, ...]:
        """Return the ids of the placeholder tokens."""
        return tuple(getattr(config, name) for name in self.places)


@dataclass(frozen=True)
class FoundEncoder:
    """What was found out about an encoder.

    Attributes
    ----------
    function : str
        Path of the library's method that returns its features.
    form : int
        Number of its form among those that its method's arguments allow.
    packs : bool
        Whether all instances go through the blocks in one call.
    lengths : bool
        Whether attention gets sequence lengths in place of a mask.
    crosses : bool
        Whether blocks of the language model attend to its features. A sample then has at most one instance, and one
        placeholder token for it. Otherwise, each feature takes the place of a token.
    video_function : str
        Path of the library's method that returns the features of videos. Empty: it reads no videos.
    video_place : str
        Field of the configuration with the id of a video's placeholder tokens.
    """

    name: str
    reads: Literal["images", "audio"]
    path: str
    function: str
    form: int
    place: str
    extras: int = 0
    packs: bool = False
    lengths: bool = False
    crosses: bool = False
    video_function: str = ""
    video_place: str = ""

    def function_of(self, is_video: bool) -> str:
        """Return the path of the library's method for a video, or for another instance."""
        return self.video_function if is_video else self.function

    @property
    def all_places(self) -> tuple[str, ...]:
        """Fields with the ids of placeholder tokens: of images or recordings, and then of videos."""
        return (self.place, self.video_place) if self.video_place else (self.place,)


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor that blocks of the language model pass on beside their state, such as keys that later blocks share.

    Attributes
    ----------
    axis : int
        Dimension of tokens.
    where : tuple
        Keys and indices that lead to it in the outputs and arguments of a block after its call.
    givers : frozenset
        Signatures of the blocks that compute it.
    taken : mapping
        Keys and indices that lead to it in the arguments of the blocks that take it, by their signature. They take what
        the last block before them computed.
    """

    axis: int
    where: tuple[Any, ...]
    givers: frozenset[str]
    taken: Mapping[str, tuple[int | str, ...]]


@dataclass(frozen=True)
class Whole:
    """What was found out about a model.

    Attributes
    ----------
    path : str
        Path of the blocks of its language model.
    axis : int
        Dimension of tokens in the state of its language model.
    owners : mapping
        Part of each parameter outside of blocks: the name of an encoder, the same with ``between blocks``, ``first`` or
        ``last``. Numbers in the names of parameters are replaced by ``*``.
    alone : bool
        Whether the part behind the blocks runs on a state alone.
    """

    path: str
    axis: int
    encoders: tuple[FoundEncoder, ...]
    owners: Mapping[str, frozenset[str]] = field(default_factory=dict)
    carried: tuple[CarriedTensor, ...] = ()
    extras: int = 0
    alone: bool = True
    packs: bool = False
    eager: bool = False
    per_token: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture."""

    text: Text
    encoders: tuple[Callable[[Any], Encoder], ...] = ()
    """Functions that build each encoder from the model's config."""
    refused: tuple[tuple[str, Callable[[Any], object], str], ...] = ()
    """Unsupported options of the config: name, function that returns whether it is set, and remedy."""
    excluded: Mapping[Strategy, str] = field(default_factory=dict)
    """Memory strategies that the layers do not support, with the reason."""
    whole: Whole | None = None
    """What was found out about the model by running it. It takes the place of the other descriptions."""


_ROUTER = (
    "output_router_logits",
    lambda config: getattr(config.get_text_config(), "output_router_logits", False),
    "set it to False: the library has no loss for it here",
)

_DECODER = Family(decoder("model"))


# ------------------------------------------------------------------ Qwen's vision-language models


_VIDEO_KEYS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


def _grid_images(merged: int, sample: Sample) -> list[Instance]:
    """Return images whose patches are concatenated, each with its grid."""
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
    """Return images and videos in the order of their placeholder tokens. The library encodes both in the same way."""
    images = _grid_images(merged, sample)
    videos = _gridded(merged, sample, "pixel_values_videos", "video_grid_thw")
    if not videos or not images:
        return images or videos
    waiting, out = {image_id: images, video_id: videos}, []
    ids = [word for word in sample["input_ids"].tolist() if word in waiting]
    while ids and waiting[ids[0]]:
        # Between the frames of a video there may be text, but no other instance.
        out.append(waiting[ids[0]].pop(0))
        ids = ids[out[-1].tokens :]
    # Instances without placeholders are kept: `Sizes.describe` raises an error for them.
    return [*out, *images, *videos]


def _grid_positions(model: nn.Module, sample: Sample) -> Tensor | None:
    """Compute positions in time, height and width with the library's own model."""
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
    return replace(encoder, images=images, keys=keys, places=("image_token_id", "video_token_id"))


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
    """Return Qwen3-VL's encoder, which also has position embeddings and DeepStack features."""
    tower, tapped = "model.visual", list(config.vision_config.deepstack_visual_indexes)
    # At most one tap per block of the language model. A merger that the library never calls belongs to no layer, which
    # `_check_complete` reports.
    used = sorted(set(tapped) & set(range(config.vision_config.depth)))[: config.text_config.num_hidden_layers]
    taps = Taps(
        ends={block: f"{tower}.deepstack_merger_list.{tapped.index(block)}" for block in used},
        tower=tower,
        switch="deepstack_visual_indexes",
        features="deepstack_features",
        add="_deepstack_process",
    )
    return replace(_qwen_vision(config), first=(f"{tower}.patch_embed", f"{tower}.pos_embed"), taps=taps)


_QWEN_TEXT = decoder("model.language_model", placing=("mm_token_type_ids",), positions=_grid_positions)


# ------------------------------------------------------------------ Qwen's audio encoder


def _recordings(sample: Sample) -> list[Instance]:
    """Return recordings from one padded tensor of spectra. A frame has two steps, a token two frames."""
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


def _audio_encoder(config: Any) -> Encoder:
    tower = "model.audio_tower"
    return Encoder(
        name="audio",
        reads="audio",
        features="get_audio_features",
        given="input_features",
        places=("audio_token_id",),
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
    """Compute positions in time, height and width. The library does so only if a sample has an ``attention_mask``."""
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


def _square_images(patches: int, tokens: int, sample: Sample) -> list[Instance]:
    """Return images or tiles of equal size."""
    if sample.get("pixel_values") is None:
        return []
    pixels = torch.as_tensor(sample["pixel_values"])
    if pixels.dim() != 4:
        remedy = "give images x channels x sides"
        raise InputError("sample.pixel_values", f"is of shape {tuple(pixels.shape)}", remedy)
    return [Instance(each[None], {}, patches, tokens) for each in pixels]


def _square_vision(config: Any, patches: int, tokens: int, **parts: Any) -> Encoder:
    return Encoder(
        images=partial(_square_images, patches, tokens),
        blank=partial(blank_squares, image_shape(config)),
        patches=patches,
        tokens=tokens,
        **parts,
    )


def _sides(config: Any) -> int:
    """Return the number of patches of an image."""
    sizes = [config.vision_config.image_size, config.vision_config.patch_size]
    (height, width), (down, right) = (each if isinstance(each, (list, tuple)) else (each, each) for each in sizes)
    return int(height // down) * int(width // right)


def _until_picked(config: Any) -> int:
    """Return the number of blocks up to the one whose output the model uses."""
    picked, count = config.vision_feature_layer, int(config.vision_config.num_hidden_layers)
    if not isinstance(picked, int):
        raise InputError(
            "model.config.vision_feature_layer", f"is {picked}", "outputs of several layers are not supported"
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
    """Return images that are cut into tiles; the number of tiles depends on the image size."""
    from transformers.models.llava_onevision import modeling_llava_onevision as library

    if sample.get("pixel_values") is None:
        return []
    pixels, sizes = (torch.as_tensor(sample[name]) for name in ("pixel_values", "image_sizes"))
    counts = torch.as_tensor(sample.get("batch_num_images", 1)).reshape(-1)
    if pixels.dim() != 5 or (len(pixels) > 1 and "batch_num_images" in sample) or int(counts.max()) > 1:
        remedy = "give one image per sample; several are not supported"
        raise InputError("sample.pixel_values", "are not tiles of one image", remedy)
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
        decoder("model.language_model", positions=_omni_positions), (_qwen_images, _audio_encoder)
    ),
    "LlavaForConditionalGeneration": Family(decoder("model.language_model"), (_llava_vision,)),
    "Gemma3ForConditionalGeneration": Family(_GEMMA, (_gemma_vision,)),
    "InternVLForConditionalGeneration": Family(decoder("model.language_model"), (_internvl_vision,)),
    "LlavaOnevisionForConditionalGeneration": Family(decoder("model.language_model"), (_onevision_vision,)),
}
"""Families by the class name of the model with the head."""
