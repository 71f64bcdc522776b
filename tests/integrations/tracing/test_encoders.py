"""Encoders of every form of input, several encoders of one model, and parts that are not read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers as hf

from pipeloom.emulator import count_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.describe import describe, document
from pipeloom.integrations.tracing.architecture import trace_config
from pipeloom.spec import Workload
from pipeloom.spec.architecture import Architecture, ModuleArchitecture
from pipeloom.spec.media_tokens import encoder_of
from tests.integrations.hand_counted import architecture_of
from tests.integrations.transformers import tiny


def tiny_config(name: str) -> tuple[dict[str, Any], int]:
    """The config of a tiny model as its library writes it, and its parameters."""
    with torch.device("meta"):
        model = tiny.CASES[name][0]()
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    return config, sum(parameter.numel() for parameter in model.parameters())


def sums(model: Architecture, length: int) -> dict[str, tuple[float, float]]:
    """Operations, and bytes that fused kernels keep, of each module."""
    found = {}
    for module in document(model, length)["modules"]:
        operations = sum(k["count"] * k["operations"]["total"] for k in module["kinds"])
        kept = sum(k["count"] * k["saved_bytes"]["fused"]["total"] for k in module["kinds"])
        found[module["name"]] = operations, kept
    return found


ONE_SIZE = {"llava": 16, "llava_onevision": 16, "gemma3": 16, "internvl": 16}
"""Patches of the images or tiles of encoders that take one size, for whose lengths alone traced counts hold."""


@pytest.mark.parametrize("name", tiny.CASES)
def test_every_family_has_the_parameters_and_operations_that_were_counted_by_hand(name: str) -> None:
    config, parameters = tiny_config(name)
    traced, read = trace_config(config, name), architecture_of(config, name)
    assert count_parameters(traced) == parameters
    found, wanted = sums(traced, 1600), sums(read, 1600)
    assert list(found) == list(wanted)
    for module in found:
        if module == "vision" and name in ONE_SIZE:
            continue
        assert found[module][0] == pytest.approx(wanted[module][0], rel=1e-9), module


def test_each_tile_of_an_image_is_a_sequence_of_its_encoder() -> None:
    """Of nine tiles too, although the model is read on images of three."""
    config, _ = tiny_config("llava_onevision")
    traced, read = (model.module("vision") for model in (trace_config(config, ""), architecture_of(config, "")))
    assert (traced.fixed_rows, traced.outputs(9 * 16)) == (16, 9 * 16)
    counts = [operations_of(module, Workload((16,) * 9)) for module in (traced, read)]
    assert counts[0] == pytest.approx(counts[1], rel=1e-9)


def operations_of(module: ModuleArchitecture, work: Workload) -> float:
    (found,) = describe(Architecture("", "", (module,)))
    return sum(kind.count * kind.operations.of(work) for kind in found.kinds)


def test_sizes_of_images_are_passed_on() -> None:
    config, _ = tiny_config("mistral3")
    traced, read = trace_config(config, ""), architecture_of(config, "")
    assert sums(traced, 1600) == sums(read, 1600)
    assert encoder_of(traced, "images").joined == encoder_of(read, "images").joined == 4


def test_recordings_are_a_module_whose_rows_are_frames() -> None:
    config, _ = tiny_config("qwen2_5_omni")
    traced, read = trace_config(config, ""), architecture_of(config, "")
    assert [(m.name, m.reads) for m in traced.modules] == [(m.name, m.reads) for m in read.modules]
    assert traced.module("lm").after == ("vision", "audio")
    assert encoder_of(traced, "audio").joined == encoder_of(read, "audio").joined == 2
    embedding, block = document(traced, 1600)["modules"][1]["kinds"][:2]
    (embedding_read, block_read) = document(read, 1600)["modules"][1]["kinds"][:2]
    # Both convolutions, which overlap, and attention within windows.
    assert embedding["operations"] == embedding_read["operations"]
    assert block["operations"] == block_read["operations"]
    assert block["saved_bytes"]["fused"] == block_read["saved_bytes"]["fused"]


def omni() -> dict[str, Any]:
    """A small Qwen3-Omni, whose audio encoder makes 13 rows of 100 frames of a spectrum and attends within 104."""
    config = json.loads(hf.Qwen3OmniMoeConfig().to_json_string())
    thinker = config["thinker_config"] | {"vision_start_token_id": 151652}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    sizes |= {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    thinker["text_config"] |= sizes | {"rope_parameters": rope}
    thinker["vision_config"] |= {"out_hidden_size": 64, "depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
    thinker["audio_config"] |= {"output_dim": 64, "encoder_layers": 2, "num_hidden_layers": 2, "d_model": 64}
    thinker["audio_config"] |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 96}
    return config | {"thinker_config": thinker}


def test_the_thinker_of_an_omni_model_is_read() -> None:
    model = trace_config(omni(), "omni")
    assert "the thinker" in model.source
    assert [m.name for m in model.modules] == ["vision", "audio", "lm"]
    audio = document(model, 1600)["modules"][1]
    assert audio["unit"] == "frame"
    assert audio["rows_joined"] == 4  # 50 frames become 13 tokens
    (window,) = audio["kinds"][1]["operations"]["each_window_pair"]
    assert window[:2] == [400, False]  # 104 rows, in frames


@pytest.mark.parametrize("kind", ["DeepseekVL", "GraniteDocling", "PaddleOCRVL"])
def test_encoders_are_read_in_the_forms_in_which_training_takes_them(kind: str) -> None:
    """A method of the inner model alone, images with a mask of images, and a loop over images."""
    config = getattr(hf, f"{kind}Config")()
    with torch.device("meta"):
        model = getattr(hf, f"{kind}ForConditionalGeneration")._from_config(config)
    traced = trace_config(json.loads(config.to_json_string()), kind)
    assert [module.reads for module in traced.modules] == ["images", "sequence"]
    assert count_parameters(traced) == sum(p.numel() for p in model.parameters())


def test_an_encoder_whose_image_size_is_not_known_is_named() -> None:
    config = json.loads(hf.UnlimitedOcrConfig().to_json_string())
    with pytest.raises(InputError, match=r"has an encoder \(vision\) whose configuration has no image_size"):
        trace_config(config, "")


def test_a_part_whose_inputs_are_not_known_is_named() -> None:
    config = json.loads(hf.GraniteSpeechConfig().to_json_string())
    with pytest.raises(InputError, match="has a part with a encoder_config, which is not read"):
        trace_config(config, "")


def test_an_encoder_without_a_known_interface_is_named() -> None:
    config = json.loads(hf.MllamaConfig().to_json_string())
    with pytest.raises(InputError, match="has a vision_config, and no get_image_features"):
        trace_config(config, "")
