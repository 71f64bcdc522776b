"""Tokens of images and recordings are those of the model, or the disagreement is told."""

from __future__ import annotations

import re

import msgspec
import pytest

from pipeloom.errors import InputError
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
from pipeloom.spec.media_tokens import as_model_makes, check_lengths, disagreements, encoder_of, fitted_images

SEEING = [name for name in names("models") if encoder_of(load_model(name), "images") is not None]


@pytest.mark.parametrize("name", SEEING)
def test_drawn_images_have_the_models_tokens(name: str) -> None:
    model = load_model(name)
    joined = encoder_of(model, "images").joined
    samples = [sample for group in draw_microbatches(model, default_data(model), 4, 0) for sample in group]
    pairs = {pair for s in samples for pair in zip(s.image_tokens, s.patches, strict=True)}
    patches = 1280 if default_data(model) == "video-editing" else 2704
    assert pairs == {(-(-patches // joined), patches)}
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


@pytest.mark.parametrize(
    ("tokens", "patches", "planned"),
    [
        ((392,), (1568,), ((392,), (1568,))),
        ((410,), (1568,), ((410,), (1568,))),
        ((98, 90), (1568, 400), ((392, 100), (1568, 400))),
        ((392,), None, ((392,), (1568,))),
    ],
)
def test_images_are_planned_as_the_model_makes_them(
    tokens: tuple[int, ...], patches: tuple[int, ...] | None, planned: object
) -> None:
    (sample,), _ = as_model_makes(load_model("qwen3-vl-8b"), [Sample("a", 10, tokens, patches)])
    assert (sample.image_tokens, sample.image_patches) == planned


def of_one_size(rows: int, outputs: int | None) -> Architecture:
    model = load_model("qwen3-vl-8b")
    vision = msgspec.structs.replace(model.module("vision"), fixed_rows=rows, fixed_outputs=outputs)
    return msgspec.structs.replace(model, modules=(vision, *model.modules[1:]))


@pytest.mark.parametrize(
    ("patches", "outputs", "planned"),
    [
        (1568, 16, (16, 64)),
        (64, 15, (15, 64)),
        (192, 15, (15, 64)),  # three tiles
        (1568, None, (16, 64)),  # four patches a token
    ],
)
def test_a_model_that_takes_images_of_one_size_gets_this_size(
    patches: int, outputs: int | None, planned: tuple[int, int]
) -> None:
    model, before = of_one_size(64, outputs), Sample("a", 10, (100,), (patches,))
    (sample,), notes = as_model_makes(model, [before, Sample("b", 3)])[0][:1], as_model_makes(model, [before])[1]
    assert (sample.image_tokens[0], sample.patches[0]) == planned
    assert "takes images of 64 patches" in notes[0]
    assert not list(disagreements(model, [sample]))
    declared = msgspec.structs.replace(before, lengths={"vision": (7,)})
    assert fitted_images(model, [declared]) == [declared]


@pytest.mark.parametrize(
    ("tokens", "patches", "planned"),
    [
        ((208,), (832,), (16,) * 13),
        ((208,), None, (16,) * 13),
        ((100, 16), (384, 64), (16, 17, 17, 16, 17, 17, 16)),  # tokens at the ends of lines stay
    ],
)
def test_each_tile_is_a_sequence_of_an_encoder_for_images_of_one_size(
    tokens: tuple[int, ...], patches: tuple[int, ...] | None, planned: tuple[int, ...]
) -> None:
    model, before = of_one_size(64, None), Sample("a", 10, tokens, patches)
    (sample,), notes = as_model_makes(model, [before])
    assert not notes
    assert (sample.image_tokens, sample.sequence_tokens) == (planned, before.sequence_tokens)
    assert model.module("vision").lengths(sample) == (64,) * len(planned)
    assert as_model_makes(model, [sample])[0] == [sample]


def test_a_module_that_was_read_at_one_length_takes_no_other() -> None:
    model = load_model("llama-3.1-8b")
    (lm,) = model.modules
    model = msgspec.structs.replace(model, modules=(msgspec.structs.replace(lm, fixed_rows=100),))
    check_lengths(model, [Sample("a", 100)])
    with pytest.raises(InputError, match=r"sample .b.: has 99 tokens, but llama-3\.1-8b was read at 100 alone"):
        check_lengths(model, [Sample("a", 100), Sample("b", 99)])


def test_texts_are_left_alone() -> None:
    samples = [Sample("a", 10), Sample("b", 5, (4,), (16,))]
    assert fitted_images(load_model("qwen3-vl-8b"), samples) == samples
    assert not list(disagreements(load_model("llama-3.1-8b"), [Sample("b", 5, (4,), (99,))]))


def listening(factor: int, window: int | None = None) -> Architecture:
    vision, *_, lm = load_model("vlm-7b").modules
    hidden = 1024
    layers = (AudioEmbeddingLayer(128, hidden), AdapterLayer(hidden, (AverageStep(factor), LinearStep(hidden))))
    audio = ModuleArchitecture("audio", "audio", layers, fixed_rows=window)
    return Architecture("listening", "test", (vision, audio, msgspec.structs.replace(lm, after=("vision", "audio"))))


@pytest.mark.parametrize(
    ("factor", "seconds", "stated", "planned", "words"),
    [
        (2, 30.0, None, 750, ""),
        (4, 30.0, None, 375, ""),
        (1, 30.0, None, 1500, ""),
        (2, 0.01, None, 1, ""),  # one frame is one token
        (4, 30.0, 380, 380, ""),  # some processors add tokens
        (4, 30.0, 750, 375, "have 2 frames a token, but listening joins 4; they are planned with the model's number"),
        (4, 30.0, 100, 375, "have 15 frames a token, but listening joins 4"),
    ],
)
def test_recordings_have_the_tokens_that_the_model_makes(
    factor: int, seconds: float, stated: int | None, planned: int, words: str
) -> None:
    model = listening(factor)
    assert encoder_of(model, "audio").joined == factor
    sample = Sample("a", 10, audio_seconds=(seconds,), audio_tokens=None if stated is None else (stated,))
    (text, found), notes = as_model_makes(model, [Sample("t", 5), sample])
    assert text == Sample("t", 5)
    assert (found.audio_tokens, found.sequence_tokens) == ((planned,), 10 + planned)
    assert bool(notes) == bool(words)
    assert words in "".join(notes)
    assert not list(disagreements(model, [found]))


@pytest.mark.parametrize(
    ("seconds", "stated", "planned", "words"),
    [
        (30.0, None, (375,), ""),
        (12.0, None, (375,), ""),
        (70.0, None, (375, 375, 375), ""),
        (12.0, 150, (150,), ""),  # the model drops the tokens of what was padded
        (70.0, 875, (291, 292, 292), ""),
        (70.0, 500, (375, 375, 375), "have 7 frames a token, but listening joins 4"),
        (12.0, 600, (375,), "have 1 frames a token, but listening joins 4"),
    ],
)
def test_recordings_are_padded_to_the_windows_of_an_encoder(
    seconds: float, stated: int | None, planned: tuple[int, ...], words: str
) -> None:
    model = listening(4, 1500)
    sample = Sample("a", 10, audio_seconds=(seconds,), audio_tokens=None if stated is None else (stated,))
    (found,), notes = as_model_makes(model, [sample])
    assert found.audio_tokens == planned
    assert model.module("audio").lengths(found) == (1500,) * len(planned)
    assert bool(notes) == bool(words)
    assert words in "".join(notes)
    declared = msgspec.structs.replace(sample, lengths={"audio": (7,)})
    assert model.module("audio").lengths(as_model_makes(model, [declared])[0][0]) == (7,)
