"""A Hugging Face `config.json` as an `Architecture`, without torch or transformers.

Read are the sizes that cost follows from: language models of the Llama family (dense, or with a mixture of
experts), alone or behind a vision encoder with a merger (Qwen2-VL, Qwen2.5-VL, Qwen3-VL) or a two-layer projector
(LLaVA and most others). What a config leaves out has the default of its model type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError
from pipeloom.spec.architecture import (
    Architecture,
    AttentionMixer,
    ExpertsMixer,
    LanguageHeadLayer,
    Layer,
    Mixer,
    MLPMixer,
    ModuleArchitecture,
    Norm,
    PatchEmbeddingLayer,
    PatchMergerLayer,
    ProjectorLayer,
    ResidualLayer,
    TokenEmbeddingLayer,
)

Config = Mapping[str, Any]
_NO_DEFAULT = object()
_RMS_VISION = ("qwen2_5_vl",)
_MERGERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def read_huggingface(path: str | Path) -> Architecture:
    """Read a `config.json`, or the one in a folder.

    Raises
    ------
    InputError
        No such file, no JSON, or a size missing; the field is named.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise InputError(str(path), "is not a config.json nor a folder with one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(file), f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(str(file), "is not a JSON object")
    try:
        return architecture_of(config, str(config.get("_name_or_path") or file.resolve().parent.name))
    except InputError as error:
        raise InputError(f"{file}: {error.entity}", error.problem, error.remedy) from error


def architecture_of(config: Config, name: str) -> Architecture:
    """Turn a config into an architecture.

    Parameters
    ----------
    config : mapping
        As transformers writes it.
    name : str
        Used where it is not empty.

    Raises
    ------
    InputError
        A size is missing or is no positive whole number.
    """
    kind = str(config.get("model_type", ""))
    text = config.get("text_config") or config.get("llm_config") or config.get("language_config") or config
    vision = config.get("vision_config")
    modules: list[ModuleArchitecture] = []
    after: tuple[str, ...] = ()
    if vision:
        hidden = _size(text, "hidden_size", where="text_config.")
        modules.append(ModuleArchitecture("vision", "images", _vision(config, vision, hidden, kind)))
        after = ("vision",)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    modules.append(ModuleArchitecture("lm", "sequence", _language(text, kind, tied), after))
    return Architecture(
        name or kind or "model", f"Hugging Face config, model type {kind or 'not given'}", tuple(modules)
    )


def _language(text: Config, kind: str, tied: bool) -> tuple[Layer, ...]:
    where = "text_config." if "vision_config" not in text else ""
    kind = str(text.get("model_type") or kind)
    hidden, heads = _size(text, "hidden_size", where=where), _size(text, "num_attention_heads", where=where)
    layers, words = _size(text, "num_hidden_layers", where=where), _size(text, "vocab_size", where=where)
    attention = AttentionMixer(
        heads=heads,
        kv_heads=_size(text, "num_key_value_heads", default=heads),
        head_width=_size(text, "head_dim", default=hidden // heads),
        qkv_bias=bool(text.get("attention_bias", kind.startswith(("qwen2", "qwen2_5")))),
        norm_heads=kind.startswith(("qwen3", "gemma3")),
    )
    experts = _optional(text, "num_experts", "num_local_experts", "n_routed_experts")
    feed: Mixer
    dense_first = 0
    dense = (
        MLPMixer(_size(text, "intermediate_size", where=where)) if not experts or "intermediate_size" in text else None
    )
    if experts:
        feed = ExpertsMixer(
            inner=_size(text, "moe_intermediate_size", "intermediate_size", where=where),
            experts=experts,
            chosen=_size(text, "num_experts_per_tok", where=where),
            shared_inner=_optional(text, "shared_expert_intermediate_size")
            or _optional(text, "n_shared_experts") * _optional(text, "moe_intermediate_size"),
        )
        dense_first = min(layers, _optional(text, "first_k_dense_replace"))
    else:
        assert dense is not None
        feed = dense
    post = kind.startswith(("gemma2", "gemma3"))
    out: list[Layer] = [TokenEmbeddingLayer(words, hidden)]
    if dense_first and dense is not None:
        out.append(ResidualLayer(hidden, (attention, dense), dense_first, post_norm=post))
    if layers > dense_first:
        out.append(ResidualLayer(hidden, (attention, feed), layers - dense_first, post_norm=post))
    return (*out, LanguageHeadLayer(hidden, words, tied))


def _vision(config: Config, vision: Config, text_hidden: int, kind: str) -> tuple[Layer, ...]:
    where = "vision_config."
    # Qwen2-VL calls the encoder's own width embed_dim, and what it hands on hidden_size.
    hidden = _size(vision, "embed_dim", "hidden_size", where=where)
    heads = _size(vision, "num_heads", "num_attention_heads", where=where)
    layers = _size(vision, "depth", "num_hidden_layers", where=where)
    inner = _optional(vision, "intermediate_size") or round(hidden * float(vision.get("mlp_ratio", 4)))
    norm: Norm = "rms" if kind in _RMS_VISION else "layer"
    merges = kind in _MERGERS or "spatial_merge_size" in vision
    patch = _size(vision, "patch_size", "spatial_patch_size", where=where)
    numbers = _size(vision, "in_channels", "in_chans", "num_channels", default=3) * patch * patch
    numbers *= _size(vision, "temporal_patch_size", default=1)
    attention = AttentionMixer(
        heads, heads, hidden // heads, causal=False, qkv_bias=True, output_bias=True, rotary=merges
    )
    feed = MLPMixer(inner, gated=norm == "rms", bias=True)
    picked = config.get("vision_feature_layer")
    if isinstance(picked, int) and not isinstance(picked, bool) and picked < -1:
        # The layers behind the one whose output is taken are never run.
        layers += picked + 1
        if layers < 1:
            raise InputError("vision_feature_layer", f"{picked} leaves no layer")
    image = 0 if merges else _optional(vision, "image_size")
    positions = (image // patch) ** 2 if image else 0
    out: list[Layer] = [
        PatchEmbeddingLayer(numbers, hidden, positions, bias=not merges),
        ResidualLayer(hidden, (attention, feed), layers, norm=norm),
    ]
    if merges:
        factor = _size(vision, "spatial_merge_size", default=2) ** 2
        out.append(PatchMergerLayer(hidden, factor, text_hidden, norm=norm))
    else:
        out.append(ProjectorLayer(hidden, text_hidden))
    return tuple(out)


def _optional(config: Config, *names: str) -> int:
    """The first of some sizes that is there, else 0."""
    present = [name for name in names if config.get(name) is not None]
    return _size(config, present[0], least=0) if present else 0


def _size(config: Config, *names: str, where: str = "", default: Any = _NO_DEFAULT, least: int = 1) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{where}{name}", f"{value!r} is not a whole number of at least {least}")
        return value
    if default is _NO_DEFAULT:
        raise InputError(f"{where}{names[0]}", "is missing", "give the config of a decoder, with or without images")
    return int(default)
