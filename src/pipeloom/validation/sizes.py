"""Sizes of public models by name, for runs whose source names the model alone."""

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

_SAME_SIZES = {"qwen2.5-7b": "qwen2.5-vl-7b", "qwen2.5-32b": "qwen2-32b", "qwen2.5-72b": "qwen2.5-vl-72b"}
"""Language models with the sizes of another model, or of its language module: the vision models were made from them."""


@cache
def sizes_of(model: str) -> dict[str, Any]:
    """Return the columns with the sizes of a model; empty if its name or its kind of layers is not known.

    Case, an owner before a slash, and a remark in parentheses do not matter. Dense models and models with experts in
    every layer are known if they are in the zoo and read text alone.
    """
    name = re.sub(r"\(.*?\)|-(instruct|hf|base)$", "", model.rpartition("/")[2].lower()).strip()
    name = re.sub(r"[\s_]+", "-", name)
    found = _SAME_SIZES.get(name, name)
    if found not in catalog.names("models"):
        return {}
    architecture = catalog.load_architecture(found)
    # A model that reads images, too, is more than its language module.
    return _columns(architecture) if len(architecture.modules) == 1 or name in _SAME_SIZES else {}


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
