"""Vision-language models of Megatron Core that are cut by modality, beside the undivided model, on gloo CPU ranks.

pip install "pipeloom[megatron]"
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from pipeloom.runtime.launch.processes import launch

from .on_core import ENOUGH
from .on_vision import Vision, run_all

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed"),
    # Megatron Core says what it has not found, such as Transformer Engine.
    pytest.mark.filterwarnings("ignore"),
]
OVERLAPPED = {"overlap_grad_reduce": True}


def run(num_ranks: int, calls: list[tuple[str, tuple[Any, ...]]]) -> list[list[Any]]:
    """Return the results of calls, by rank."""
    return list(launch(run_all, num_ranks, calls, timeout_s=400.0))


def agrees(num_ranks: int, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    for found in itertools.chain.from_iterable(run(num_ranks, calls)):
        assert found["gradients"] <= ENOUGH
        assert found["losses"] <= ENOUGH


@pytest.mark.ranks
def test_gradients_are_those_of_the_undivided_model() -> None:
    agrees(
        2,
        [
            ("against_whole", (Vision(), 4, "either")),
            ("against_whole", (Vision(kind="mimo", most_images=1), 4)),
            ("against_whole", (Vision(images=(0,)), 1)),
        ],
    )


@pytest.mark.full
@pytest.mark.ranks
def test_gradients_of_many_random_plans() -> None:
    agrees(
        2,
        [
            ("against_whole", (Vision(), 30, "either")),
            ("against_whole", (Vision(encoder_chunks=2, language_chunks=2), 30)),
            ("against_whole", (Vision(kind="siglip", most_images=None, encoder_layers=(3, 1)), 30)),
            ("against_whole", (Vision(kind="mimo", language_chunks=2), 30, "either")),
            # Those of the heuristic, with costs that are measured.
            ("against_whole", (Vision(), 8, "whole", True)),
            ("against_1f1b", (Vision(variable=False), 30)),
        ],
    )


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("frozen", ["vision", "encoder", "language"])
def test_parts_that_are_not_trained(frozen: str) -> None:
    agrees(2, [("against_whole", (Vision(frozen=frozen), 5))])


@pytest.mark.full
@pytest.mark.ranks
def test_gradients_on_four_ranks() -> None:
    """Longer pipelines, in whose middle no rank reads data; tied embeddings; replicas, of which one has no images."""
    agrees(
        4,
        [
            ("against_whole", (Vision(pp=4, variable=False, reads_everywhere=False), 10)),
            ("against_whole", (Vision(pp=4, reads_everywhere=False, encoder_chunks=2, depth=8), 10, "either")),
            ("against_1f1b", (Vision(pp=4, variable=False, reads_everywhere=False), 10)),
            ("against_whole", (Vision(pp=4, tied=True, ddp={}), 5)),
            ("against_whole", (Vision(pp=4, kind="mimo", tied=True, ddp={}), 5)),
            ("against_whole", (Vision(tied=True, ddp=OVERLAPPED), 5)),
            ("against_whole", (Vision(ddp=OVERLAPPED, images=(0, 0, 0, 1)), 10)),
        ],
    )


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="RADIO requires einops")
def test_another_vision_model() -> None:
    agrees(2, [("against_whole", (Vision(kind="radio", images=(0, 1, 2)), 4))])


@pytest.mark.full
@pytest.mark.ranks
def test_a_hybrid_language_model() -> None:
    """Its mixer is plain torch, in the stack's specification."""
    agrees(2, [("against_whole", (Vision(hybrid=True), 10))])


@pytest.mark.full
@pytest.mark.ranks
def test_weights_have_the_names_of_the_undivided_model() -> None:
    for (found,) in run(2, [("saved", (Vision(encoder_chunks=2),))]):
        assert found["names"] > 100
        assert found["differ"] == 0.0


@pytest.mark.full
@pytest.mark.ranks
def test_chunks_as_megatrons_script_asks_for_them() -> None:
    last = (
        "vp_stage: is 3, and a rank has 3 chunks; train with 3 virtual stages on each pipeline rank, "
        "--num-virtual-stages-per-pipeline-rank"
    )
    calls = [("as_the_script_builds", (vision,)) for vision in (Vision(encoder_chunks=2), Vision(language_chunks=2))]
    for more_encoder, more_language in run(2, calls):
        assert more_encoder == ["EncoderChunk", "EncoderChunk", "LanguageChunk", last]
        assert more_language == ["EncoderChunk", "LanguageChunk", "LanguageChunk", last]


@pytest.mark.full
@pytest.mark.ranks
def test_what_cannot_be_cut_or_run_ends_on_all_ranks_with_one_line() -> None:
    (first,), (second,) = run(2, [("refused", (Vision(),))])
    no_images = (
        "images, microbatch 0: are not found: the item has no tensor 'images', 'image', 'imgs', 'pixel_values'; give "
        "options.images, a function from an item to the sizes of its images"
    )
    cut = "2 stages of an encoder and 2 of a language model"
    assert first == [
        "most_images: is 0; give a whole number from 1",
        "encoder_chunks: is 3, for 6 stages of the encoder, which has 4 layers; give at most 2",
        "encoder_layers: is [1, 2], the encoder has 2 stages and 4 layers; give every stage at least one layer",
        "config.virtual_pipeline_model_parallel_size: is None, and a rank has 2 chunks of the language model; set it "
        "to 2",
        "model: returns a Linear; return a LLaVAModel or a MimoModel",
        f"rank 1: has chunks of {cut}, 2 images at once, rank 0 of {cut}, 1 images at once; call "
        "vision_language_chunks with the same arguments on all ranks",
        "stage 1: of 0..3 is on no pipeline rank; give every stage of the chain to one rank",
        "rank 0: model: has chunks of several models that are cut by modality; pass the list that "
        "vision_language_chunks returns",
        "rank 0: stages: differ from the numbers of the model's chunks; leave out options.stages",
        no_images,
        "nothing",
    ]
    assert second == [*first[:9], f"rank 0, of the first stage: {no_images}", "nothing"]
