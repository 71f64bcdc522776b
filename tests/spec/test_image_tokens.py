"""Tokens and patches of images are those of the model, or the disagreement is told."""

from __future__ import annotations

import re

import pytest

from pipeloom.emulator.sweep import default_data, draw_microbatches, drawn_samples
from pipeloom.integrations.huggingface.known import known_models
from pipeloom.integrations.models import load_model
from pipeloom.spec import Sample
from pipeloom.spec.catalog import names
from pipeloom.spec.image_tokens import fitted_images, image_disagreement, patches_per_token

SEEING = [name for name in (*names("models"), *known_models()) if patches_per_token(load_model(name)) is not None]


@pytest.mark.parametrize("name", SEEING)
def test_drawn_images_have_the_models_tokens(name: str) -> None:
    model = load_model(name)
    joined = patches_per_token(model)
    samples = [sample for group in draw_microbatches(model, default_data(model), 4, 0) for sample in group]
    pairs = {pair for s in samples for pair in zip(s.image_tokens, s.patches, strict=True)}
    assert pairs == {(-(-2704 // joined), 2704)}
    assert image_disagreement(model, samples) == ""


def test_the_papers_models_keep_their_images() -> None:
    samples = drawn_samples(load_model("vlm-m"), "dip-vlm", 50, 0)
    assert {tokens for sample in samples for tokens in sample.image_tokens} == {169}
    assert drawn_samples(load_model("vit-5b"), "dip-vlm", 50, 0) == samples
    samples = drawn_samples(load_model("pipetune-vlm-7b"), "datamix2", 50, 0)
    assert {tokens for sample in samples for tokens in sample.image_tokens} == {576}


@pytest.mark.parametrize(
    ("tokens", "patches", "words"),
    [
        ((392,), (1568,), ""),
        ((410,), (1568,), ""),  # with tokens at the ends of its lines
        ((98,), (1568,), "have 16 patches a token, .* joins 4; either the encoder's times are too high"),
        (
            (392,),
            None,
            r"1 patches a token \(image_patches is missing\), .* joins 4; either the encoder's times are too low",
        ),
        ((), None, ""),
    ],
)
def test_own_images_are_compared_with_the_model(
    tokens: tuple[int, ...], patches: tuple[int, ...] | None, words: str
) -> None:
    said = image_disagreement(load_model("qwen3-vl-8b"), [Sample("a", 10, tokens, patches), Sample("b", 5)])
    assert bool(said) == bool(words)
    assert re.search(words, said)


def test_texts_are_left_alone() -> None:
    samples = [Sample("a", 10), Sample("b", 5, (4,), (16,))]
    assert fitted_images(load_model("qwen3-vl-8b"), samples) == samples
    assert image_disagreement(load_model("llama-3.1-8b"), [Sample("b", 5, (4,), (99,))]) == ""
