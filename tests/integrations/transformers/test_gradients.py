"""Gradients of random plans are the library's own, parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import pipeloom as pl
from pipeloom.integrations.transformers import packed

from . import tiny

TOLERANCE = 1e-9
TWO = ("qwen3", "qwen2_5_vl")
"""In `make test`: a language model with two kinds of attention, and images of free sizes with windows."""


@pytest.mark.parametrize("name", TWO)
def test_of_two_families(name: str) -> None:
    model, batch = tiny.make(name)
    found = pl.check_gradients(model, batch, ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)
    assert len(found.rows) == sum(1 for p in model.parameters() if p.requires_grad)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", tiny.CASES)
def test_of_every_family(name: str, ranks: int) -> None:
    model, batch = tiny.make(name, seed=ranks)
    found = pl.check_gradients(model, batch, ranks=ranks, plans=6)
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", *(pytest.param(n, marks=pytest.mark.full) for n in ("llava", "gemma3"))]
)
def test_of_a_frozen_encoder(name: str) -> None:
    model, batch = tiny.make(name)
    found = pl.check_gradients(model, batch, ranks=2, freeze=("vision",), plans=2)
    assert found.worst < TOLERANCE, str(found)
    assert all(row.name.startswith(("model.language_model.", "lm_head.")) for row in found.rows)


def test_of_an_embedding_that_is_the_head_too() -> None:
    torch.manual_seed(0)
    found = pl.check_gradients(tiny.llama(tie_word_embeddings=True), tiny.text_batch(), ranks=3, plans=3)
    assert found.worst < TOLERANCE, str(found)
    assert "lm_head.weight" not in [row.name for row in found.rows]


def test_a_batch_without_images_leaves_the_encoder_without_gradients() -> None:
    model, batch = tiny.make("qwen2_5_vl")
    found = pl.check_gradients(model, [sample for sample in batch if "pixel_values" not in sample], ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)
    assert all("visual" not in row.name for row in found.rows)


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the whole pack, as without any mask of samples."""
    model, batch = tiny.make("llama")

    def leaks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return packed.attention(module, query, key, value, None, **kwargs)

    register = transformers.AttentionInterface.register
    monkeypatch.setattr(transformers.AttentionInterface, "register", lambda name, _: register(name, leaks))
    try:
        found = pl.check_gradients(model, batch, ranks=2, plans=3)
    finally:
        register(packed.ATTENTION, packed.attention)
    assert found.worst > 1e-3
    worst = str(found).splitlines()[1].split()
    assert worst[0] == found.rows[0].name
    assert float(worst[3]) == pytest.approx(found.rows[0].relative, rel=1e-3)
