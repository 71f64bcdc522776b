"""Vision and audio encoders (towers), up to the adapter to the language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pipeloom.spec.architecture import (
    ActivationStep,
    AdapterLayer,
    AttentionMixer,
    AudioEmbeddingLayer,
    AverageStep,
    JoinStep,
    Layer,
    LinearStep,
    MLPMixer,
    Norm,
    NormStep,
    PatchEmbeddingLayer,
    PatchMergerLayer,
    ResidualLayer,
    Step,
    VectorsStep,
)
from tests.integrations.hand_counted.decoders import counted
from tests.integrations.hand_counted.fields import Fields


@dataclass(frozen=True)
class Tower:
    """The layers of an encoder, the width of its output, and layers that never run."""

    layers: tuple[Layer, ...]
    width: int
    unused: tuple[Layer, ...] = ()


def _block(
    hidden: int,
    heads: tuple[int, int],
    feed: MLPMixer,
    *,
    norm: Norm = "layer",
    rotary: bool = False,
    bias: bool = True,
) -> ResidualLayer:
    count, width = heads
    attention = AttentionMixer(count, count, width, causal=False, qkv_bias=bias, output_bias=bias, rotary=rotary)
    return ResidualLayer(hidden, (attention, feed), norm=norm)


def _windowed(block: ResidualLayer, window: int) -> ResidualLayer:
    attention, *rest = block.mixers
    return msgspec.structs.replace(block, mixers=(msgspec.structs.replace(attention, window=window), *rest))


# ------------------------------------------------------------------ Qwen's towers, which include a merger


def _pixels(fields: Fields) -> int:
    down, right = fields.pair("patch_size")
    return fields.size("in_channels") * fields.size("temporal_patch_size") * down * right


def qwen2_vision(fields: Fields) -> Tower:
    """Return Qwen2-VL's tower."""
    hidden, out = fields.size("embed_dim"), fields.size("hidden_size")
    feed = MLPMixer(int(hidden * fields.number("mlp_ratio")), gated=False, bias=True)
    block = _block(hidden, fields.heads("num_heads", hidden), feed, rotary=True)
    merger = PatchMergerLayer(hidden, fields.size("spatial_merge_size") ** 2, out)
    pixels = PatchEmbeddingLayer(_pixels(fields), hidden, bias=False)
    return Tower((pixels, *counted([block] * fields.blocks("depth")), merger), out)


def qwen2_5_vision(fields: Fields) -> Tower:
    """Return Qwen2.5-VL's tower. Most of its blocks attend within windows."""
    hidden, out = fields.size("hidden_size"), fields.size("out_hidden_size")
    feed = MLPMixer(fields.size("intermediate_size"), bias=True)
    full = _block(hidden, fields.heads("num_heads", hidden), feed, norm="rms", rotary=True)
    merged, (down, _) = fields.size("spatial_merge_size"), fields.pair("patch_size")
    side = fields.size("window_size") // merged // down * merged
    if side < 1:
        raise fields.refuse("window_size", f"{fields.size('window_size')} is less than {merged} patches of {down}")
    attending = fields.numbers("fullatt_block_indexes")
    blocks = [full if i in attending else _windowed(full, side**2) for i in range(fields.blocks("depth"))]
    pixels = PatchEmbeddingLayer(_pixels(fields), hidden, bias=False)
    merger = PatchMergerLayer(hidden, merged**2, out, norm="rms")
    return Tower((pixels, *counted(blocks), merger), out)


def qwen3_vision(fields: Fields, takers: int) -> tuple[Tower, tuple[str, ...]]:
    """Return Qwen3-VL's tower, and the streams of its inner blocks' features, at most ``takers``."""
    hidden, out = fields.size("hidden_size"), fields.size("out_hidden_size")
    feed = MLPMixer(fields.size("intermediate_size"), gated=False, bias=True)
    block = _block(hidden, fields.heads("num_heads", hidden), feed, rotary=True)
    factor, depth = fields.size("spatial_merge_size") ** 2, fields.blocks("depth")
    joined = hidden * factor
    tap: tuple[Step, ...] = (JoinStep(factor), NormStep(), LinearStep(joined), ActivationStep(), LinearStep(out))
    tapped = fields.numbers("deepstack_visual_indexes")
    used = sorted(set(tapped) & set(range(depth)))[:takers]
    streams = {i: f"deepstack_{number}" for number, i in enumerate(used)}
    blocks = [
        msgspec.structs.replace(block, emits=streams[i], tap=tap) if i in streams else block for i in range(depth)
    ]
    pixels = PatchEmbeddingLayer(_pixels(fields), hidden, fields.size("num_position_embeddings"))
    layers: tuple[Layer, ...] = (pixels, *counted(blocks), PatchMergerLayer(hidden, factor, out))
    unused = (AdapterLayer(hidden, tap),) * (len(tapped) - len(used))
    return Tower(layers, out, unused), tuple(streams.values())


# ------------------------------------------------------------------ towers without an adapter


