"""Tokens of images and recordings are those of the model, or the disagreement is told."""

from __future__ import annotations

import re

import msgspec
import pytest

from pipeloom.integrations.huggingface.known import known_models
from pipeloom.integrations.models import load_model
from pipeloom.iteration.microbatches import default_data, draw_microbatches, drawn_samples
from pipeloom.spec import Sample
from pipeloom.spec.architecture import (
    AdapterLayer,
    Architecture,
    AudioEmbeddingLayer,
    AverageStep,
    LinearStep,
    ModuleArchitecture,
)
from pipeloom.spec.catalog import names
from pipeloom.spec.media_tokens import disagreements, fitted_images, rows_per_token

SEEING = [
    name for name in (*names("models"), *known_models()) if rows_per_token(load_model(name), "images") is not None
]


@pytest.mark.parametrize("name", SEEING)
def test_drawn_images_have_the_models_tokens(name: str) -> None:
    model = load_model(name)
    joined = rows_per_token(model, "images")
    samples = [sample for group in draw_microbatches(model, default_data(model), 4, 0) for sample in group]
    pairs = {pair for s in samples for pair in zip(s.image_tokens, s.patches, strict=True)}
    assert pairs == {(-(-2704 // joined), 2704)}
    assert not list(disagreements(model, samples))


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
        ((98,), (1568,), "have 16 patches a token, .* joins 4; .*: their tokens follow from their patches"),
        (
            (392,),
            None,
            r"1 patches a token \(image_patches is missing\), .* joins 4; .*: their patches follow from their tokens",
        ),
        ((), None, ""),
    ],
)
def test_own_images_are_compared_with_the_model(
    tokens: tuple[int, ...], patches: tuple[int, ...] | None, words: str
) -> None:
    said = "".join(disagreements(load_model("qwen3-vl-8b"), [Sample("a", 10, tokens, patches), Sample("b", 5)]))
    assert bool(said) == bool(words)
    assert re.search(words, said)


def test_texts_are_left_alone() -> None:
    samples = [Sample("a", 10), Sample("b", 5, (4,), (16,))]
    assert fitted_images(load_model("qwen3-vl-8b"), samples) == samples
    assert not list(disagreements(load_model("llama-3.1-8b"), [Sample("b", 5, (4,), (99,))]))


@pytest.mark.parametrize(
    ("factor", "seconds", "words"),
    [
        (2, 30.0, ""),
        (4, 30.0, "planned with 2 frames a token, listening joins 4; the language model's times are too high"),
        (1, 30.0, "planned with 2 frames a token, listening joins 1; the language model's times are too low"),
        (2, 0.01, ""),  # one frame is one token
        (4, None, ""),
    ],
)
def test_recordings_are_compared_with_the_model(factor: int, seconds: float | None, words: str) -> None:
    vision, *_, lm = load_model("vlm-7b").modules
    hidden = 1024
    layers = (AudioEmbeddingLayer(128, hidden), AdapterLayer(hidden, (AverageStep(factor), LinearStep(hidden))))
    audio = ModuleArchitecture("audio", "audio", layers)
    model = Architecture("listening", "test", (vision, audio, msgspec.structs.replace(lm, after=("vision", "audio"))))
    assert rows_per_token(model, "audio") == factor
    sample = Sample("a", 10, audio_seconds=() if seconds is None else (seconds,))
    said = "".join(disagreements(model, [sample]))
    assert bool(said) == bool(words)
    assert words in said
