"""Public models by name, for runs whose source names the model alone."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from pipeloom.spec import catalog
from pipeloom.spec.architecture import (
    Architecture,
    AttentionMixer,
    ExpertsMixer,
    LanguageHeadLayer,
    MLPMixer,
    ResidualLayer,
    TokenEmbeddingLayer,
)
from pipeloom.validation.runs import DATA

_SAME_SIZES = {"qwen2.5-7b": "qwen2.5-vl-7b", "qwen2.5-32b": "qwen2-32b", "qwen2.5-72b": "qwen2.5-vl-72b"}
"""Language models with the sizes of another model, or of its language module: the vision models were made from them."""
_SAME_MODEL = {
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
    "nemotron-3.5-lightning": "nemotron-3-nano-30b-a3b",
    "nemotron-3.5-lightning-30b-a3b": "nemotron-3-nano-30b-a3b",
    "nemotron-3-super": "nemotron-3-super-120b-a12b",
    "nemotron-3-ultra": "nemotron-3-ultra-550b-a55b",
    "nemotron-3-nano-omni": "nemotron-3-nano-omni-30b-a3b",
    "nemotron-22b": "nemotron3-22b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.8-27b": "qwen3.5-27b",
    **{f"qwen3.5-vl-{size}": f"qwen3.5-{size}" for size in ("27b", "35b-a3b", "122b-a10b", "397b-a17b")},
    "nemotron-52x2688": "nemotron-3-nano-30b-a3b",
    "nemotron-88x4096": "nemotron-3-super-120b-a12b",
    "hybrid-nonex1024": str(DATA / "hybrid-44x1024.toml"),
    "hybrid-12x1024": str(DATA / "hybrid-13x1024.toml"),
}
"""Other names of models. Nemotron 3.5 Lightning has the pattern and widths of Nemotron 3 Nano (its test in
Megatron-LM). Qwen 3.6 and 3.8 are read by the class of Qwen 3.5, whose sizes of as many parameters are taken.
The last four are names of Megatron-LM's tests."""
_IN_MEGATRON = ("nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b", "nemotron-h-56b")
"""Models that are described here by Megatron's parts, which it can recompute, rather than as in the zoo by traced
layers."""
_PATTERNS = frozenset(("hybrid-nonex1024", "hybrid-12x1024", "nemotron-52x2688", "nemotron-88x4096"))
"""Models whose columns are those of a transformer, though their source has a pattern of layers."""
_REMARKS = frozenset(("instruct", "hf", "base", "it", "reasoning", "nvidia", "bf16", "lora"))


def _key(name: str) -> str:
    """Return a name without owner, remarks, separators and case."""
    words = re.split(r"[\s_.\-]+", re.sub(r"\(.*?\)", "", name.rpartition("/")[2].lower()))
    return "".join(re.sub(r"^v(\d)", r"\1", word) for word in words if word not in _REMARKS)


@cache
def _names() -> dict[str, str]:
    """Return the names of the zoo and of `_SAME_MODEL` by key, with and without active parameters."""
    found: dict[str, str] = {}
    for name in (*_SAME_SIZES, *catalog.names("models"), *_SAME_MODEL):
        same = _SAME_MODEL.get(name, _SAME_SIZES.get(name, name))
        same = str(DATA / f"{same}.toml") if same in _IN_MEGATRON else same
        found |= {_key(re.sub(r"-a\d+b$", "", name)): same, _key(name): same}
    return found


@cache
def public_model(name: str) -> Architecture | None:
    """Return the public model of a name; None if it is not known.

    Case, separators, an owner before a slash, and a remark in parentheses do not matter.
    """
    found = _names().get(_key(name))
    return None if found is None else catalog.load_architecture(found)


@cache
def sizes_of(model: str) -> dict[str, Any]:
    """Return the columns with the sizes of a model; empty if its name or its kind of layers is not known.

    Dense models and models with experts in every layer have such columns if they read text alone.
    """
    architecture = public_model(model)
    if architecture is None:
        return {}
    # A model that reads images, too, is more than its language module.
    same = _key(model) in map(_key, _SAME_SIZES)
    return _columns(architecture) if len(architecture.modules) == 1 or same else {}


def has_pattern(model: str) -> bool:
    """Return whether a table's columns are not those of the model, which has a pattern of layers."""
    return model.lower() in _PATTERNS


@cache
def described(model: str) -> Architecture | None:
    """Return the public language model of a name whose layers have no columns: a hybrid, or one that reads images."""
    found = None if sizes_of(model) else public_model(model)
    last = None if found is None else found.modules[-1].layers
    reads = last is not None and isinstance(last[0], TokenEmbeddingLayer) and isinstance(last[-1], LanguageHeadLayer)
    return found if reads else None


def _columns(architecture: Architecture) -> dict[str, Any]:
    """Return the columns of the module with the loss, if all its layers are alike."""
    for module in architecture.modules:
        head, embedding = module.layers[-1], module.layers[0]
        if isinstance(head, LanguageHeadLayer) and isinstance(embedding, TokenEmbeddingLayer):
            blocks = module.layers[1:-1]
            first = blocks[0]
            if len({_mixers(block) for block in blocks}) == 1 and isinstance(first, ResidualLayer):
                found = _block_columns(first)
                layers = sum(getattr(block, "count", 1) for block in blocks)
                words = {"hidden": head.hidden, "vocab": head.vocabulary, "tied": head.tied}
                return {"layers": layers, **words, "pos": "rope", **found} if found else {}
    return {}


def _mixers(block: object) -> object:
    return block.mixers if isinstance(block, ResidualLayer) else block


def _block_columns(block: ResidualLayer) -> dict[str, Any]:
    if len(block.mixers) != 2:
        return {}
    attention, inner = block.mixers
    if not isinstance(attention, AttentionMixer) or attention.window or not attention.rotary or block.post_norm:
        return {}
    columns = {
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_width,
        "qk_norm": attention.norm_heads,
        "norm": block.norm,
        "bias": False,
    }
    if isinstance(inner, MLPMixer):
        return {"arch": "dense", "ffn": inner.inner, "gated": inner.gated, **columns}
    if isinstance(inner, ExpertsMixer) and inner.latent is None:
        routed = {"experts": inner.experts, "topk": inner.chosen, "moe_ffn": inner.inner}
        return {"arch": "moe", **routed, "shared_ffn": inner.shared_inner or None, "gated": inner.gated, **columns}
    return {}