def _patches(fields: Fields) -> tuple[int, int]:
    """Return the pixel values per patch, and the patches per image."""
    (height, width), (down, right) = fields.pair("image_size"), fields.pair("patch_size")
    return fields.size("num_channels") * down * right, (height // down) * (width // right)


def _cut(block: ResidualLayer, count: int, used: int) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return the blocks that run, and those after the last one whose output is used."""
    return counted([block] * used), counted([block] * (count - used))


def _plain_block(fields: Fields) -> ResidualLayer:
    hidden, feed = fields.size("hidden_size"), MLPMixer(fields.size("intermediate_size"), gated=False, bias=True)
    return _block(hidden, fields.heads("num_attention_heads", hidden), feed)


def _clip(fields: Fields, used: int) -> Tower:
    hidden, (numbers, patches) = fields.size("hidden_size"), _patches(fields)
    run, rest = _cut(_plain_block(fields), fields.blocks("num_hidden_layers"), used)
    # A class token and its position.
    pixels = PatchEmbeddingLayer(numbers, hidden, patches + 2, bias=False, norm="layer")
    return Tower((pixels, *run), hidden, (*rest, AdapterLayer(hidden, (NormStep(),))))


def siglip(fields: Fields, used: int, *, normed: bool = False) -> Tower:
    """Return SigLIP's tower, with or without the norm after its blocks."""
    hidden, (numbers, patches) = fields.size("hidden_size"), _patches(fields)
    block = _plain_block(fields)
    run, rest = _cut(block, fields.blocks("num_hidden_layers"), used)
    norm = AdapterLayer(hidden, (NormStep(),))
    head: tuple[Layer, ...] = ()
    if fields.flag("vision_use_head"):
        inner = fields.size("intermediate_size")
        pooled = AdapterLayer(hidden, (VectorsStep(), LinearStep(inner), LinearStep(hidden)))
        head = (msgspec.structs.replace(block, mixers=block.mixers[:1]), pooled)
    layers = (PatchEmbeddingLayer(numbers, hidden, patches), *run)
    return Tower((*layers, norm), hidden, (*rest, *head)) if normed else Tower(layers, hidden, (*rest, norm, *head))


def _pixtral(fields: Fields, used: int) -> Tower:
    hidden, (down, right) = fields.size("hidden_size"), fields.pair("patch_size")
    feed = MLPMixer(fields.size("intermediate_size"))
    block = _block(hidden, fields.heads("num_attention_heads", hidden), feed, norm="rms", rotary=True, bias=False)
    run, rest = _cut(block, fields.blocks("num_hidden_layers"), used)
    numbers = fields.size("num_channels") * down * right
    return Tower((PatchEmbeddingLayer(numbers, hidden, bias=False, norm="rms"), *run), hidden, rest)


def internvl(fields: Fields, used: int, *, last: bool) -> Tower:
    """Return InternVL's tower. ``last`` means that its output is that of the last block."""
    hidden, (numbers, patches) = fields.size("hidden_size"), _patches(fields)
    (heads, width), kind = fields.heads("num_attention_heads", hidden), fields.get("norm_type")
    if kind not in ("layer_norm", "rms_norm"):
        raise fields.refuse("norm_type", f"{kind!r} is not known", "known are layer_norm, rms_norm")
    attention = AttentionMixer(
        heads,
        heads,
        width,
        causal=False,
        qkv_bias=fields.flag("attention_bias"),
        output_bias=True,
        rotary=False,
        norm_whole=fields.flag("use_qk_norm"),
    )
    feed = MLPMixer(fields.size("intermediate_size"), gated=False, bias=True)
    block = ResidualLayer(hidden, (attention, feed), norm="rms" if kind == "rms_norm" else "layer", scaled=True)
    run, rest = _cut(block, fields.blocks("num_hidden_layers"), used)
    vectors = 1 + fields.flag("use_mask_token")  # the class token's
    vectors += (patches + 1) * fields.flag("use_absolute_position_embeddings")
    layers: tuple[Layer, ...] = (PatchEmbeddingLayer(numbers, hidden, vectors), *run)
    norm = () if fields.flag("use_mean_pooling") else (AdapterLayer(hidden, (NormStep(),)),)
    return Tower((*layers, *norm), hidden, rest) if last else Tower(layers, hidden, (*rest, *norm))


TOWERS: dict[str, Callable[[Fields, int], Tower]] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": siglip,
    "pixtral": _pixtral,
}
"""Encoders that can be combined with any language model, by model type. Arguments: fields and blocks that run."""


def picked_blocks(whole: Fields, vision: Fields) -> int:
    """Return the number of blocks up to the one whose output the model uses."""
    picked, count = whole.get("vision_feature_layer"), vision.blocks("num_hidden_layers")
    if isinstance(picked, bool) or not isinstance(picked, int):
        raise whole.refuse("vision_feature_layer", f"{picked!r} is not one number", "outputs of one block are read")
    used = picked if picked >= 0 else count + 1 + picked
    if not 0 < used <= count:
        raise whole.refuse("vision_feature_layer", f"{picked} is none of {count} blocks")
    return used


# ------------------------------------------------------------------ audio


def omni_audio(fields: Fields) -> Tower:
    """Return Qwen2.5-Omni's audio tower. Its blocks attend within chunks of the spectrum."""
    hidden, out = fields.size("d_model"), fields.size("output_dim")
    feed = MLPMixer(fields.size("encoder_ffn_dim"), gated=False, bias=True)
    block = _windowed(_block(hidden, fields.heads("encoder_attention_heads", hidden), feed), fields.size("n_window"))
    attention, *rest = block.mixers
    block = msgspec.structs.replace(block, mixers=(msgspec.structs.replace(attention, key_bias=False), *rest))
    layers: tuple[Layer, ...] = (
        AudioEmbeddingLayer(fields.size("num_mel_bins"), hidden),
        *counted([block] * fields.size("encoder_layers")),
        AdapterLayer(hidden, (AverageStep(2), NormStep(), LinearStep(out))),
    )
    return Tower(layers, out, (AdapterLayer(out, (VectorsStep(2),)),))
